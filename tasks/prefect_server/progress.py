"""Progress of an evaluation or a generation, for its listeners: the command line's live view, and Prefect's log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tasks.prefect_server.lazy import run_logger

if TYPE_CHECKING:
    from tasks.gates.reasons import Verdict


@dataclass(frozen=True)
class Event:
    """Something that happened, in a line."""

    text: str


@dataclass(frozen=True)
class Raised(Event):
    """An alert, in a line: the command shows it in the end too."""


@dataclass(frozen=True)
class Notice(Event):
    """An event that is to stay on the screen."""


@dataclass(frozen=True)
class CellProgress:
    """The progress of one cell: requests `done` of `total` in the present stage; cells are counted from 1.

    `counts` are the pool's: answered, held, journal_hits, prompt_tokens and so on; empty where nobody counts.
    """

    checkpoint: str
    cell: int
    cells: int
    stage: str
    done: int
    total: int
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswersProgress:
    """The answers of one checkpoint in a generation: `done` of `total`; checkpoints are counted from 1."""

    checkpoint: str
    cell: int
    cells: int
    done: int
    total: int
    errors: int
    rows_per_second: float
    tokens_per_second: float
    seconds_left: float | None

    @property
    def described(self) -> str:
        """The number of answers and the rates, in a line."""
        errors = f", {self.errors:,} errors" if self.errors else ""
        rates = f"{self.rows_per_second:,.1f} rows/s, {self.tokens_per_second:,.0f} tokens/s"
        return f"{self.checkpoint} · {self.done:,}/{self.total:,} answers{errors} · {rates}"


@dataclass(frozen=True)
class CellDone:
    """A cell ended."""

    checkpoint: str
    cell: int
    cells: int
    status: str
    seconds: float


@dataclass(frozen=True)
class Judged:
    """A gate said GO or NO-GO."""

    verdict: Verdict


Update = Event | CellProgress | AnswersProgress | CellDone | Judged
_listener: ContextVar[Callable[[Update], None] | None] = ContextVar("progress_listener", default=None)


@contextmanager
def listening(listener: Callable[[Update], None]) -> Iterator[None]:
    """Sends every update made inside the block, in this context, to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def reported() -> Callable[[Update], None]:
    """Returns the call that tells the present listener, also where another one takes its place."""
    return _listener.get() or (lambda update: None)


def report(update: Update) -> None:
    """Tells the listener, if there is one."""
    if (listener := _listener.get()) is not None:
        listener(update)


def report_event(text: str, kind: type[Event] = Event) -> None:
    """Tells the listener, and writes it to the log of the Prefect run we are in."""
    report(kind(text))
    if (log := run_logger()) is not None:
        log.info(text)
