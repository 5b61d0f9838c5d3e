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
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from threading import Event
from typing import Any

import yaml

from resources.config import Config
from resources.errors import AssayError, BadInput, StorageError, exclusive, not_there
from resources.settings import settings
from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.errors import SinkFailed
from tasks.records.record import RECORD_NAME, Record, SinkState, find_records, note_sinks, now
from tasks.sinks.announcement import Announcement
from tasks.sinks.credentials import credentials_of, scrub
from tasks.sinks.senders import POLL_SECONDS, Senders
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.loading import build_config, load_config
from tasks.spec.names import how_many
from tasks.spec.sinks import Access, Sink, Sinks
from tasks.verdicts.alert_files import KnownAlert, read_alerts

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
    of_run: Announcement, sinks: Sequence[Sink], *, senders: Senders | None = None
) -> dict[str, SinkState]:
    """Sends the report over a record's run, if there is a report; returns its state at the sinks that accept it."""
    report = of_run.of_report()
    states = _publish(report, sinks, senders) if sinks and storage.exists(report.report_uri) else {}
    return {name: state for name, state in states.items() if state.status == "failed" or state.where is not None}


def publish_alerts(
    of_series: Announcement, sinks: Sequence[Sink], alerts: Sequence[KnownAlert], *, senders: Senders | None = None
) -> dict[str, SinkState]:
    """Sends alerts of a record's series; returns their state at the sinks that accept alerts."""
    own = of_series.of_alerts(alerts)
    taking = [sink for sink in sinks if sink.takes_alerts]
    return _publish(own, taking, senders) if own.alerts and taking else {}


def publish_rest(
    sent: Sequence[tuple[Announcement, Sink]], alerts_of: Callable[[str], Sequence[KnownAlert]], *, senders: Senders
) -> Iterator[tuple[str, dict[str, SinkState]]]:
    """Sends alerts and reports that follow from records, each given with a sink that just got it. Alerts are sent once
    for each series, a report once for each run and evaluator. Yields a title of each with its states. `alerts_of`
    returns the alerts in a run's folder."""
    for each, sink in {(each.series.id, sink.name): (each, sink) for each, sink in sent}.values():
        states = publish_alerts(each, (sink,), alerts_of(each.run_uri), senders=senders)
        yield f"alerts of {each.series.run}", states
    runs = {(each.series.run, each.series.evaluator, sink.name): (each, sink) for each, sink in sent}
    for each, sink in runs.values():
        yield f"report of {each.series.run}", publish_report(each, (sink,), senders=senders)


def _publish(announcement: Announcement, sinks: Sequence[Sink], senders: Senders | None) -> dict[str, SinkState]:
    stop, shared = Event(), nullcontext(senders) if senders is not None else Senders()
    with shared as used, ThreadPoolExecutor(len(sinks), thread_name_prefix="sink") as threads:
        try:
            # The context carries the Prefect run; blocks are loaded from its server.
            running = [threads.submit(copy_context().run, _state, announcement, sink, used, stop) for sink in sinks]
            return {sink.name: future.result() for sink, future in zip(sinks, running, strict=True)}
        except BaseException:  # a signal: sends in progress are aborted
            stop.set()
            raise


def _state(announcement: Announcement, sink: Sink, senders: Senders, stop: Event) -> SinkState:
    access = Access()

    def limit() -> Callable[[], bool]:
        deadline = time.monotonic() + sink.timeout_seconds
        return lambda: stop.is_set() or time.monotonic() > deadline

    try:
        access = credentials_of(sink)
        with _turn(announcement, sink, over=limit()):  # the wait for a turn has its own time limit
            where = senders.send(announcement, sink, access, over=limit())
        return SinkState(status="published", where=scrub(where, access.secrets) if where else None, at=now())
    except AssayError as error:
        reason = scrub(str(error), access.secrets)
    except Exception as error:  # noqa: BLE001 - the boundary: however a sink fails, the cell has its record
        reason = scrub(f"{type(error).__name__}: {error}", access.secrets)
    return SinkState(status="failed", reason=reason[:_REASON_CHARACTERS], at=now())


