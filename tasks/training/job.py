"""Training by Levanter through the job client on any backend."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ValidationError

from resources.backends.current import current_client
from resources.config import ResourceConfig, TpuConfig
from resources.errors import BackendUnavailable, BadInput, JobFailed, StorageError
from resources.jobs.jobs import Call, Client, JobHandle, JobRequest, JobStatus, create_environment
from resources.regions.region_check import check_gcs_paths_same_region
from resources.settings import training_variables
from resources.storage import storage
from tasks.prefect_server.accelerators import accelerators_reserved_until
from tasks.prefect_server.progress import report_event
from tasks.records.provenance import git_state
from tasks.spec.training import TrainLmOnPodConfig
from tasks.training.layout import Training, accelerator_defaults, training_of, variables_of
from tasks.training.node import train

CONFIG_NAME = "train_config.json"
SILENCE_SECONDS = 600.0
"""Time without an answer after which a training on a backend counts as lost; a controller may be restarting."""
_JOB_NAME = "train_lm"
_LOOK_AGAIN_SECONDS = 5.0


class _Refusal(BaseModel):
    expected: str
    found: str
    remedy: str


class _Trained(BaseModel):
    digest: str


def run_levanter_train_lm(config: TrainLmOnPodConfig, *, client: Client | None = None) -> JobStatus:
    """Trains to the end, on the current client by default; ends the training when interrupted."""
    with training(config, client=client) as job:
        return finished(job)


@contextmanager
def training(config: TrainLmOnPodConfig, *, client: Client | None = None) -> Iterator[JobHandle]:
    """Runs a training, with its accelerators reserved, for the duration of the block; terminates it at the end."""
    planned = plan_training(config)
    chosen = client or current_client()
    chosen.check_resources(config.resources)
    submitted: list[JobHandle] = []
    with accelerators_reserved_until(lambda: any(map(_has_ended, submitted)), config.resources):
        _note(config, planned)
        job = chosen.submit(training_job(config, planned))
        submitted.append(job)
        try:
            yield job
        finally:
            job.terminate()


def _has_ended(job: JobHandle) -> bool:
    try:
        return job.status().finished
    except BackendUnavailable:
        return False


def finished(
    job: JobHandle, *, silence_seconds: float = SILENCE_SECONDS, sleep: Callable[[float], None] = time.sleep
) -> JobStatus:
    """Waits for the end of a training."""
    try:
        while True:
            try:
                return job.wait()
            except BackendUnavailable as error:
                report_event(f"the training cannot be looked at: {error.found}")
                _wait_for_answer(job, silence_seconds, sleep)
    except JobFailed as error:
        try:
            refusal = _Refusal.model_validate_json(job.announced() or "")
        except ValidationError:
            raise error from None
        raise BadInput(expected=refusal.expected, found=refusal.found, remedy=refusal.remedy) from error


def _wait_for_answer(job: JobHandle, silence_seconds: float, sleep: Callable[[float], None]) -> None:
    until = time.monotonic() + silence_seconds
    while True:
        sleep(_LOOK_AGAIN_SECONDS)
        try:
            job.status()
            return
        except BackendUnavailable:
            if time.monotonic() >= until:
                raise


def plan_training(config: TrainLmOnPodConfig) -> Training:
    """Returns a training with its run id and paths filled in."""
    planned = training_of(config, process=training_variables())
    check_gcs_paths_same_region(
        {"train_config": planned.train_config, "output_path": config.output_path, "compiled": planned.compiled},
        local_ok=not isinstance(config.resources.device, TpuConfig),
        resources=config.resources,
    )
    return planned


def training_job(config: TrainLmOnPodConfig, planned: Training) -> JobRequest:
    """Returns the job of a training; preempted attempts are retried, failed attempts are not."""
    workspace = Path.cwd()
    resources = _of_single_type_where_variables_differ(config.resources, workspace)
    variables = variables_of(
        planned,
        config.env_vars,
        device=resources.device,
        process=training_variables(),
        workspace=workspace,
        git_commit=git_state()[0],
    )
    arguments = {"device": resources.device.kind, "trained": planned.trained, "digest": planned.digest}
    return JobRequest(
        name=f"{_JOB_NAME}-{re.sub(r'[^A-Za-z0-9._-]', '-', planned.run_id)[:80]}",
        # The node builds or reuses the environment, so the request has no paths of this machine.
        entrypoint=Call(train, (planned.train_config,), arguments),
        resources=resources,
        environment=create_environment(workspace=workspace, env_vars=variables),
        max_retries_failure=0,
    )


def _of_single_type_where_variables_differ(resources: ResourceConfig, workspace: Path) -> ResourceConfig:
    first, *others = (accelerator_defaults(workspace, choice.device) for choice in resources.choices)
    return resources if all(other == first for other in others) else resources.choices[0]


def is_trained(planned: Training) -> bool:
    """Returns True if a training of the same configuration has finished in the same folder."""
    if planned.trained is None:
        return False
    try:
        return _Trained.model_validate_json(storage.read_bytes(planned.trained)).digest == planned.digest
    except (FileNotFoundError, StorageError, ValidationError):
        return False


def _note(config: TrainLmOnPodConfig, planned: Training) -> None:
    if config.output_path is not None:
        content = json.dumps(planned.train_config, indent=2, default=str)
        storage.write_bytes(storage.join(storage.absolute(config.output_path), CONFIG_NAME), content.encode())
