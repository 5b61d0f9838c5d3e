"""Training by Levanter through the job client on any backend."""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from resources.backends.current import current_client
from resources.config import CpuConfig, Device, TpuConfig
from resources.errors import BackendUnavailable, BadInput, JobFailed, StorageError, error_of
from resources.jobs.jobs import Call, Client, JobHandle, JobRequest, JobStatus, create_environment
from resources.regions.region_check import check_gcs_paths_same_region
from resources.settings import variables_named
from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.prefect_server.client import accelerators_reserved_until
from tasks.prefect_server.progress import report_event
from tasks.records.provenance import git_state
from tasks.spec.evaluation import digest_of
from tasks.spec.loading import read_mapping
from tasks.spec.training import EXPORTS, TrainLmOnPodConfig, check_train_config
from tasks.training.node import train

CONFIG_NAME = "train_config.json"
SILENCE_SECONDS = 600.0
"""Time without an answer after which a training on a backend counts as lost; a controller may be restarting."""
_JOB_NAME = "train_lm"
_OF_A_TRAINING = ("RUN_ID", "WANDB_API_KEY", "WANDB_MODE")
_LOOK_AGAIN_SECONDS = 5.0


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
            refusal = error_of(json.loads(job.announced() or ""))
        except (ValueError, LookupError, TypeError):
            raise error from None
        raise refusal from error


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
    planned = training_of(config, process=variables_named(*_OF_A_TRAINING))
    check_gcs_paths_same_region(
        {"train_config": planned.train_config, "output_path": config.output_path, "compiled": planned.compiled},
        local_ok=not isinstance(config.resources.device, TpuConfig),
        resources=config.resources,
    )
    return planned


