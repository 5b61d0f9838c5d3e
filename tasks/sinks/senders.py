"""Sends announcements to sinks in processes that can be killed: each runs `python -m tasks.sinks.senders`.

A process of its own has its own environment, can be killed when a sink hangs, and takes leftovers of client libraries
with it. It reads lines of JSON, answers each with a line, and ends when its parent dies, since then its standard input
is closed. A series of records shares processes: importing a tracker's client takes seconds.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Self

from pydantic import BaseModel

from resources.errors import AssayError, error_of
from tasks.errors import SinkFailed
from tasks.sinks.announcement import Announcement
from tasks.spec.sinks import SINKS, Access, Sink

POLL_SECONDS = 0.1
# New objects before a collection; at Python's 700, collections take a tenth of the import of a tracker's client.
_GARBAGE_THRESHOLD = 50_000


class _Job(BaseModel):
    module: str
    sink: dict[str, Any]
    announcement: Announcement
    arguments: dict[str, Any]


class Senders:
    """The sender processes of a series of announcements; idle processes end with the `with` block. Thread-safe: a
    process handles a single announcement at a time; if none is idle, another is started."""

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().end()

    def send(self, announcement: Announcement, sink: Sink, access: Access, *, over: Callable[[], bool]) -> str | None:
        """Sends through an idle or new process and returns the address at the sink; None if the sink ignores it. After
        an error, a crash, or once `over` returns True, the process is killed with its children. Raises AssayError if
        the sink does not have the announcement."""
        process = self._take(sink, access) or _Process(sink, access)
        answer: dict[str, Any] = {}
        try:
            answer = process.answer_to(announcement, over)
        finally:
            if "where" in answer and sink.client_lasts:
                self._idle.append(process)
            else:
                process.end()
        if "where" not in answer:
            raise error_of(answer)
        return answer["where"]

    def _take(self, sink: Sink, access: Access) -> _Process | None:
        with self._lock:
            same = (process for process in self._idle if (process.sink, process.access) == (sink, access))
            if (process := next(same, None)) is None:
                return None
            self._idle.remove(process)
        if process.runs:
            return process
        process.end()
        return None


class _Process:
    def __init__(self, sink: Sink, access: Access) -> None:
        self.sink = sink
        self.access = access
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  not a pipe: what a library leaves running would hold it
        self._process = subprocess.Popen(
            # -P: modules are not imported from the working folder.
            [sys.executable, "-P", "-m", "tasks.sinks.senders"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=access.variables,
            text=True,
            start_new_session=True,
        )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self._errors, self._process:
            pass

    def answer_to(self, announcement: Announcement, over: Callable[[], bool]) -> dict[str, Any]:
        errors_before = os.fstat(self._errors.fileno()).st_size
        with ThreadPoolExecutor(1, thread_name_prefix="sink-answer") as reader:
            line = reader.submit(self._exchange, announcement)
            while not line.done() and not over():
                with suppress(TimeoutError):
                    line.result(timeout=POLL_SECONDS)
            if not line.done():
                self._process.kill()
                raise SinkFailed(
                    expected=f"{self.sink.name} to take it within {self.sink.timeout_seconds:g} s",
                    found="no answer, so it was given up",
                    remedy="see that it is up and reachable, or raise the sink's timeout_seconds; then: assay publish",
                )
        try:
            return json.loads(line.result())
        except ValueError:
            self._errors.seek(errors_before)
            tail = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise SinkFailed(
                expected=f"an answer from the process that sends to {self.sink.name}",
                found=tail[0] if tail else f"it ended with exit code {self._process.wait()}",
                remedy="send it again: assay publish",
            ) from None

    def _exchange(self, announcement: Announcement) -> str:
        job = _Job(
            module=SINKS[self.sink.kind],
            sink=self.sink.model_dump(mode="json"),
            announcement=announcement,
            arguments=self.access.arguments,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(job.model_dump_json() + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline()


def _answer_to(line: str) -> dict[str, Any]:
    job = _Job.model_validate_json(line)
    try:
        module = import_module(job.module)
        return {"where": module.send(job.announcement, module.CONFIG.model_validate(job.sink), **job.arguments)}
    except AssayError as error:
        return error.as_values()
    except Exception as error:  # noqa: BLE001  a boundary: a sink that fails never fails a cell
        return SinkFailed(
            expected=f"{job.sink['kind']} to take the record",
            found=f"{type(error).__name__}: {error}",
            remedy="mend what it says, then: assay publish",
        ).as_values()


def _read(jobs: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    with suppress(ProcessLookupError):  # started manually, this process leads no group
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _answer_jobs() -> None:
    gc.set_threshold(_GARBAGE_THRESHOLD)
    answers = os.fdopen(os.dup(1), "w")  # output of libraries goes to standard error
    os.dup2(2, 1)
    jobs: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        answers.write(json.dumps(_answer_to(jobs.get())) + "\n")
        answers.flush()


if __name__ == "__main__":
    _answer_jobs()
