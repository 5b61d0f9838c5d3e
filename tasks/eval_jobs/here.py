"""A job on this machine, which a container's is too: its device, its scratch folder, and what must be so at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from resources.backends.local.client import local_client
from resources.config import CpuConfig, Device, ResourceConfig
from resources.errors import SinkFailed, UnsatisfiableResources
from resources.settings import set_tracking_server, settings, variables_like
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
    """A job whose model is here."""

    evaluation: EvaluationConfig | SuiteRequest
    suite: str | None
    """The suite, where the evaluation is a request for one."""
    origin: Origin
    sink: MlflowSink

    @property
    def run_name(self) -> str:
        """The run's name in records."""
        return str(self.evaluation.model_name)


def prepare(read: EvalJob, *, local: bool, scratch: Path | None, note: Callable[[str], None]) -> PreparedJob:
    """Reaches the tracking server, then fetches the model.

    Args:
        read: the job.
        local: whether it runs here because somebody tries it, and may do so without its accelerator.
        scratch: folder for the model and the records; the container's, or one of the cache, when None.
        note: told of what happens.
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
    wanted = read.job.wanted
    suite = wanted.suite if isinstance(wanted, JobSuite) else None
    return PreparedJob(evaluation=evaluation, suite=suite, origin=origin, sink=sink)


def fetch_to(scratch: Path | None, job: JobFile, *, note: Callable[[str], None]) -> str:
    """Returns the folder of a job's model, fetched to a scratch folder, the container's when None.

    For errors see `fetch_model`.
    """
    set_tracking_server(job.mlflow_config.tracking_uri)
    folder = _whole(scratch)
    folder.mkdir(parents=True, exist_ok=True)
    return fetch_model(job.model, scratch=folder, note=note)


def _whole(scratch: Path | None) -> Path:
    return (scratch or Path(SCRATCH_FOLDER)).absolute()


def require_tracked(records: Sequence[Record], sink: MlflowSink) -> None:
    """Nothing, if MLflow has every record that succeeded."""
    states = [record.sinks.get(sink.name) for record in records if record.succeeded]
    missing = [state for state in states if state is None or state.status != "published"]
    if missing:
        state = missing[0]
        raise SinkFailed(
            expected=f"{sink.name} to have every record",
            found=f"{len(missing)} are missing" + (f": {state.reason}" if state and state.reason else ""),
            remedy="mend what it names, and run the job again: what has a record is only sent",
        )


def _device_here(wanted: Device, *, note: Callable[[str], None]) -> Device:
    try:
        local_client().check_resources(ResourceConfig(device=wanted))
    except UnsatisfiableResources as error:
        note(f"this machine has {error.found}: the engine runs on the CPU")
        return CpuConfig()
    return wanted