def training_job(config: TrainLmOnPodConfig, planned: Training) -> JobRequest:
    """Returns the job of a training; preempted attempts are retried, failed attempts are not."""
    workspace = Path.cwd()
    first, *others = (accelerator_defaults(workspace, choice.device) for choice in config.resources.choices)
    resources = config.resources if all(other == first for other in others) else config.resources.choices[0]
    variables = variables_of(
        planned,
        config.env_vars,
        device=resources.device,
        process=variables_named(*_OF_A_TRAINING),
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


def is_trained(planned: Training) -> bool:
    """Returns True if a training of the same configuration has finished in the same folder."""
    if planned.trained is None:
        return False
    try:
        return json.loads(storage.read_bytes(planned.trained))["digest"] == planned.digest
    except (FileNotFoundError, StorageError, ValueError, LookupError, TypeError):
        return False


def _note(config: TrainLmOnPodConfig, planned: Training) -> None:
    if config.output_path is not None:
        content = json.dumps(planned.train_config, indent=2, default=str)
        storage.write_bytes(storage.join(storage.absolute(config.output_path), CONFIG_NAME), content.encode())


CHECKPOINTS = "checkpoints"
LOGS = "logs"
TOKENS = "cache"
TRAINED_NAME = "trained.json"
_TEMPORARY_CHECKPOINTS = "ttl=14d/checkpoints"
_COMPILED = "ttl=30d/compilation-cache"
_LEVANTER_FILES = (".levanter.yaml", ".config")
_WITHOUT_WANDB = {"disabled", "offline", "dryrun"}
_DEFAULTS = {
    "HF_DATASETS_TRUST_REMOTE_CODE": "1",
    "HF_ALLOW_CODE_EVAL": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TPU_MIN_LOG_LEVEL": "2",
    "TPU_STDERR_LOG_LEVEL": "2",
}


@dataclass(frozen=True)
class Training:
    """A planned training: `train_config` is Levanter's configuration with run id and paths filled in. `trained` is the
    file that is written last and records `digest`; `compiled` is the folder for compiled programs, None for this
    machine's cache."""

    run_id: str
    train_config: Mapping[str, Any]
    trained: str | None
    digest: str
    compiled: str | None


def training_of(config: TrainLmOnPodConfig, *, process: Mapping[str, str]) -> Training:
    """Returns a training with its run id and paths filled in."""
    given = _train_config(config)
    run_id = run_id_of(config, given, process=process)
    output = storage.absolute(config.output_path) if config.output_path else None
    expiring = _temporary_folder(config, output)
    trainer: dict[str, Any] = {**(given.get("trainer") or {}), "id": run_id}
    checkpointer: dict[str, Any] = {
        **(trainer.get("checkpointer") or {}),
        "append_run_id_to_base_path": not config.impute_run_id_from_output_path,
    }
    places: dict[str, Any] = {}
    if output is not None:
        checkpointer["base_path"] = storage.join(output, CHECKPOINTS)
        path = output.split("://", 1)[-1].strip("/")
        checkpointer["temporary_base_path"] = (
            storage.join(expiring, _TEMPORARY_CHECKPOINTS, path) if expiring else storage.join(output, "temporary")
        )
        places["hf_save_path"] = storage.join(output, EXPORTS)
        if storage.is_local(output):  # Levanter writes its log to disk only
            trainer.setdefault("log_dir", storage.join(output, LOGS))
    trainer["checkpointer"] = checkpointer
    if isinstance(config.resources.device, CpuConfig):
        trainer["require_accelerator"] = False
    data = {**(given.get("data") or {}), "auto_build_caches": config.auto_build_caches}
    if output is not None:
        data.setdefault("cache_dir", storage.join(output, TOKENS))  # Levanter's default is in a temporary folder
    return Training(
        run_id=run_id,
        train_config={**given, **places, "data": data, "trainer": trainer},
        trained=storage.join(output, TRAINED_NAME) if output and config.impute_run_id_from_output_path else None,
        digest=digest_of(given),
        compiled=storage.join(expiring, _COMPILED) if expiring else None,
    )


def run_id_of(config: TrainLmOnPodConfig, train_config: Mapping[str, Any], *, process: Mapping[str, str]) -> str:
    """Returns the run's id: the trainer's own, else RUN_ID of the training, else RUN_ID of this process, else the last
    part of `output_path` if `impute_run_id_from_output_path`, else a new id."""
    imputed = None
    if config.impute_run_id_from_output_path and config.output_path:
        imputed = storage.basename(storage.absolute(config.output_path))
    return (
        (train_config.get("trainer") or {}).get("id")
        or config.env_vars.get("RUN_ID")
        or process.get("RUN_ID")
        or imputed
        or default_run_id()
    )


def default_run_id() -> str:
    """Returns eight random letters and digits: W&B shows no name for a run with an id of another form."""
    return base64.b32encode(secrets.token_bytes(5)).decode().lower()


def _train_config(config: TrainLmOnPodConfig) -> dict[str, Any]:
    if isinstance(config.train_config, dict):
        return config.train_config
    content, _ = read_mapping(config.train_config, kind="a file with Levanter's configuration")
    try:
        check_train_config(content)
    except ValueError as error:
        raise BadInput(
            expected=f"a configuration of Levanter's train_lm in {config.train_config}",
            found=str(error),
            remedy="correct it there",
        ) from error
    return content


def _temporary_folder(config: TrainLmOnPodConfig, output: str | None) -> str | None:
    if config.temporary_path is not None:
        return storage.absolute(config.temporary_path)
    if output is None or storage.is_local(output):
        return None
    scheme, path = output.split("://", 1)
    return f"{scheme}://{path.partition('/')[0]}/tmp"


def variables_of(
    training: Training,
    given: Mapping[str, str],
    *,
    device: Device,
    process: Mapping[str, str],
    workspace: Path,
    git_commit: str | None,
) -> dict[str, str]:
    """Returns the variables of a training's job, without those of every job. `given`: variables by the caller; they
    override all except RUN_ID. `process`: variables of the submitting process. `workspace`: folder with the accelerator
    defaults of Levanter's launcher."""
    defaults = {**_DEFAULTS, **({"GIT_COMMIT": git_commit} if git_commit else {})}
    defaults |= {name: process[name] for name in ("WANDB_MODE",) if name in process}
    variables = {**defaults, **accelerator_defaults(workspace, device), **given, "RUN_ID": training.run_id}
    if isinstance(device, TpuConfig):
        _check_wandb({**process, **variables})
    if training.compiled:  # else the cache of the machine that runs it, which sets this itself
        variables.setdefault("JAX_COMPILATION_CACHE_DIR", training.compiled)
    if "://" in variables.get("JAX_COMPILATION_CACHE_DIR", ""):
        # XLA's own caches are local files; with a store they fail the first compilation.
        variables.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")
    return variables


def accelerator_defaults(workspace: Path, device: Device) -> dict[str, str]:
    """Returns the defaults of Levanter's launcher file for a TPU: of all TPUs, of the generation, and of the type."""
    if not isinstance(device, TpuConfig):
        return {}
    path = next((workspace / name for name in _LEVANTER_FILES if (workspace / name).is_file()), None)
    if path is None:
        return {}
    try:
        content: dict[str, Any] = load_yaml(path.read_text()) or {}
        by_accelerator = content.get("accel_env") or {}
        generation = device.variant.partition("-")[0]
        parts = (content.get("env"), by_accelerator.get(generation), by_accelerator.get(device.variant))
        return {name: str(value) for part in parts for name, value in (part or {}).items()}
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise BadInput(
            expected=f"env and accel_env, with names and values, in {path}", found=str(error), remedy="correct the file"
        ) from error


def _check_wandb(variables: Mapping[str, str]) -> None:
    if variables.get("WANDB_API_KEY") or variables.get("WANDB_MODE") in _WITHOUT_WANDB:
        return
    raise BadInput(
        expected="WANDB_API_KEY for a training on TPUs, which reports to W&B from the first step",
        found="none, here or in env_vars",
        remedy=f"set it, or WANDB_MODE to one of {', '.join(sorted(_WITHOUT_WANDB))}",
    )
