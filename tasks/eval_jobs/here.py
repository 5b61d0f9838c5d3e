"""Runs a job on this machine, as the container does: its device, its scratch folder, and the checks at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from resources.backends.local.client import local_client
from resources.config import CpuConfig, Device, ResourceConfig
from resources.errors import UnsatisfiableResources
from resources.settings import set_tracking_server, settings, variables_like
from tasks.errors import SinkFailed
from tasks.eval_jobs.evaluations import evaluation_of
from tasks.eval_jobs.job_file import JobFile, JobSuite
from tasks.eval_jobs.manifests import SCRATCH_FOLDER
from tasks.eval_jobs.model import fetch_model
from tasks.eval_jobs.reading import EvalJob
from tasks.eval_jobs.tracking import Origin, origin_in, sink_of
from tasks.records.record import Record
from tasks.sinks.mlflow_runs import MlflowSink
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.suites import SuiteRequest


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

    Args:
        scratch: folder for model and records; when None, the container's, or a cache folder if `local`.
    """
    state = read.git_state()
    otherwise = read.origin(state, job_name=read.name_here(state))
    origin = origin_in(variables_like("*"), otherwise=otherwise)
    sink = sink_of(read.job, origin, files=read.files)
    sink.check()
    scratch = scratch or (settings().cache_dir / "eval-jobs" / origin.job_name if local else None)
    model_path = fetch_to(scratch, read.job, note=note)
    evaluation = evaluation_of(
        read.job,
        model_path=model_path,
        evaluation_path=str(_whole(scratch) / "evaluations"),
        device=_device_here(read.job.compute_config.device, note=note) if local else None,
        helm_config=str(read.helm_file.absolute()) if read.helm_file else None,
        entries=read.entries,
        sinks=(sink,),
    )
    request = read.job.request
    suite = request.suite if isinstance(request, JobSuite) else None
    return PreparedJob(evaluation=evaluation, suite=suite, origin=origin, sink=sink)


def fetch_to(scratch: Path | None, job: JobFile, *, note: Callable[[str], None]) -> str:
    """Fetches a job's model to a scratch folder, the container's when None; returns the model's folder."""
    set_tracking_server(job.mlflow_config.tracking_uri)
    folder = _whole(scratch)
    folder.mkdir(parents=True, exist_ok=True)
    return fetch_model(job.model, scratch=folder, note=note)


def _whole(scratch: Path | None) -> Path:
    return (scratch or Path(SCRATCH_FOLDER)).absolute()


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
