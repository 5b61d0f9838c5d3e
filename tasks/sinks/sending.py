"""The process that sends to a sink: `python -m tasks.sinks.sending`, started by `senders`.

A separate process can be killed when a sink hangs, has its own environment, and takes leftovers of client libraries
with it. It reads lines of JSON (`Job`), answers each with a line (`Answer`), and exits when its parent dies, since then
its standard input is closed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
from typing import Any

from pydantic import BaseModel, ConfigDict

from resources.errors import AssayError
from tasks.errors import SinkFailed
from tasks.sinks.announcement import Announcement

# New objects before a collection; at Python's 700, collections take a tenth of the import of a tracker's client.
_GARBAGE_THRESHOLD = 50_000


class Job(BaseModel):
    """An announcement and the sink to send it to."""

    model_config = ConfigDict(frozen=True)

    module: str
    """The sink's module, which has `CONFIG` and `send`."""
    sink: dict[str, Any]
    announcement: Announcement
    arguments: dict[str, Any] = {}
    """Further arguments of `send`, with credentials."""


class Answer(BaseModel):
    """Outcome of a job: the address of the record at the sink, or the error."""

    model_config = ConfigDict(frozen=True)

    where: str | None = None
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None


def send(job: Job) -> str | None:
    """Sends a job and returns its address at the sink; None if the sink ignores it. Raises AssayError on failure."""
    sink = import_module(job.module)
    return sink.send(job.announcement, sink.CONFIG.model_validate(job.sink), **job.arguments)


def answer_to(job: Job) -> Answer:
    """Sends a job and returns its outcome; raises nothing."""
    try:
        return Answer(where=send(job))
    except AssayError as error:
        return Answer(expected=error.expected, found=error.found, remedy=error.remedy)
    except Exception as error:  # noqa: BLE001  a boundary: a sink that fails never fails a cell
        unknown = SinkFailed(
            expected=f"{job.sink['kind']} to take the record",
            found=f"{type(error).__name__}: {error}",
            remedy="mend what it says, then: assay publish",
        )
        return Answer(expected=unknown.expected, found=unknown.found, remedy=unknown.remedy)


def _read(jobs: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    with suppress(ProcessLookupError):  # started manually, this process leads no group
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Answers the jobs on standard input. Standard output is reserved for answers; libraries' output goes to stderr."""
    gc.set_threshold(_GARBAGE_THRESHOLD)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        answers.write(answer_to(Job.model_validate_json(jobs.get())).model_dump_json() + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
