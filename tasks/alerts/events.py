"""The event `alert.raised`, sent to Prefect's server for its automations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from prefect.events import Event, RelatedResource, Resource

from pools.weights.merges import with_each_location
from resources.errors import AssayError, PrefectUnavailable
from resources.storage import storage
from tasks.alerts.files import forget
from tasks.alerts.looking import News
from tasks.alerts.texts import acknowledging, sentence, title
from tasks.prefect_server.client import send_events, server_address, server_answers
from tasks.prefect_server.lazy import flow_run_id

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
    related = [
        _related(
            "checkpoint", with_each_location(news.record.record.checkpoint.uri, storage.absolute), alert.checkpoint
        ),
        _related("benchmark", f"{alert.evaluator}/{alert.benchmark}", alert.benchmark),
        *(_related("policy", name, name) for name in _policies(news.record.record.tags)),
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


def _policies(tags: Sequence[str]) -> list[str]:
    return [tag.removeprefix(_POLICY_TAG) for tag in tags if tag.startswith(_POLICY_TAG)]
