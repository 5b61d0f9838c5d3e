"""Progress of an evaluation or a generation, for listeners: the command line's live view, and Prefect's log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from tasks.prefect_server.lazy import run_logger
from tasks.records.verdicts import Verdict


@dataclass(frozen=True)
class Event:
    """An event as a line of text."""

    text: str


@dataclass(frozen=True)
class RaisedAlert(Event):
    """An alert as a line of text; the command also shows it at the end."""


@dataclass(frozen=True)
class Notice(Event):
    """An event that stays on the screen."""


@dataclass(frozen=True)
class OfCell:
    """An update about a cell; `cell` counts from 1. In a generation the cells are its checkpoints."""

    checkpoint: str
    cell: int
    cells: int


@dataclass(frozen=True)
class CellProgress(OfCell):
    """The progress of a cell: `done` of `total` requests in the current stage. `counts` are the pool's: answered, held,
    journal_hits, prompt_tokens and so on; empty if they are not counted."""

    stage: str
    done: int
    total: int
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswersProgress(OfCell):
    """The answers of a checkpoint in a generation: `done` of `total`."""

    done: int
    total: int
    errors: int
    rows_per_second: float
    tokens_per_second: float
    seconds_left: float | None

    @property
    def described(self) -> str:
        errors = f", {self.errors:,} errors" if self.errors else ""
        rates = f"{self.rows_per_second:,.1f} rows/s, {self.tokens_per_second:,.0f} tokens/s"
        return f"{self.checkpoint} · {self.done:,}/{self.total:,} answers{errors} · {rates}"


@dataclass(frozen=True)
class CellDone(OfCell):
    """The end of a cell."""

    status: str
    seconds: float


@dataclass(frozen=True)
class Judged:
    """The verdict of a gate."""

    verdict: Verdict


Update = Event | CellProgress | AnswersProgress | CellDone | Judged
_listener: ContextVar[Callable[[Update], None] | None] = ContextVar("progress_listener", default=None)


@contextmanager
def listening(listener: Callable[[Update], None]) -> Iterator[None]:
    """Sends each update made inside the block, in this context, to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def reported() -> Callable[[Update], None]:
    """Returns the current listener, which stays valid when another listener replaces it."""
    return _listener.get() or (lambda update: None)


def report(update: Update) -> None:
    """Sends an update to the listener, if any."""
    if (listener := _listener.get()) is not None:
        listener(update)


def report_event(text: str, kind: type[Event] = Event) -> None:
    """Sends an event to the listener, and writes it to the log of the current Prefect run."""
    report(kind(text))
    if (log := run_logger()) is not None:
        log.info(text)
