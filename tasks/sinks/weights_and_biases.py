"""Weights & Biases: a run per series, with the training step as x axis; the only module that imports wandb.

Records arrive out of order when several cells are evaluated in parallel, so curves use a step metric of their own, and
W&B's line counter is meaningless. A run is resumed by its id. Its config lists the attempts that it has: lines of its
history cannot be replaced, so an attempt is never sent twice.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from resources.settings import set_process_environment_defaults
from resources.storage import storage
from tasks.errors import SinkFailed
from tasks.records.current import how_merged
from tasks.records.record import RECORD_NAME
from tasks.sinks.announcement import (
    ALERT,
    REPORT_NAME,
    SEVERAL_BUILDS,
    STEP_METRIC,
    Announcement,
    alert_values,
    build_mark,
    has_several_builds,
    metric_values,
)
from tasks.sinks.credentials import secrets_of_blocks
from tasks.spec.sinks import Access, SinkConfig, web_address
from tasks.verdicts.alerts import sentence, title

if TYPE_CHECKING:
    import wandb

_PROJECT = re.compile(r"[^/\\#?%:]{1,128}")
_FINISHED = ".finished"
_ALERTS, _REPORT = "alerts-", "report"
_TITLE_CHARACTERS = 63  # W&B's limit
_FIXED: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    # A few retries over a few seconds; after longer outages, records are published later.
    "x_graphql_retry_max": 3,
    "x_graphql_retry_wait_max_seconds": 4,
    "x_graphql_timeout_seconds": 15,
    "x_file_stream_retry_max": 4,
    "x_file_stream_retry_wait_max_seconds": 4,
    "x_file_transfer_retry_max": 4,
    "x_file_transfer_retry_wait_max_seconds": 4,
}


class WeightsAndBiasesSink(SinkConfig):
    """A run in Weights & Biases for each training run, over its training steps. The key is in WANDB_API_KEY."""

    secret_variables = ("WANDB_API_KEY",)
    variables = ("WANDB_*",)
    takes_alerts = True

    kind: Literal["wandb"] = "wandb"
    """Selects this sink, Weights & Biases."""
    project: str
    """The project; created if missing."""
    entity: str | None = None
    """The team or user that owns the project; the key's own when unset."""
    base_url: Annotated[str, AfterValidator(web_address)] | None = None
    """Your own server; WANDB_BASE_URL, or else the public server, when unset."""
    mode: Literal["online", "offline"] = "online"
    """Send to the server, or write files for `wandb sync`."""
    folder: str | None = None
    """Local folder for offline files; `wandb` next to the report when unset."""
    tags: tuple[str, ...] = ()
    """Tags of the run, in addition to those of the records."""
    max_samples: int = Field(default=50, ge=0)
    """Questions with answers in a checkpoint's table."""
    api_key_block: str | None = None
    """Name of a Prefect Secret block with the key, in place of WANDB_API_KEY."""

    @field_validator("project", "entity")
    @classmethod
    def _can_be_in_an_address(cls, name: str | None) -> str | None:
        if name is not None and not (_PROJECT.fullmatch(name) and name.strip() == name):
            raise ValueError(f"expected 1 to 128 characters, none of them / \\ # ? % :, found {name!r}")
        return name

    @field_validator("folder")
    @classmethod
    def _is_local(cls, folder: str | None) -> str | None:
        if folder is not None and not storage.is_local(folder):
            raise ValueError(f"expected a local folder, found {folder!r}")
        return folder

    @property
    def name(self) -> str:
        where = f"{self.entity}/{self.project}" if self.entity else self.project
        return f"wandb:{where}" + (" offline" if self.mode == "offline" else "")

    def access(self) -> Access:
        return Access(variables=secrets_of_blocks({"WANDB_API_KEY": self.api_key_block}))


CONFIG = WeightsAndBiasesSink


