"""MLflow: a run per series with its curves by training step, with a child run per record.

Tags and the three artifacts of a record follow those of earlier evaluation jobs on GKE: the harness's output, the
configuration of the evaluation, and the harness's own configuration.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import httpx
import uv
import yaml
from pydantic import AfterValidator, field_validator

from resources.storage import storage
from resources.storage.files import locked
from tasks.errors import SinkFailed
from tasks.records.record import RECORD_NAME
from tasks.sinks.announcement import (
    ALERT,
    REPORT_NAME,
    SEVERAL_BUILDS,
    Announcement,
    alert_values,
    build_mark,
    has_several_builds,
    metric_values,
)
from tasks.sinks.credentials import secrets_of_blocks
from tasks.sinks.mlflow_tags import datasets, run_tags, series_tags
from tasks.spec.sinks import Access, SinkConfig, web_address
from tasks.verdicts.alerts import sentence

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

DATABASE = "mlflow.db"
"""SQLite file in a folder that is a tracking store."""
_SQLITE = "sqlite:///"
_REACH_SECONDS = 10.0
SERIES_TAG = "assay.series"
CELL_TAG = "assay.cell"
_PARENT_TAG, _NOTE_TAG = "mlflow.parentRunId", "mlflow.note.content"
_TAG_CHARACTERS = 5000
_METRICS_AT_ONCE = 1000  # a server's maximum
_GIVEN = "given"  # folder with the files that requested the evaluation
_HARNESS_CONFIGURATION = "work"  # folder in an attempt with the harness's input files


def _tracking_place(text: str) -> str:
    # a server's address without a trailing slash, `sqlite:////absolute/path`, or a folder's absolute path
    if text.startswith(("http://", "https://")):
        return web_address(text)
    if text.startswith(_SQLITE) and len(text) > len(_SQLITE):
        return f"{_SQLITE}{storage.absolute(text.removeprefix(_SQLITE))}"
    if not text.strip() or not storage.is_local(text) or re.match(r"[^/]+:(?!//)", text):
        raise ValueError(f"expected http://…, https://…, sqlite:///FILE or a folder, found {text!r}")
    return storage.absolute(text).rstrip("/") or "/"


class MlflowSink(SinkConfig):
    """Runs in MLflow: a run for each series, and a child run for each record. User name, password or token are in
    MLflow's own variables."""

    secret_variables = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
    variables = ("MLFLOW_*",)
    client_lasts = True
    takes_alerts = True

    kind: Literal["mlflow"] = "mlflow"
    """Selects this sink, MLflow."""
    tracking_uri: Annotated[str, AfterValidator(_tracking_place)]
    """A tracking server, such as http://10.0.0.15:5000; or sqlite:///FILE, or a folder, on this machine."""
    experiment: str
    """The experiment; created if missing."""
    run_name: str | None = None
    """Name of a series' run; training run, harness and benchmarks when unset."""
    description: str | None = None
    """Text that MLflow shows with each run."""
    tags: dict[str, str] = {}
    """Tags of each run; they override Assay's own of the same names."""
    files: tuple[str, ...] = ()
    """Local files to add to each record, such as the configuration that requested the evaluation."""
    harness_output: bool = True
    """Send the harness's own output too, which contains questions and answers."""
    username: str | None = None
    """User name, in place of MLFLOW_TRACKING_USERNAME."""
    password_block: str | None = None
    """Name of a Prefect Secret block, in place of MLFLOW_TRACKING_PASSWORD."""
    token_block: str | None = None
    """Name of a Prefect Secret block, in place of MLFLOW_TRACKING_TOKEN."""

    @field_validator("experiment")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not name.strip() or name.strip() != name or len(name) > 500:
            raise ValueError(f"expected 1 to 500 characters without space around them, found {name!r}")
        return name

    @property
    def name(self) -> str:
        return f"mlflow:{self.tracking_uri} {self.experiment}"

    @property
    def local_folder(self) -> str | None:
        """The folder of a local store, which contains its artifacts too; None for a server."""
        if self.tracking_uri.startswith(("http://", "https://")):
            return None
        place = self.tracking_uri
        return storage.parent(place.removeprefix(_SQLITE)) if place.startswith(_SQLITE) else place

    @property
    def folder(self) -> str | None:
        """The folder of a local store, relative if it lies in the working folder."""
        return self.local_folder and self.local_folder.removeprefix(f"{Path.cwd()}{os.sep}")

    @property
    def client_uri(self) -> str:
        """The tracking URI for MLflow's client."""
        place = self.tracking_uri
        return place if place.startswith(("http", _SQLITE)) else f"{_SQLITE}{storage.join(place, DATABASE)}"

    @property
    def shown_by(self) -> str:
        """Address of a server, or a command that shows a local store; uv fetches the pages, which the client lacks."""
        if self.local_folder is None:
            return self.tracking_uri
        uvx = "uvx" if shutil.which("uvx") else f"{quote(uv.find_uv_bin())} tool run"
        return f"{uvx} mlflow@{metadata.version('mlflow-skinny')} ui --backend-store-uri {quote(self.client_uri)}"

    def check(self) -> None:
        """Raises SinkFailed if a server does not respond or returns HTTP status 500 or above, or if a folder is not
        writable or contains runs in files."""
        place, folder = self.tracking_uri, self.local_folder
        if folder is not None:
            if next(Path(folder).glob("*/meta.yaml"), None) is not None:
                raise SinkFailed(
                    expected=f"a folder for {self.name} without runs in files, which MLflow no longer writes",
                    found=f"such runs in {folder}",
                    remedy="name another folder, or move them first: mlflow migrate-filestore",
                )
            storage.check_writable(folder)
            return
        try:
            response = httpx.get(f"{place}/health", timeout=_REACH_SECONDS, follow_redirects=True)
            problem = f"HTTP status {response.status_code}" if response.status_code >= 500 else None
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
        if problem is not None:
            raise SinkFailed(
                expected=f"an MLflow tracking server that answers at {place}",
                found=problem,
                remedy="start it, correct tracking_uri, or evaluate without this sink and send the records later: "
                "assay publish",
            )

    def access(self) -> Access:
        blocks = {"MLFLOW_TRACKING_PASSWORD": self.password_block, "MLFLOW_TRACKING_TOKEN": self.token_block}
        user = {"MLFLOW_TRACKING_USERNAME": self.username} if self.username is not None else {}
        return Access(variables={**secrets_of_blocks(blocks), **user})


