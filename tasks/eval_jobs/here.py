"""Runs a job on this machine, as the container does: fetches its model, chooses the device, reports to MLflow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resources.backends.local.client import local_client
from resources.config import CpuConfig, Device, ResourceConfig
from resources.errors import BadInput, UnsatisfiableResources
from resources.settings import set_tracking_server, settings, variables_like
from resources.storage import storage
from resources.storage.files import replace_json
from tasks.errors import SinkFailed
from tasks.eval_jobs.job_file import HelmRun, JobFile, JobSuite, MlflowArtifact, ModelSource
from tasks.eval_jobs.manifests import SCRATCH_FOLDER, Origin
from tasks.eval_jobs.reading import EvalJob, evaluation_of
from tasks.records.record import Record
from tasks.sinks.mlflow_runs import MlflowSink
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.names import name_of, step_of
from tasks.spec.suites import SuiteRequest

_FETCHED = "fetched.json"
_TOKENIZERS = {"tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"}
_PARTS_OF_TOKENIZERS = {
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt")
}


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """A job with its model fetched."""

    evaluation: EvaluationConfig | SuiteRequest
    suite: str | None
    """The suite, if the evaluation is a suite request."""
    origin: Origin
    sink: MlflowSink

    @property
    def run_name(self) -> str:
        return str(self.evaluation.model_name)


def prepare(read: EvalJob, *, local: bool, scratch: Path | None, note: Callable[[str], None]) -> PreparedJob:
    """Connects to the tracking server, then fetches the model; with `local` the CPU replaces a missing accelerator.
    Model and records are in `scratch`; when None, in the container's folder, or in a cache folder if `local`."""
    state = read.git_state()
    origin = read.origin(state, job_name=read.name_here(state)).in_container(variables_like("*"))
    sink = sink_of(read.job, origin, files=read.files)
    sink.check()
    default = settings().cache_dir / "eval-jobs" / origin.job_name if local else Path(SCRATCH_FOLDER)
    scratch = (scratch or default).absolute()
    model_path = fetch_to(scratch, read.job, note=note)
    evaluation = evaluation_of(
        read.job,
        model_path=model_path,
        evaluation_path=str(scratch / "evaluations"),
        device=_device_here(read.job.compute_config.device, note=note) if local else None,
        helm_config=str(read.helm_file.absolute()) if read.helm_file else None,
        entries=read.entries,
        sinks=(sink,),
    )
    request = read.job.request
    suite = request.suite if isinstance(request, JobSuite) else None
    return PreparedJob(evaluation=evaluation, suite=suite, origin=origin, sink=sink)


def fetch_to(scratch: Path, job: JobFile, *, note: Callable[[str], None]) -> str:
    """Fetches a job's model to a scratch folder; returns the model's folder."""
    set_tracking_server(job.mlflow_config.tracking_uri)
    scratch.mkdir(parents=True, exist_ok=True)
    return fetch_model(job.model, scratch=scratch.absolute(), note=note)


def require_tracked(records: Sequence[Record], sink: MlflowSink) -> None:
    """Raises SinkFailed if MLflow lacks a succeeded record."""
    states = [record.sinks.get(sink.name) for record in records if record.succeeded]
    missing = [state for state in states if state is None or state.status != "published"]
    if missing:
        state = missing[0]
        raise SinkFailed(
            expected=f"{sink.name} to have every record",
            found=f"{len(missing)} are missing" + (f": {state.reason}" if state and state.reason else ""),
            remedy="mend what it names, and run the job again: what has a record is only sent",
        )


def _device_here(device: Device, *, note: Callable[[str], None]) -> Device:
    try:
        local_client().check_resources(ResourceConfig(device=device))
    except UnsatisfiableResources as error:
        note(f"this machine has {error.found}: the engine runs on the CPU")
        return CpuConfig()
    return device


def sink_of(job: JobFile, origin: Origin, *, files: Iterable[Path] = ()) -> MlflowSink:
    """Returns the sink for a job's results, which also logs `files`."""
    tracking = job.tracking_config
    return MlflowSink(
        tracking_uri=job.mlflow_config.tracking_uri,
        experiment=tracking.experiment_name,
        run_name=tracking.run_name,
        description=tracking.description,
        tags={**flat_tags(tracking.tags), **job_tags(job, origin)},
        files=tuple(str(file.absolute()) for file in files),
    )