def send(announcement: Announcement, sink: WeightsAndBiasesSink) -> str:
    """Adds a record, alerts, or the report page to the run of its series; returns the run's address."""
    with _folder(announcement, sink) as folder:
        if (folder / _FINISHED).exists():
            return str(folder)
        with _run(announcement, sink, folder) as run:
            if announcement.alerts:
                sent_offline = folder.parent.glob(f"{_ALERTS}*/{_FINISHED}")
                _add_alerts(run, announcement, known={id_ for file in sent_offline for id_ in file.read_text().split()})
            elif announcement.record is None:
                _add_file(run, "report", "report", REPORT_NAME, storage.read_bytes(announcement.report_uri))
            else:
                _add_record(run, announcement, sink)
            if has_several_builds(dict(run.config)):
                run.tags = (*(run.tags or ()), SEVERAL_BUILDS)
            url = run.url
        if sink.mode == "offline":
            (folder / _FINISHED).write_text(" ".join(known.alert.id for known in announcement.alerts))
        return str(url if sink.mode == "online" else folder)


@contextmanager
def _folder(announcement: Announcement, sink: WeightsAndBiasesSink) -> Iterator[Path]:
    if sink.mode == "online":
        with tempfile.TemporaryDirectory(prefix="assay-wandb-") as scratch:
            yield Path(scratch)
        return
    if sink.folder is None and not storage.is_local(announcement.run_uri):
        raise SinkFailed(
            expected="a local folder for W&B's offline files",
            found=f"records at {announcement.run_uri}, and no folder",
            remedy="name a folder in the sink",
        )
    home = storage.local_path(sink.folder or storage.join(announcement.run_uri, "wandb")).absolute()
    record = announcement.record
    if announcement.alerts:
        ids = " ".join(known.alert.id for known in announcement.alerts)
        name = _ALERTS + hashlib.sha256(ids.encode()).hexdigest()[:16]
    else:
        name = f"{storage.basename(announcement.cell_uri)}-{record.attempt}" if record else _REPORT
    folder = home / announcement.series.id / (record.checkpoint.folder if record else "all") / name
    if name == _REPORT or not (folder / _FINISHED).exists():
        shutil.rmtree(folder, ignore_errors=True)  # leftovers of an interrupted try
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


@contextmanager
def _run(announcement: Announcement, sink: WeightsAndBiasesSink, folder: Path) -> Iterator[wandb.Run]:
    import wandb

    series, record = announcement.series, announcement.record
    # Otherwise files of artifacts lie in the user's home until they are sent.
    kept = {f"WANDB_{name}_DIR": str(folder / name.lower()) for name in ("DATA", "CACHE", "CONFIG", "ARTIFACT")}
    set_process_environment_defaults(kept)
    settings: dict[str, Any] = {**_FIXED, "init_timeout": min(30.0, sink.timeout_seconds / 2)}
    if sink.base_url is not None:
        settings["base_url"] = sink.base_url
    try:
        run = wandb.init(
            project=sink.project,
            entity=sink.entity,
            id=series.id,
            name=series.name,
            group=series.run,
            job_type="evaluation",
            tags=sorted({*sink.tags, *(record.tags if record else ())}) or None,
            resume="allow",
            mode=sink.mode,
            dir=folder,
            settings=wandb.Settings(**settings),
        )
        run.define_metric(STEP_METRIC, hidden=True)
        run.define_metric("*", step_metric=STEP_METRIC)
        yield run
        run.finish()
        wandb.teardown()  # only after this, W&B's process has written the end of its file and has exited
    except (wandb.Error, TimeoutError, ConnectionError, OSError, ValueError) as error:
        raise SinkFailed(
            expected=f"Weights & Biases to take a run of {sink.name}",
            found=(str(error).strip() or type(error).__name__).splitlines()[0],
            remedy="check WANDB_API_KEY, the project and the address, and that it can be reached; then: assay publish",
        ) from error