CONFIG = MlflowSink


def send(announcement: Announcement, sink: MlflowSink) -> str:
    """Adds a record below the run of its series, or alerts or the report page to that run; returns its address."""
    from mlflow import MlflowClient

    with _explained(sink):
        folder = sink.local_folder
        with locked(Path(folder, ".making"), waiting=lambda: None) if folder is not None else nullcontext():
            client = MlflowClient(tracking_uri=sink.client_uri)
        experiment = _experiment(client, sink)
        parent = _parent(client, experiment, announcement, sink)
        if announcement.alerts:
            _add_alerts(client, parent, announcement)
            shown = parent
        elif announcement.record is None:
            with tempfile.TemporaryDirectory(prefix="assay-mlflow-") as scratch:
                page = Path(scratch) / REPORT_NAME
                page.write_bytes(storage.read_bytes(announcement.report_uri))
                client.log_artifact(parent.info.run_id, str(page))
            shown = parent
        else:
            shown = _child(client, parent, announcement)
            _add_record(client, parent, shown, announcement, sink)
            client.set_terminated(shown.info.run_id, end_time=_milliseconds(announcement))
        client.set_terminated(parent.info.run_id)
    if folder is not None:
        return str(shown.info.artifact_uri)
    return f"{sink.tracking_uri}/#/experiments/{experiment}/runs/{shown.info.run_id}"


def _experiment(client: MlflowClient, sink: MlflowSink) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(sink.experiment)
    if experiment is None:
        folder = sink.local_folder
        artifacts = None if folder is None else storage.join(folder, "artifacts")
        try:
            return client.create_experiment(sink.experiment, artifact_location=artifacts)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            experiment = client.get_experiment_by_name(sink.experiment)  # created by another process meanwhile
    if experiment is None or experiment.lifecycle_stage != "active":
        raise SinkFailed(
            expected=f"the experiment {sink.experiment} of {sink.tracking_uri}",
            found="it was deleted there",
            remedy="restore it, or name another experiment",
        )
    return experiment.experiment_id


def _parent(client: MlflowClient, experiment: str, announcement: Announcement, sink: MlflowSink) -> Run:
    series = announcement.series
    tags = {SERIES_TAG: series.id, **series_tags(announcement), **_described(sink)}
    runs = client.search_runs([experiment], f"tags.`{SERIES_TAG}` = '{series.id}'", max_results=1)
    if not runs:
        return client.create_run(experiment, run_name=sink.run_name or series.name, tags=_cut(tags))
    if announcement.record is not None:
        for name in (run_tags(announcement).keys() & runs[0].data.tags.keys()) - tags.keys():
            client.delete_tag(runs[0].info.run_id, name)
    return runs[0]


