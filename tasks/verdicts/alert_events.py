"""New alerts of a run after some of its cells were evaluated: their files, and events for a Prefect server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from prefect.events import Event, RelatedResource, Resource

from pools.weights.merges import with_each_location
from resources.errors import AssayError, StorageError
from resources.storage import storage
from tasks.errors import PrefectUnavailable
from tasks.prefect_server.client import send_events, server_address, server_answers
from tasks.prefect_server.lazy import flow_run_id
from tasks.records.builds import read_qualifications
from tasks.records.record import Record, now, read_records
from tasks.verdicts.alert_files import KnownAlert, alerts_on_file, forget, take_untold, write_first
from tasks.verdicts.alerts import Alert, acknowledging, drops_in, improvements, sentence, title
from tasks.verdicts.statistics.composition import QuestionScores

# Age of a record that is still announced if an earlier pass wrote it, which may have died before it found the alert.
_RECENT = timedelta(hours=1)


@dataclass(frozen=True)
class News:
    """An alert to announce, with its record and the number of questions lost, if known."""

    known: KnownAlert
    record: Record
    lost_questions: int | None


def find_news(run_folder: str, *, since: datetime) -> list[News]:
    """Creates a file for each alert of a run that has none; returns those to announce. 1 listing, a read per record.

    To announce is the latest alert of a curve, if its record was written since the pass began or shortly before. Alerts
    in runs that were evaluated long ago, and earlier alerts when many checkpoints are evaluated at once, are only
    listed. Of several concurrent passes, a single pass finds each alert.
    """
    records, evaluation_path = read_records(run_folder), storage.parent(run_folder)
    qualifications = read_qualifications(evaluation_path)
    drops = drops_in(records, qualifications=qualifications)
    latest = {_curve(drop.alert): drop.alert.id for drop in sorted(drops, key=lambda drop: drop.alert.step)}
    known = alerts_on_file(run_folder)
    scores = QuestionScores()
    news: list[News] = []
    for drop in (drop for drop in drops if drop.alert.id not in known):
        alert = drop.alert
        is_latest = alert.id == latest[_curve(alert)]
        is_recent = drop.record.created >= min(since, now() - _RECENT)
        is_news = take_untold(run_folder, alert) or (is_latest and is_recent)
        known_alert = KnownAlert(alert=alert, found_at=time.time(), announced=is_news)
        if write_first(run_folder, known_alert) and is_news:
            try:
                changes = improvements(drop, evaluation_path=evaluation_path, scores=scores)
            except StorageError as error:  # the alert is announced without the number of questions
                changes = error.found
            lost = None if isinstance(changes, str) else sum(change < 0 for change in changes.values())
            news.append(News(known_alert, drop.record, lost))
    return news


def _curve(alert: Alert) -> tuple[str, ...]:
    return alert.run, alert.evaluator, alert.evaluation_hash, alert.benchmark, alert.metric


ALERT_RAISED = "alert.raised"
"""Name of the event."""
_POLICY_TAG = "policy="
_SENT_WITHIN_SECONDS = 30.0


def tell_server(news: Sequence[News], *, run_folder: str, report: str) -> None:
    """Sends an event for each alert; does nothing without a permanent server. If the server does not accept them, their
    files are deleted, so that the next pass finds the alerts again. `report` is the address of the run's report for a
    browser."""
    if not news or (address := server_address()) is None:
        return
    try:
        if not server_answers(within_seconds=_SENT_WITHIN_SECONDS):
            raise PrefectUnavailable(
                expected=f"the Prefect server at {address} to take {len(news)} alerts",
                found="no answer",
                remedy="start it; the next evaluation of the run sends them",
            )
        send_events([event_of(new_alert, run_folder=run_folder, report=report) for new_alert in news])
    except AssayError:
        for new_alert in news:
            forget(run_folder, new_alert.known)
        raise


def event_of(news: News, *, run_folder: str, report: str) -> Event:
    """Returns the event of an alert: resource is the run; related are checkpoint, benchmark, policies and flow run."""
    alert = news.known.alert
    resource = {
        "prefect.resource.id": f"assay.run.{storage.absolute(run_folder)}",
        "prefect.resource.name": alert.run,
        "assay.run": alert.run,
        "assay.step": str(alert.step),
    }
    record = news.record
    policies = [tag.removeprefix(_POLICY_TAG) for tag in record.tags if tag.startswith(_POLICY_TAG)]
    related = [
        _related("checkpoint", with_each_location(record.checkpoint.uri, storage.absolute), alert.checkpoint),
        _related("benchmark", f"{alert.evaluator}/{alert.benchmark}", alert.benchmark),
        *(_related("policy", name, name) for name in policies),
    ]
    if (flow_run := flow_run_id()) is not None:
        labels = {"prefect.resource.id": f"prefect.flow-run.{flow_run}", "prefect.resource.role": "flow-run"}
        related.append(RelatedResource(labels))
    payload: dict[str, Any] = {
        **asdict(alert),
        "title": title(alert),
        "message": sentence(alert),
        "lost_questions": news.lost_questions,
        "report": report,
        "acknowledge": acknowledging(alert, storage.absolute(storage.parent(run_folder))),
    }
    return Event(event=ALERT_RAISED, resource=Resource(resource), related=related, payload=payload)


def _related(role: str, identifier: str, name: str) -> RelatedResource:
    return RelatedResource(
        {
            "prefect.resource.id": f"assay.{role}.{identifier}",
            "prefect.resource.role": role,
            "prefect.resource.name": name,
        }
    )
