"""Publishing of results: the report page, and artifacts in the Prefect UI."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from resources.storage import storage
from tasks.prefect_server.lazy import in_flow_run, step
from tasks.prefect_server.progress import report_event
from tasks.records.builds import read_qualifications
from tasks.records.current import current_records
from tasks.records.record import Record, read_records
from tasks.reports.page import curves_svg, results_rows, write_report
from tasks.reports.texts import as_markdown
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import evaluator_title
from tasks.spec.names import artifact_key

REPORT_NAME = "report.html"
_REASON_CHARACTERS = 160
_ROUNDED = ("value", "stderr", "low", "high", "training_noise")
_KEY_PART_CHARACTERS = 120  # a whole key has at most 512
_DESCRIPTION_CHARACTERS = 2500  # Prefect's limit for an asset
_GOOGLE_FOLDERS = "https://console.cloud.google.com/storage/browser"


def report_uri(evaluation_path: str, run_name: str) -> str:
    """Returns the URI of a run's report."""
    return storage.join(evaluation_path, run_name, REPORT_NAME)


@step(task_run_name="report on {config.run_name}", retries=3, retry_delay_seconds=[1, 5, 20])
def publish_report(config: EvaluationConfig) -> str:
    """Writes the report over all records of a run and publishes table, plot and link artifacts; returns its URI.

    Retried, since object stores fail occasionally; every try writes the same page.
    """
    run, uri = config.run_name, report_uri(config.evaluation_path, config.run_name)
    report_event(f"writing {uri}")
    records = [record for record in read_records(config.evaluation_path) if record.checkpoint.run == run]
    write_report(records, uri, title=run, records_at=config.evaluation_path, run=run)
    if in_flow_run():
        from tasks.prefect_server.client import show

        folder = storage.join(config.evaluation_path, run)
        show("the report", lambda: _publish_artifacts(current_records(records), uri, title=run, records_at=folder))
    return uri


def _publish_artifacts(records: Sequence[Record], page: str, *, title: str, records_at: str) -> None:
    from prefect.artifacts import create_image_artifact, create_link_artifact, create_table_artifact

    key = artifact_key(title)
    create_table_artifact(table_rows(records), key=f"{key}-results", description=f"Results of {title}")
    qualifications = read_qualifications(storage.parent(records_at))
    svg = base64.b64encode(curves_svg(records, qualifications=qualifications).encode()).decode()
    create_image_artifact(
        f"data:image/svg+xml;base64,{svg}", key=f"{key}-curves", description=f"Curves of {title} over training steps"
    )
    for target, place in (("report", page), ("records", records_at)):
        create_link_artifact(
            browser_address(place),
            key=f"{key}-{target}",
            link_text=place,
            description=f"{target.capitalize()} of {title}",
        )


def show_as_asset(record: Record, cell_uri: str) -> None:
    """Publishes a record with its scores as a Prefect asset derived from its checkpoint, in a flow run only.

    Assets are events, sent asynchronously by a thread of Prefect's.
    """
    if not in_flow_run() or record.status == "gone":
        return
    from prefect.assets import Asset, AssetProperties
    from prefect.context import AssetContext
    from prefect.states import Completed, Failed

    reference, evaluator = record.checkpoint, evaluator_title(record.evaluator)
    own, above, *inputs = asset_keys(record)
    checkpoint = Asset(
        key=above,
        properties=AssetProperties.model_validate(
            _described(reference.name, f"Checkpoint, {reference.place}", reference.uri)
        ),
    )
    title = f"{reference.name} · {evaluator}: {', '.join(record.benchmarks)}"
    result = Asset(
        key=own, properties=AssetProperties.model_validate(_described(title, "Record of an evaluation", cell_uri))
    )
    lineage = AssetContext(
        direct_asset_dependencies={checkpoint, *(Asset(key=key) for key in inputs)},
        downstream_assets={result},
        materialized_by="assay.evaluation",
    )
    scores = {f"{metric.benchmark} {metric.name}": metric.value for metric in record.metrics}
    metadata = {"status": record.status, "scores": scores, "evaluation_hash": record.evaluation_hash, "at": cell_uri}
    lineage.add_asset_metadata(result.key, metadata)
    lineage.emit_events(Completed() if record.succeeded else Failed())


def asset_keys(record: Record) -> list[str]:
    """Returns the asset keys of a record, of its checkpoint, and of the inputs of a merged checkpoint."""
    own = record.checkpoint
    above = (own, *(own.merge.inputs if own.merge else ()))
    return [
        asset_key("records", own.run, own.folder, record.evaluator, record.cell),
        *(asset_key("checkpoints", each.run, each.folder, each.digest[:10]) for each in above),
    ]


def asset_key(*parts: str) -> str:
    """Returns a valid Prefect asset key for parts with any characters."""
    return "assay://" + "/".join(re.sub(r"[^\w.=+@:-]", "-", part)[:_KEY_PART_CHARACTERS] for part in parts)


def _described(name: str, kind: str, place: str) -> dict[str, str]:
    address = browser_address(place)
    link = {"url": address} if address.startswith("https://") else {}  # the UI links only https
    return {"name": name, "description": f"{kind}, at {place}"[:_DESCRIPTION_CHARACTERS], **link}


def table_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns results as rows for Prefect's UI, which renders Markdown: special characters in texts are escaped."""
    rows = [
        {
            **row,
            **{name: float(f"{row[name]:.6g}") for name in _ROUNDED if row[name] is not None},
            "remarks": ", ".join(row["remarks"]),
            "reason": _in_a_line(row["reason"]),
        }
        for row in results_rows(records)
        if not row.pop("smooth")
    ]
    return [
        {name: as_markdown(value) if isinstance(value, str) else value for name, value in row.items()} for row in rows
    ]


def browser_address(place: str) -> str:
    """Returns the browser address of a page or folder: `file://` for a local path, Google's console for `gs://`.

    Google's addresses need a login with access. Other stores have no general address; their URI is returned unchanged.
    """
    if storage.is_local(place):
        return storage.local_path(place).absolute().as_uri()
    if not place.startswith("gs://"):
        return place
    path = quote(place.removeprefix("gs://"))
    page = place.endswith(".html")
    return f"https://storage.cloud.google.com/{path}" if page else f"{_GOOGLE_FOLDERS}/{path}"


def _in_a_line(reason: str | None) -> str:
    findings = [line.removeprefix("Found:") for line in (reason or "").splitlines() if line.startswith("Found:")]
    return findings[0].strip()[:_REASON_CHARACTERS] if findings else (reason or "")[:_REASON_CHARACTERS]