def _child(client: MlflowClient, parent: Run, announcement: Announcement) -> Run:
    record = announcement.known
    # A digest, since MLflow's filters cannot quote.
    cell = hashlib.sha256(announcement.place.encode()).hexdigest()[:16]
    tags = {_PARENT_TAG: parent.info.run_id, CELL_TAG: cell}
    query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
    runs = client.search_runs([parent.info.experiment_id], query, max_results=1)
    if runs:
        return runs[0]
    began = _milliseconds(announcement) - int(1000 * sum(record.seconds.values()))
    return client.create_run(parent.info.experiment_id, began, tags, record.checkpoint.name)


def _add_record(client: MlflowClient, parent: Run, child: Run, announcement: Announcement, sink: MlflowSink) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, RunTag

    record = announcement.known
    # The server keeps one of several metrics with the same name, value, step and time.
    at = _milliseconds(announcement)
    metrics = [Metric(name, value, at, record.checkpoint.step) for name, value in _named(metric_values(record)).items()]
    mark, build = build_mark(record)
    several = has_several_builds([mark, *parent.data.tags])
    shared = {mark: build, **{_allowed(f"tag.{tag}"): "true" for tag in record.tags}, **_described(sink)}
    own = {**run_tags(announcement), **shared, **sink.tags}
    of_series = {**series_tags(announcement), **shared, **({SEVERAL_BUILDS: "true"} if several else {})}
    of_series |= {name: value for name, value in sink.tags.items() if name not in run_tags(announcement)}
    for run, tags in ((parent, of_series), (child, own)):
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            client.log_batch(run.info.run_id, metrics=metrics[start : start + _METRICS_AT_ONCE])
        client.log_batch(run.info.run_id, tags=[RunTag(name, value) for name, value in _cut(tags).items()])
    inputs = [
        DatasetInput(Dataset(**dataset), [InputTag("mlflow.data.context", "evaluation"), InputTag("benchmark", name)])
        for name, dataset in datasets(record).items()
    ]
    if inputs:
        client.log_inputs(child.info.run_id, inputs)
    with tempfile.TemporaryDirectory(prefix="assay-mlflow-") as scratch:
        folder = Path(scratch)
        (folder / "eval_config.yaml").write_text(yaml.safe_dump(record.evaluation, sort_keys=False))
        (folder / RECORD_NAME).write_bytes(announcement.record_json())
        for file in sink.files:
            (folder / _GIVEN).mkdir(exist_ok=True)
            shutil.copy(file, folder / _GIVEN)
        if sink.harness_output and storage.exists(announcement.attempt_uri):
            storage.copy_to_local(announcement.attempt_uri, folder / "harness_run_output")
            given = folder / "harness_run_output" / _HARNESS_CONFIGURATION
            if given.is_dir():
                given.rename(folder / "harness_config")
        client.log_artifacts(child.info.run_id, str(folder))


def _add_alerts(client: MlflowClient, series: Run, announcement: Announcement) -> None:
    from mlflow.entities import Metric, RunTag

    metrics = [
        Metric(name, value, int(known.found_at * 1000), known.alert.step)
        for known in announcement.alerts
        for name, value in _named(alert_values(known)).items()
    ]
    tags = {f"alert.{known.alert.id}": sentence(known.alert) for known in announcement.alerts} | {ALERT: "true"}
    run_tags = [RunTag(name, value) for name, value in _cut(tags).items()]
    client.log_batch(series.info.run_id, metrics=metrics, tags=run_tags)


def _described(sink: MlflowSink) -> dict[str, str]:
    return {_NOTE_TAG: sink.description} if sink.description is not None else {}


def _cut(tags: dict[str, str]) -> dict[str, str]:
    return {name: value[:_TAG_CHARACTERS] for name, value in tags.items()}


def _milliseconds(announcement: Announcement) -> int:
    return int(announcement.known.created.timestamp() * 1000)


def _named(values: dict[str, float]) -> dict[str, float]:
    return {_allowed(name): value for name, value in values.items()}


def _allowed(name: str) -> str:
    allowed = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
    return "/".join(part if part not in ("", ".", "..") else "_" for part in allowed.split("/"))


@contextmanager
def _explained(sink: MlflowSink) -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, OSError, ValueError) as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        code = error.get_http_status_code() if isinstance(error, MlflowException) else None
        denied = code in (401, 403) or "401" in message or "403" in message
        remedy = (
            "check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            if denied
            else "check tracking_uri and the experiment, and that the server can be reached; then: assay publish"
        )
        raise SinkFailed(expected=f"{sink.name} to take a run", found=message, remedy=remedy) from error
