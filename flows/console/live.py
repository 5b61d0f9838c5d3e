"""The live view of an evaluation in a terminal: checkpoint, benchmark, progress and time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flows.console.console import ERR
from tasks.prefect_server.progress import AnswersProgress, CellDone, CellProgress, Event, Notice, Update

_SECONDS_BETWEEN_PLAIN_LINES = 5.0


@dataclass
class Progress:
    """The known state of an evaluation. `clock` gives seconds."""

    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    event: str = "starting"
    running: dict[int, CellProgress | AnswersProgress] = field(default_factory=dict)
    finished_seconds: list[float] = field(default_factory=list)
    cells: int = 0

    def __post_init__(self) -> None:
        self.began = self.clock()

    def take(self, update: Update) -> None:
        match update:
            case Event(text):
                self.event = text
            case CellProgress() | AnswersProgress():
                self.running[update.cell] = update
                self.cells = update.cells
            case CellDone():
                self.finished_seconds.append(update.seconds)
                self.cells = update.cells
                self.running.pop(update.cell, None)
                self.event = f"{update.checkpoint}: {update.status} in {update.seconds:.1f} s"

    def seconds_left(self) -> float | None:
        """Estimates the seconds for remaining cells (in a generation, answers); None before the first has finished."""
        if isinstance(self.cell, AnswersProgress):
            return self.cell.seconds_left
        if not self.finished_seconds:
            return None
        # The first cell includes the engine's start, so later cells predict better.
        sample = self.finished_seconds[1:] or self.finished_seconds
        mean = sum(sample) / len(sample)
        left = mean * (self.cells - len(self.finished_seconds))
        left -= mean * sum(_share(cell) for cell in self.running.values()) / 2
        return max(0.0, left / max(1, len(self.running)))

    @property
    def cell(self) -> CellProgress | AnswersProgress | None:
        """The running cell with the largest share done."""
        return max(self.running.values(), key=lambda cell: (_share(cell), -cell.cell), default=None)

    def describe(self) -> str:
        cell = self.cell
        if cell is None:
            return self.describe_event()
        if isinstance(cell, AnswersProgress):
            return f"[{cell.cell}/{cell.cells}] {cell.described} · {self._times()}"
        counted = f" {cell.done}/{cell.total} requests" if cell.total else ""
        return f"[{cell.cell}/{cell.cells}] {cell.checkpoint} · {cell.stage}{counted}{_counts(cell)} · {self._times()}"

    def describe_event(self) -> str:
        return f"{self.event} · {self._times()}"

    def _times(self) -> str:
        elapsed = f"{_minutes(self.clock() - self.began)} elapsed"
        left = self.seconds_left()
        return elapsed if left is None else f"{elapsed}, about {_minutes(left)} left"

    def render(self) -> RenderableType:
        """Returns a bar and two lines; a single line while there are no cells yet."""
        described = Text(self.describe(), overflow="ellipsis", no_wrap=True)
        if not self.cells:
            return described
        grid = Table.grid(padding=(0, 1))
        total = max(1, self.cells)
        share = sum(_share(cell) for cell in self.running.values())
        grid.add_row(
            ProgressBar(total=total, completed=len(self.finished_seconds) + share, width=30),
            Text(f"{len(self.finished_seconds)}/{self.cells} cells"),
        )
        lines = [grid, described] if self.cell is None else [grid, described, Text(self.event, style="dim")]
        return Group(*lines)


def _share(cell: CellProgress | AnswersProgress) -> float:
    return cell.done / cell.total if cell.total else 0.0


def _counts(cell: CellProgress) -> str:
    words = {"journal_hits": "from the journal", "retried": "sent again", "server_errors": "failed"}
    counted = [f"{cell.counts[name]} {word}" for name, word in words.items() if cell.counts.get(name)]
    tokens = cell.counts.get("prompt_tokens", 0) + cell.counts.get("completion_tokens", 0)
    return "".join(f", {part}" for part in [*counted, *([f"{tokens:,} tokens"] if tokens else [])])


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@contextmanager
def live_view(console: Console = ERR) -> Iterator[Callable[[Update], None]]:
    """Shows progress during the block: redrawn in place on a terminal, else as lines at least 5 s apart."""
    progress, printed_at = Progress(), 0.0

    def take(update: Update) -> None:
        nonlocal printed_at
        if isinstance(update, Notice):
            console.print(update.text, highlight=False, markup=False, soft_wrap=True)
            return
        progress.take(update)
        is_due = isinstance(update, CellDone) or time.monotonic() - printed_at >= _SECONDS_BETWEEN_PLAIN_LINES
        if is_due and not console.is_terminal:
            printed_at = time.monotonic()
            line = progress.describe_event() if isinstance(update, CellDone) else progress.describe()
            console.print(line, highlight=False, markup=False)

    with (
        Live(get_renderable=progress.render, console=console, refresh_per_second=4, transient=True)
        if console.is_terminal
        else nullcontext()
    ):
        yield take
