"""The live view: its text at each moment."""

from __future__ import annotations

import io

from rich.console import Console

from flows.console.live import Progress, live_view
from tasks.prefect_server.progress import CellDone, CellProgress, Event


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_progress_names_checkpoint_benchmark_requests_and_time_left() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.take(Event("starting 1 engine"))
    assert progress.describe() == "starting 1 engine · 0:00 elapsed"
    progress.take(CellProgress("run-10", 1, 3, "demo_facts", 120, 480))
    clock.seconds = 25
    assert progress.describe() == "[1/3] run-10 · demo_facts 120/480 requests · 0:25 elapsed"
    progress.take(CellDone("run-10", 1, 3, "succeeded", 40.0))
    assert progress.describe() == "run-10: succeeded in 40.0 s · 0:25 elapsed, about 1:20 left"
    progress.take(CellDone("run-20", 2, 3, "succeeded", 6.0))
    # The first cell includes the start of the engine: only later cells predict the remaining time.
    assert progress.seconds_left() == 6.0
    progress.take(CellDone("run-30", 3, 3, "withheld", 6.0))
    assert progress.seconds_left() == 0.0
    assert "run-30: withheld" in progress.describe()


def test_progress_of_parallel_cells_shows_the_farthest_and_pool_counts() -> None:
    progress = Progress(Clock())
    counts = {"journal_hits": 30, "held": 2, "retried": 1, "prompt_tokens": 4000, "completion_tokens": 500}
    progress.take(CellProgress("run-10", 1, 3, "demo_facts", 400, 480, counts))
    progress.take(CellProgress("run-20", 2, 3, "starting lm_eval", 0, 0))
    description = "run-10 · demo_facts 400/480 requests, 30 from the journal, 1 sent again, 4,500 tokens"
    assert description in progress.describe()
    progress.take(CellDone("run-10", 1, 3, "succeeded", 4.0))
    assert progress.describe().startswith("[2/3] run-20 · starting lm_eval")
    assert progress.describe_event().startswith("run-10: succeeded in 4.0 s")


def test_view_without_a_terminal_prints_every_finished_cell() -> None:
    output = io.StringIO()
    with live_view(Console(file=output, width=200)) as take:
        take(Event("planning"))
        for request in range(50):
            take(CellProgress("run-10", 1, 1, "demo_facts", request, 50))
        take(CellDone("run-10", 1, 1, "succeeded", 4.0))
    lines = output.getvalue().splitlines()
    assert "run-10: succeeded in 4.0 s" in lines[-1]
    assert len(lines) < 5