def _add_record(run: wandb.Run, announcement: Announcement, sink: WeightsAndBiasesSink) -> None:
    record = announcement.known
    key = f"published/{announcement.place}"
    step, place = record.checkpoint.step, record.checkpoint.folder
    # First, since it may fail: the history must not get a line without its mark in the configuration.
    _add_file(
        run, f"record-{place.removeprefix('step-')}-{record.cell}", "record", RECORD_NAME, announcement.record_json()
    )
    if run.config.get(key) != record.attempt:
        before: dict[str, Any] = dict(run.summary)
        values = metric_values(record)
        mark, build = build_mark(record)
        table = _table(announcement, sink)
        line: dict[str, Any] = {} if record.checkpoint.label else {STEP_METRIC: step, **values}
        if table is not None:
            line[f"samples/{place}"] = table
        if line:
            run.log(line)
        if record.checkpoint.label:
            run.summary.update(values)
        elif int(before.get(STEP_METRIC, -1)) > step:  # the summary shows the latest step, not the latest arrival
            run.summary.update({name: before[name] for name in (STEP_METRIC, *values) if name in before})
        run.config.update({**_configuration(announcement), key: record.attempt, mark: build}, allow_val_change=True)


def _add_alerts(run: wandb.Run, announcement: Announcement, *, known: Collection[str]) -> None:
    before: dict[str, Any] = dict(run.summary)
    latest = int(before.get(STEP_METRIC, -1))
    for known_alert in announcement.alerts:
        key = f"alert/{known_alert.alert.id}"
        if known_alert.alert.id in known or key in run.config:
            continue
        run.log({STEP_METRIC: known_alert.alert.step, **alert_values(known_alert)})
        run.alert(title(known_alert.alert)[:_TITLE_CHARACTERS], sentence(known_alert.alert), level="WARN")
        run.config.update({key: sentence(known_alert.alert)})
        latest = max(latest, known_alert.alert.step)
    run.summary.update({STEP_METRIC: latest})
    run.tags = (*(run.tags or ()), ALERT)


def _configuration(announcement: Announcement) -> dict[str, Any]:
    record = announcement.known
    return {
        "run": record.checkpoint.run,
        "evaluator": record.evaluator,
        "evaluation": record.evaluation,
        "evaluation_hash": record.evaluation_hash,
        "versions": record.versions,
        "hardware": record.hardware,
        "cost": record.cost.model_dump(mode="json"),
        "git_commit": record.git_commit,
        "git_dirty": record.git_dirty,
        "records": announcement.series.evaluation_path,
        **({f"merge/{record.checkpoint.folder}": made} if (made := how_merged(record.checkpoint)) else {}),
    }


def _table(announcement: Announcement, sink: WeightsAndBiasesSink) -> wandb.Table | None:
    import wandb

    samples = list(announcement.samples(sink.max_samples)) if sink.max_samples else []
    if not samples:
        return None
    checkpoint = announcement.known.checkpoint
    rows: list[Any] = [
        [
            checkpoint.label or checkpoint.step,
            sample.benchmark,
            sample.id,
            sample.asked,
            sample.output,
            sample.target,
            str(sample.scores),
        ]
        for sample in samples
    ]
    columns: list[Any] = [STEP_METRIC, "benchmark", "id", "prompt", "output", "target", "scores"]
    return wandb.Table(columns=columns, data=rows)


def _add_file(run: wandb.Run, name: str, kind: str, file: str, content: bytes) -> None:
    import wandb

    cleaned = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    artifact = wandb.Artifact(f"{run.id}-{cleaned}"[:128], type=kind)
    # W&B copies it. A record.json left among the records would count as a record.
    with tempfile.TemporaryDirectory(prefix="assay-wandb-") as scratch:
        path = Path(scratch) / file
        path.write_bytes(content)
        artifact.add_file(str(path), name=file)
    logged = run.log_artifact(artifact)
    if not run.offline:
        logged.wait()  # otherwise a failed upload goes unnoticed
