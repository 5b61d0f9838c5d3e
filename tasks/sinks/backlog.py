"""Finds records that sinks do not have yet, and sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from resources.config import Config
from resources.errors import BadInput
from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.records.record import RECORD_NAME, Record, SinkState, find_records, note_sinks
from tasks.sinks.announcement import Announcement
from tasks.sinks.publishing import missing_sinks, publish_alerts, publish_record, publish_report
from tasks.sinks.senders import Senders
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.loading import build_config, load_config
from tasks.spec.names import how_many
from tasks.spec.sinks import Sink, Sinks
from tasks.verdicts.alert_files import read_alerts


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
        raise BadInput(expected="--sink or --config", found="both", remedy="leave one of them out")
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
        raise BadInput(expected="a file with a sink", found=f"{uri} is not there", remedy="check the path") from None
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

    Args:
        sinks: the destinations; if None, those of each record's own evaluation.
        again: send also to sinks that already have the record.
        on_published: called with each outcome.
        rejected: filled with invalid records by cell, and the reason.
    """
    every = find_records(path, rejected=rejected)
    records = sorted(((e.cell_uri, e.record) for e in every if e.record.succeeded), key=lambda pair: pair[1].created)
    sinks_by_cell = {cell: sinks if sinks is not None else _own_sinks(record, cell) for cell, record in records}
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

    changed: dict[tuple[str, str], tuple[str, Record, Sink]] = {}
    series: dict[tuple[str, str], tuple[str, Record, Sink]] = {}
    with Senders() as senders:
        for cell, record in records:
            due = tuple(sinks_by_cell[cell]) if again else missing_sinks(record, sinks_by_cell[cell])
            states = publish_record(record, cell, due, senders=senders)
            note_sinks(cell, states)
            note(f"{record.checkpoint.name} {record.evaluator}", states)
            for sink in due:
                if states[sink.name].status == "published":
                    changed[f"{record.checkpoint.run} {record.evaluator}", sink.name] = (cell, record, sink)
                    series[Announcement.of(record, cell).series.id, sink.name] = (cell, record, sink)
        for cell, record, sink in series.values():
            alerts = [each for each in read_alerts(Announcement.of(record, cell).run_uri).values() if each.announced]
            states = publish_alerts(record, cell, (sink,), alerts, senders=senders)
            note(f"alerts of {record.checkpoint.run}", states)
        for cell, record, sink in changed.values():
            note(f"report of {record.checkpoint.run}", publish_report(record, cell, (sink,), senders=senders))
    return outcomes


def _own_sinks(record: Record, cell: str) -> tuple[Sink, ...]:
    named = record.evaluation.get("sinks") or ()
    return build_config({"sinks": named}, SinkList, source=storage.join(cell, RECORD_NAME)).sinks
