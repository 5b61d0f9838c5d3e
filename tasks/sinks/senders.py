"""The processes that send to sinks, reused for the series of records: importing a tracker's client takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Self

from pydantic import ValidationError

from tasks.errors import SinkFailed
from tasks.sinks.announcement import Announcement
from tasks.sinks.credentials import Credentials
from tasks.sinks.sending import Answer, Job
from tasks.spec.sinks import SINKS, Sink

POLL_SECONDS = 0.1


@dataclass(frozen=True, eq=False)
class Sending:
    """An announcement in transit to a sink. `stop` is set when its result is no longer needed."""

    announcement: Announcement
    sink: Sink
    stop: Event
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "deadline", time.monotonic() + self.sink.timeout_seconds)

    @property
    def over(self) -> bool:
        return self.stop.is_set() or time.monotonic() > self.deadline


class Senders:
    """The sender processes of a series of announcements; idle processes end with the `with` block. Thread-safe: a
    process handles a single announcement at a time; if none is idle, another is started."""

    def __init__(self) -> None:
        self._idle: list[_Sender] = []
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().end()

    def ask(self, sending: Sending, credentials: Credentials) -> Answer:
        """Sends through an idle or new process; after a timeout, crash or error, it is killed with its children."""
        sender = self._take(sending.sink, credentials) or _Sender(sending.sink, credentials)
        good = False
        try:
            answer = sender.ask(sending)
            good = answer.found is None
        finally:
            if good and sending.sink.client_lasts:
                self._idle.append(sender)
            else:
                sender.end()
        return answer

    def _take(self, sink: Sink, credentials: Credentials) -> _Sender | None:
        with self._lock:
            same = (sender for sender in self._idle if (sender.sink, sender.credentials) == (sink, credentials))
            if (sender := next(same, None)) is None:
                return None
            self._idle.remove(sender)
        if sender.runs:
            return sender
        sender.end()
        return None


class _Sender:
    def __init__(self, sink: Sink, credentials: Credentials) -> None:
        self.sink = sink
        self.credentials = credentials
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  not a pipe: what a library leaves running would hold it
        self._process = subprocess.Popen(
            # -P: modules are not imported from the working folder.
            [sys.executable, "-P", "-m", "tasks.sinks.sending"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=credentials.variables,
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

    def ask(self, sending: Sending) -> Answer:
        errors_before = os.fstat(self._errors.fileno()).st_size
        with ThreadPoolExecutor(1, thread_name_prefix="sink-answer") as reader:
            line: Future[str] = reader.submit(self._exchange, sending.announcement)
            while not line.done() and not sending.over:
                with suppress(TimeoutError):
                    line.result(timeout=POLL_SECONDS)
            if not line.done():
                self._process.kill()
                raise SinkFailed(
                    expected=f"{sending.sink.name} to take it within {sending.sink.timeout_seconds:g} s",
                    found="no answer, so it was given up",
                    remedy="see that it is up and reachable, or raise the sink's timeout_seconds; then: assay publish",
                )
        try:
            return Answer.model_validate_json(line.result())
        except ValidationError:
            self._errors.seek(errors_before)
            tail = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise SinkFailed(
                expected=f"an answer from the process that sends to {sending.sink.name}",
                found=tail[0] if tail else f"it ended with exit code {self._process.wait()}",
                remedy="send it again: assay publish",
            ) from None

    def _exchange(self, announcement: Announcement) -> str:
        job = Job(
            module=SINKS[self.sink.kind],
            sink=self.sink.model_dump(mode="json"),
            announcement=announcement,
            arguments=self.credentials.arguments,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(job.model_dump_json() + "\n")
            self._process.stdin.flush()
        return self._process.stdout.readline()