@contextmanager
def _turn(announcement: Announcement, sink: Sink, *, over: Callable[[], bool]) -> Iterator[None]:
    name = hashlib.sha256(f"{announcement.series.id} {sink.name}".encode()).hexdigest()[:24]
    path = settings().cache_dir / "publishing" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if over():
                    raise SinkFailed(
                        expected=f"a turn at {sink.name} within {sink.timeout_seconds:g} s",
                        found="other records of the same run are still being sent",
                        remedy="send this record later: assay publish",
                    ) from None
                time.sleep(POLL_SECONDS)
        yield


class SinkList(Config):
    """A file with nothing but sinks."""

    sinks: Sinks
    """Destinations to publish to."""


@dataclass(frozen=True)
class Published:
    """Outcome of publishing a record, or the report over its run, at a sink."""

    title: str
    sink: str
    state: SinkState

    def as_row(self) -> dict[str, Any]:
        return {"what": self.title, "sink": self.sink, **self.state.model_dump(mode="json")}


def sinks_in(sink: str | None, config: str | None) -> tuple[Sink, ...] | None:
    """Returns the sinks in a file; None if no file is given, so that each record uses the sinks of its evaluation."""
    if sink is not None and config is not None:
        raise exclusive("--sink", "--config")
    if sink is None and config is None:
        return None
    sinks = load_config(config, EvaluationConfig).sinks if config is not None else _sinks_of_file(str(sink))
    if not sinks:
        raise BadInput(
            expected=f"a sink in {config or sink}",
            found="none",
            remedy="start from an example in docs/how-to/publish-results.md",
        )
    return sinks


def _sinks_of_file(uri: str) -> tuple[Sink, ...]:
    try:
        content = load_yaml(storage.read_bytes(uri, within="/"))
    except FileNotFoundError:
        raise not_there("a file with a sink", uri) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        # The content is not quoted: it may be a file of keys.
        raise BadInput(expected=f"YAML in {uri}", found="something else", remedy="correct it") from None
    if isinstance(content, dict) and "kind" in content:
        content = {"sinks": [content]}
    return build_config(content if isinstance(content, dict) else {"sinks": content}, SinkList, source=uri).sinks


def publish_missing(
    path: str,
    sinks: Sequence[Sink] | None,
    *,
    again: bool = False,
    on_published: Callable[[Published], None] = lambda _: None,
    rejected: dict[str, str] | None = None,
) -> list[Published]:
    """Sends every succeeded record below a folder to the sinks that lack it, oldest first, then alerts and reports.
    Without `sinks`, to those of each record's own evaluation; with `again`, also to sinks that have the record.
    `rejected` is filled with the reason for each invalid record, by cell."""
    every = find_records(path, rejected=rejected)
    records = sorted(((e.cell_uri, e.record) for e in every if e.record.succeeded), key=lambda pair: pair[1].created)
    sinks_by_cell: dict[str, Sequence[Sink]] = {}
    for cell, record in records:
        own = {"sinks": record.evaluation.get("sinks") or ()}
        uri = storage.join(cell, RECORD_NAME)
        sinks_by_cell[cell] = build_config(own, SinkList, source=uri).sinks if sinks is None else sinks
    if not any(sinks_by_cell.values()):
        raise BadInput(
            expected=f"succeeded records below {path}, and sinks for them",
            found=f"{how_many(len(records), 'record')}, none with a sink" if records else "no succeeded record",
            remedy="name the sinks: assay publish PATH --sink FILE" if records else "evaluate something first",
        )
    outcomes: list[Published] = []

    def note(title: str, states: dict[str, SinkState]) -> None:
        for sink, state in states.items():
            outcomes.append(Published(title, sink, state))
            on_published(outcomes[-1])

    sent: list[tuple[Announcement, Sink]] = []
    with Senders() as senders:
        for cell, record in records:
            due = tuple(sinks_by_cell[cell]) if again else missing_sinks(record, sinks_by_cell[cell])
            states = publish_record(record, cell, due, senders=senders)
            note_sinks(cell, states)
            note(f"{record.checkpoint.name} {record.evaluator}", states)
            announcement = Announcement.of(record, cell)
            sent += [(announcement, sink) for sink in due if states[sink.name].status == "published"]

        def announced(run_uri: str) -> list[KnownAlert]:
            return [known for known in read_alerts(run_uri).values() if known.announced]

        for title, states in publish_rest(sent, announced, senders=senders):
            note(title, states)
    return outcomes
