"""Sends records to their sinks, with a time limit each; a failure affects neither the cell nor other sinks.

The record lists the sinks that have it. Missing sinks are retried by the next evaluation, or by `assay publish`; this
module adds no retries to those of a sink's client.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from threading import Event

from resources.errors import AssayError, StorageError
from resources.settings import settings
from resources.storage import storage
from tasks.errors import SinkFailed
from tasks.records.record import Record, SinkState, now
from tasks.sinks.announcement import Announcement
from tasks.sinks.credentials import credentials_of, scrub
from tasks.sinks.senders import POLL_SECONDS, Senders, Sending
from tasks.spec.sinks import Sink
from tasks.verdicts.alert_files import KnownAlert

_log = logging.getLogger(__name__)
_REASON_CHARACTERS = 800


def missing_sinks(record: Record, sinks: Sequence[Sink]) -> tuple[Sink, ...]:
    """Returns those of some sinks that lack a record; empty if the record has not succeeded."""
    if not record.succeeded:
        return ()
    have = {name for name, state in record.sinks.items() if state.status == "published"}
    return tuple(sink for sink in sinks if sink.name not in have)


def publish_record(
    record: Record, cell_uri: str, sinks: Sequence[Sink], *, senders: Senders | None = None
) -> dict[str, SinkState]:
    """Sends a record to some sinks in parallel, and returns its state at each; raises nothing. Records that have not
    succeeded are not sent: the next run retries the cell, and the report shows its status. `senders` are shared by a
    series of records; without them, all processes end with the call."""
    if not record.succeeded or not sinks:
        return {}
    announcement = Announcement.of(record, cell_uri)
    sends_files = any(getattr(sink, "harness_output", False) for sink in sinks)
    if sends_files and storage.is_local(announcement.attempt_uri):
        with suppress(StorageError):  # the sink raises it again
            others = [file for file in storage.list_files(announcement.attempt_uri) if not file.regular]
            if others:
                _log.warning("Not sent: %d pipes, or links that lead out, in %s", len(others), announcement.attempt_uri)
    return _publish(announcement, sinks, senders)


def publish_report(
    record: Record, cell_uri: str, sinks: Sequence[Sink], *, senders: Senders | None = None
) -> dict[str, SinkState]:
    """Sends the report over a record's run; returns its state at the sinks that accept reports."""
    if not sinks:
        return {}
    states = _publish(Announcement.of(record, cell_uri).of_report(), sinks, senders)
    return {name: state for name, state in states.items() if state.status == "failed" or state.where is not None}


def publish_alerts(
    record: Record,
    cell_uri: str,
    sinks: Sequence[Sink],
    alerts: Sequence[KnownAlert],
    *,
    senders: Senders | None = None,
) -> dict[str, SinkState]:
    """Sends alerts of a record's series; returns their state at the sinks that accept alerts."""
    announcement = Announcement.of(record, cell_uri).of_alerts(alerts)
    taking = [sink for sink in sinks if sink.takes_alerts]
    return _publish(announcement, taking, senders) if announcement.alerts and taking else {}


def _publish(announcement: Announcement, sinks: Sequence[Sink], senders: Senders | None) -> dict[str, SinkState]:
    if senders is None:
        with Senders() as own:
            return _publish(announcement, sinks, own)
    stop = Event()
    with ThreadPoolExecutor(len(sinks), thread_name_prefix="sink") as threads:
        try:
            # The context carries the Prefect run; blocks are loaded from its server.
            running = [threads.submit(copy_context().run, _state, announcement, sink, senders, stop) for sink in sinks]
            return {sink.name: future.result() for sink, future in zip(sinks, running, strict=True)}
        except BaseException:  # a signal: sends in progress are aborted
            stop.set()
            raise


def _state(announcement: Announcement, sink: Sink, senders: Senders, stop: Event) -> SinkState:
    scrubbed: Callable[[str], str] = _scrubbed_by_looks
    try:
        credentials = credentials_of(sink)
        scrubbed = credentials.scrubbed
        with _turn(Sending(announcement, sink, stop)):
            # The wait for a turn has its own time limit.
            answer = senders.ask(Sending(announcement, sink, stop), credentials)
        if answer.found is not None:
            raise SinkFailed(expected=answer.expected or "", found=answer.found, remedy=answer.remedy or "")
        return SinkState(status="published", where=scrubbed(answer.where) if answer.where else None, at=now())
    except AssayError as error:
        reason = scrubbed(str(error))
    except Exception as error:  # noqa: BLE001 - the boundary: however a sink fails, the cell has its record
        reason = scrubbed(f"{type(error).__name__}: {error}")
    return SinkState(status="failed", reason=reason[:_REASON_CHARACTERS], at=now())


def _scrubbed_by_looks(text: str) -> str:
    return scrub(text, ())


@contextmanager
def _turn(sending: Sending) -> Iterator[None]:
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
                        remedy="send this record later: assay publish",
                    ) from None
                time.sleep(POLL_SECONDS)
        yield
