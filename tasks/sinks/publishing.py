"""Sending records to their sinks: each bounded in time, none able to fail a cell or to stop the others.

What was sent stands in the record. What was not is sent by the next evaluation, or by `assay publish`; nothing is
tried again here beyond what a sink's own client does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from threading import Event
from typing import IO

from pydantic import ValidationError

from resources.errors import AssayError, SinkFailed
from resources.settings import settings
from tasks.records.record import Record, SinkState, now
from tasks.sinks.announcement import Announcement
from tasks.sinks.credentials import Credentials, credentials_of, scrub
from tasks.sinks.sending import Answer, Job
from tasks.spec.sinks import SINKS, Sink

_REASON_CHARACTERS = 800
_SENDING_POLL_SECONDS = 0.1


def missing_sinks(record: Record, sinks: Sequence[Sink]) -> tuple[Sink, ...]:
    """Those of some sinks that a record is yet to be sent to; none for a record without a success."""
    if not record.succeeded:
        return ()
    have = {name for name, state in record.sinks.items() if state.status == "published"}
    return tuple(sink for sink in sinks if sink.name not in have)


def publish_record(record: Record, cell_uri: str, sinks: Sequence[Sink]) -> dict[str, SinkState]:
    """Sends a record to some sinks, side by side, and says what became of it at each; raises nothing.

    A record without a success is sent nowhere: the next run tries its cell again, and the report shows its status.
    """
    if not record.succeeded or not sinks:
        return {}
    return _publish(Announcement.of(record, cell_uri), sinks)


def publish_report(record: Record, cell_uri: str, sinks: Sequence[Sink]) -> dict[str, SinkState]:
    """Sends the report over the run that a record belongs to; what became of it, at those sinks that take reports."""
    if not sinks:
        return {}
    states = _publish(Announcement.of(record, cell_uri).of_report(), sinks)
    return {name: state for name, state in states.items() if state.status == "failed" or state.where is not None}


@dataclass(frozen=True, eq=False)
class _Sending:
    """One announcement on its way to one sink. `stop` is set when nobody waits for it any more."""

    announcement: Announcement
    sink: Sink
    stop: Event
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "deadline", time.monotonic() + self.sink.timeout_seconds)

    @property
    def over(self) -> bool:
        """Tells if the time is up, or the publishing was stopped."""
        return self.stop.is_set() or time.monotonic() > self.deadline


def _publish(announcement: Announcement, sinks: Sequence[Sink]) -> dict[str, SinkState]:
    stop = Event()
    with ThreadPoolExecutor(len(sinks), thread_name_prefix="sink") as threads:
        try:
            # The context carries the Prefect run, whose server has the blocks.
            running = [threads.submit(copy_context().run, _state, announcement, sink, stop) for sink in sinks]
            return {sink.name: future.result() for sink, future in zip(sinks, running, strict=True)}
        except BaseException:  # a signal: what is being sent is given up
            stop.set()
            raise


def _state(announcement: Announcement, sink: Sink, stop: Event) -> SinkState:
    scrubbed: Callable[[str], str] = _scrubbed_by_looks
    try:
        credentials = credentials_of(sink)
        scrubbed = credentials.scrubbed
        with _turn(_Sending(announcement, sink, stop)):
            # The wait for a turn has a wall clock of its own.
            answer = _ask(_Sending(announcement, sink, stop), credentials)
        if answer.found is not None:
            raise SinkFailed(expected=answer.expected or "", found=answer.found, remedy=answer.remedy or "")
        return SinkState(status="published", where=scrubbed(answer.where) if answer.where else None, at=now())
    except AssayError as error:
        reason = scrubbed(str(error))
    except Exception as error:  # noqa: BLE001 - the boundary: whatever a sink does, the cell has its record
        reason = scrubbed(f"{type(error).__name__}: {error}")
    return SinkState(status="failed", reason=reason[:_REASON_CHARACTERS], at=now())


def _scrubbed_by_looks(text: str) -> str:
    return scrub(text, ())


@contextmanager
def _turn(sending: _Sending) -> Iterator[None]:
    """One at a time for a series at a sink, on this machine: a tracker numbers a run's lines as one writer sends them.

    Raises:
        SinkFailed: others took longer than this sink's wall clock.
    """
    sink = sending.sink
    name = hashlib.sha256(f"{sending.announcement.series.id} {sink.name}".encode()).hexdigest()[:24]
    path = settings().cache_dir / "publishing" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if sending.over:
                    raise SinkFailed(
                        expected=f"a turn at {sink.name} within {sink.timeout_seconds:g} s",
                        found="other records of the same run are still being sent",
                        remedy="send this one later: assay publish",
                    ) from None
                time.sleep(_SENDING_POLL_SECONDS)
        yield


def _ask(sending: _Sending, credentials: Credentials) -> Answer:
    """Lets a process of its own send it, and ends that process with all it started.

    Raises:
        SinkFailed: it did not end in time, or without an answer.
    """
    job = Job(
        module=SINKS[sending.sink.kind],
        sink=sending.sink.model_dump(mode="json"),
        announcement=sending.announcement,
        arguments=credentials.arguments,
    )
    with tempfile.TemporaryFile() as errors:  # not a pipe: what a library leaves running would hold it open
        process = subprocess.Popen(
            # -P: modules are not looked for in the folder we are in.
            [sys.executable, "-P", "-m", "tasks.sinks.sending"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=credentials.variables,
            text=True,
            start_new_session=True,
        )
        try:
            return _answer(process, job, sending, errors)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answer(process: subprocess.Popen[str], job: Job, sending: _Sending, errors: IO[bytes]) -> Answer:
    with ThreadPoolExecutor(1, thread_name_prefix="sink-answer") as reader:
        line: Future[str] = reader.submit(_exchange, process, job)
        while not line.done() and not sending.over:
            with suppress(TimeoutError):
                line.result(timeout=_SENDING_POLL_SECONDS)
        if not line.done():
            process.kill()
            raise SinkFailed(
                expected=f"{sending.sink.name} to take it within {sending.sink.timeout_seconds:g} s",
                found="no answer, so it was given up",
                remedy="see that it is up and reachable, or raise the sink's timeout_seconds; then: assay publish",
            )
    try:
        return Answer.model_validate_json(line.result())
    except ValidationError:
        errors.seek(0)
        tail = errors.read().decode(errors="replace").strip().splitlines()[-1:]
        raise SinkFailed(
            expected=f"an answer from the process that sends to {sending.sink.name}",
            found=tail[0] if tail else f"it ended with exit code {process.wait()}",
            remedy="send it again: assay publish",
        ) from None


def _exchange(process: subprocess.Popen[str], job: Job) -> str:
    """Tells the job and reads the answer, empty if there is none. Standard input stays open: its end is an order."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(job.model_dump_json() + "\n")
        process.stdin.flush()
    return process.stdout.readline()