def job_tags(job: JobFile, origin: Origin) -> dict[str, str]:
    """Returns the tags of a job; `None` for missing values."""
    artifact, compute, request = job.model.mlflow_artifact, job.compute_config, job.request
    tags: dict[str, Any] = {
        "job_name": origin.job_name,
        "config_version": job.version,
        "config_git_sha": origin.config_version,
        "config_git_state": origin.git_state,
        "config_path_git_repo": origin.config_path,
        "helm_config_path_git_repo": origin.helm_config_path,
        "model_run_id": artifact.run_id if artifact else None,
        "model_artifact_path": artifact.artifact_path if artifact else None,
        "model_gs_uri": job.model.gs_uri,
        "accelerator": compute.accelerator,
        "accelerator_count": getattr(compute.device, "count", compute.count),
        "cpu": compute.cpu,
        "memory": compute.memory,
        "image": job.image,
        "image_tag": job.image_tag,
    }
    if isinstance(request, HelmRun):
        tags |= {"helm_args": " ".join(request.args), "helm_suite": request.suite}
    return {name: str(value) for name, value in tags.items()}


def flat_tags(tags: Mapping[str, Any], *, above: str = "") -> dict[str, str]:
    """Returns tags flattened for MLflow: `{a: {b: [1]}}` becomes `a.b` with `[1]`."""
    flat: dict[str, str] = {}
    for name, value in tags.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            flat |= flat_tags(value, above=f"{key}.")
        else:
            flat[key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def fetch_model(source: ModelSource, *, scratch: Path, note: Callable[[str], None]) -> str:
    """Returns the folder of the job's model, below `scratch` unless it is local already.

    A completed fetch of the same model is reused.
    """
    if source.is_local:
        return storage.absolute(source.uri)
    description = source.model_dump()
    marker = scratch / _FETCHED
    if marker.is_file() and (done := json.loads(marker.read_bytes()))["source"] == description:
        note(f"{source.uri} is in {done['folder']}")
        return done["folder"]
    target = _place_below(scratch, source)
    note(f"fetching {source.uri} to {target}")
    shutil.rmtree(target, ignore_errors=True)  # of another source, or of a partial fetch
    storage.copy_to_local(source.uri, target)
    folder = target
    if (artifact := source.mlflow_artifact) is not None:
        folder = _with_tokenizer(target, artifact, note=note)
    replace_json(marker, {"source": description, "folder": str(folder)})
    return str(folder)


def _place_below(scratch: Path, source: ModelSource) -> Path:
    if (artifact := source.mlflow_artifact) is not None:
        return scratch / artifact.artifact_path.strip("/")
    last = storage.basename(source.uri)
    run = scratch / "checkpoints" / name_of(source.uri)[0]
    return run / "hf" / last if step_of(last) is not None else run


def _with_tokenizer(target: Path, artifact: MlflowArtifact, *, note: Callable[[str], None]) -> Path:
    folder, repository = _within(target, artifact.model_directory, field="model_directory"), artifact.tokenizer_hf_repo
    if artifact.tokenizer_directory is not None:
        source = str(_within(target, artifact.tokenizer_directory, field="tokenizer_directory"))
    elif repository is not None:
        note(f"fetching the tokenizer of {repository}")
        source = f"hf://{repository}"
    else:
        return folder
    files = {storage.basename(file.uri): file.uri for file in storage.list_folder(source)}
    if repository is not None and not _TOKENIZERS & files.keys():
        raise BadInput(
            expected=f"a tokenizer in {repository}, as model_config.mlflow_artifact.tokenizer_hf_repo names it",
            found=f"none of {', '.join(sorted(_TOKENIZERS))}",
            remedy="correct the name, or log the tokenizer with the model and name tokenizer_directory",
        )
    for name in files.keys() & (_TOKENIZERS | _PARTS_OF_TOKENIZERS):
        (folder / name).write_bytes(storage.read_bytes(files[name]))
    return folder


def _within(target: Path, name: str | None, *, field: str) -> Path:
    folder = target / name if name else target
    if not folder.is_dir():
        folders = ", ".join(sorted(path.name for path in target.iterdir() if path.is_dir()))
        raise BadInput(
            expected=f"a folder of the artifact as model_config.mlflow_artifact.{field}",
            found=f"{name}, which it has not; folders there: {folders or 'none'}",
            remedy="correct it in the job's file",
        )
    return folder
