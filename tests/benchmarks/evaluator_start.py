"""Seconds from starting an evaluator to its first request: Assay's warm runner against the `lm_eval` command line.

    make bench NAME=evaluator_start

Both sides evaluate the 2 bundled benchmarks on the same endpoint, a deterministic engine that records the arrival of
the first completion request. Ours is a cell as a flow runs it: from the call that prepares its folder and submits the
job to a runner that has lm-eval imported, over the fork, to the request. Theirs is the start of the `lm_eval` process,
with the folder of the benchmarks as its include path, to the request; the command line first reads the index of all
benchmarks of lm-eval, regardless of the selection. The sides take turns in the same run, and medians count. The
runner's own start, once per run of a flow, is printed separately; it happens while the engine starts.

Data-set caches and byte code are warm on both sides: a run of each is not counted. Both must score the same.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a script, which has only this folder on its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aiohttp import web
from ours import OFFLINE
from series import BENCHMARKS, Scores, lm_eval_command, our_scores, their_scores
from side_by_side import (
    BENCH,
    Comparison,
    end_children_on_sigterm,
    environment_of_a_user,
    give_up,
    installed_version,
    interleaved,
    print_comparisons,
    run_timed,
    say,
)

from fakes.engine import FakeEngine
from fakes.tokenizers import write_byte_tokenizer
from pools.endpoint import RunningModel
from resources.backends.local.client import LocalClient
from resources.environments.environments import ensure_environment
from resources.jobs.jobs import JobHandle
from resources.warm.fork_server import WarmProgram
from tasks.evaluators.environments import LM_EVAL
from tasks.evaluators.harness import run_harness, warmed
from tasks.evaluators.lm_eval.evaluator import EVALUATOR
from tasks.spec.benchmarks import BUNDLED
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

WORK = BENCH / "evaluator-start"
SIDES = ("ours", "theirs")
MODEL = "tiny"
_QUESTIONS = 20
_CONTEXT_TOKENS = 2048
_PRELOAD_SECONDS = 300.0
_POLL_SECONDS = 0.05


@dataclass
class NotingEngine(FakeEngine):
    """Records when the first completion request after `forget_first_request` arrives."""

    first_at: float | None = None

    def forget_first_request(self) -> None:
        self.first_at = None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self.first_at is None:
            self.first_at = time.monotonic()
        return await super()._complete(request)


@dataclass(frozen=True)
class Start:
    """Wall seconds from the start to the first request, and to the scores."""

    first_request: float
    whole: float
    scores: Scores


@contextmanager
def engine_in_a_thread() -> Iterator[NotingEngine]:
    """Runs an engine in a thread, so that it answers while this thread waits for processes."""
    engine = NotingEngine(models=(MODEL,), max_model_len=_CONTEXT_TOKENS)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="engine", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def timed(engine: NotingEngine, run: Callable[[], Scores]) -> Start:
    engine.forget_first_request()
    began = time.monotonic()
    scores = run()
    whole = time.monotonic() - began
    if engine.first_at is None:
        give_up("no request has arrived")
    return Start(engine.first_at - began, whole, scores)


def evaluation() -> EvaluationConfig:
    evals = tuple(EvalTaskConfig(name=name) for name in BENCHMARKS)
    return EvaluationConfig(
        model_path="checkpoint", base_url="http://unused/v1", evals=evals, max_eval_instances=_QUESTIONS
    )


def our_cell(
    engine: NotingEngine, tokenizer: Path, output: Path, *, server: WarmProgram, client: LocalClient
) -> Scores:
    """Runs a cell as a flow does on a warm runner."""
    running = RunningModel(
        base_url=f"{engine.url}/v1",
        model=MODEL,
        tokenizer=str(tokenizer),
        capacity=32,
        prompt_logprobs=True,
        request_timeout_seconds=600.0,
        max_model_len=_CONTEXT_TOKENS,
    )
    python = ensure_environment(LM_EVAL).python
    parsed = run_harness(EVALUATOR, running, evaluation(), output=output, python=python, client=client, server=server)
    return our_scores({0: {"metrics": [metric.model_dump() for metric in parsed.metrics]}})


def their_command(engine: NotingEngine, tokenizer: Path, folder: Path) -> Scores:
    """Runs the command line, as in `series`."""
    run_timed(
        lm_eval_command(tokenizer, engine.url, output=folder / "results", limit=_QUESTIONS),
        log=folder / "lm_eval.log",
        env=environment_of_a_user({**OFFLINE, "HF_HOME": str(BENCH / "cache" / "hub"), "OPENAI_API_KEY": "none"}),
        cwd=BUNDLED,
    )
    return their_scores(folder, 0)


def wait_until_preloaded(job: JobHandle, began: float) -> float:
    while "preloaded in" not in job.logs():
        if time.monotonic() - began > _PRELOAD_SECONDS:
            give_up(f"the runner did not start:\n{job.logs()}")
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - began


def measure(rounds: int) -> tuple[dict[str, list[Start]], float]:
    """Runs both sides in turns; returns them and the seconds of the warm runner's own start."""
    starts: dict[str, list[Start]] = {side: [] for side in SIDES}
    client = LocalClient(WORK / "jobs")
    evaluator, config = EVALUATOR, evaluation()
    tokenizer = write_byte_tokenizer(WORK / "tokenizer")
    python = ensure_environment(LM_EVAL).python
    began = time.monotonic()
    with engine_in_a_thread() as engine, warmed(evaluator, [config], python=python, client=client) as server:
        if server is None:
            give_up("there is no warm runner for this evaluator")
        runner_seconds = wait_until_preloaded(client.attach(server.job_id), began)
        for turn, side in enumerate(interleaved(SIDES, rounds + 1)):
            folder = WORK / f"{turn}-{side}"
            if side == "ours":
                start = timed(engine, lambda at=folder: our_cell(engine, tokenizer, at, server=server, client=client))
            else:
                start = timed(engine, lambda at=folder: their_command(engine, tokenizer, at))
            say(f"{side}: {start.first_request:.2f} s to the first request, {start.whole:.2f} s to the scores")
            if turn >= len(SIDES):  # the first run of each is not counted
                starts[side].append(start)
            check_same_scores(start, starts)
    client.shutdown()
    return starts, runner_seconds


def check_same_scores(start: Start, starts: dict[str, list[Start]]) -> None:
    """Ends the script if a run's scores differ from those of earlier runs of either side."""
    for other in (run for side in starts.values() for run in side):
        if start.scores != other.scores or not start.scores:
            give_up(f"scores differ: {start.scores} and {other.scores}")


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each side (default: 7)")
    given = parser.parse_args()
    ensure_environment(LM_EVAL, on_progress=say)
    shutil.rmtree(WORK, ignore_errors=True)
    starts, runner_seconds = measure(given.rounds)
    first = {side: [run.first_request for run in runs] for side, runs in starts.items()}
    whole = {side: statistics.median(run.whole for run in runs) for side, runs in starts.items()}
    facts = {
        "rounds": given.rounds,
        "benchmarks": len(BENCHMARKS),
        "seconds": {side: [round(value, 3) for value in each] for side, each in first.items()},
        "to_the_scores_seconds": {side: round(value, 3) for side, value in whole.items()},
        "runner_start_seconds": round(runner_seconds, 2),
        "scores_identical": True,
        "lm_eval": installed_version("lm-eval", "lm_eval"),
    }
    ours, theirs = (statistics.median(first[side]) for side in SIDES)
    compared = Comparison("evaluator_start", "seconds to the first request", ours, theirs, better="less", facts=facts)
    print_comparisons(f"The warm runner itself starts in {runner_seconds:.1f} s", [compared])


if __name__ == "__main__":
    main()
