"""Layout of a training: its folders, its run id, Levanter's configuration with both, and its environment variables."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from resources.config import CpuConfig, Device, TpuConfig
from resources.errors import BadInput
from resources.storage import storage
from resources.storage.yaml_text import load_yaml
from tasks.spec.evaluation import digest_of
from tasks.spec.loading import read_mapping
from tasks.spec.training import EXPORTS, TrainLmOnPodConfig, check_train_config

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
    """A planned training: `train_config` is Levanter's configuration with run id and paths filled in.

    `trained` is the file that is written last and records `digest`; `compiled` is the folder for compiled programs,
    None for this machine's cache.
    """

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
    trainer: dict[str, Any] = {**(given.get("trainer") or {}), "id": run_id}
    checkpointer: dict[str, Any] = {
        **(trainer.get("checkpointer") or {}),
        "append_run_id_to_base_path": not config.impute_run_id_from_output_path,
    }
    places: dict[str, Any] = {}
    if output is not None:
        checkpointer["base_path"] = storage.join(output, CHECKPOINTS)
        checkpointer["temporary_base_path"] = _temporary(config, output)
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
        compiled=_compiled(config, output),
    )


def run_id_of(config: TrainLmOnPodConfig, train_config: Mapping[str, Any], *, process: Mapping[str, str]) -> str:
    """Returns the run's id: the trainer's own, else RUN_ID of the training, else RUN_ID of this process, else the last
    part of `output_path` if `impute_run_id_from_output_path`, else a new id.
    """
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


def _temporary(config: TrainLmOnPodConfig, output: str) -> str:
    parent = _temporary_folder(config, output)
    if parent is None:
        return storage.join(output, "temporary")
    path = output.split("://", 1)[-1].strip("/")
    return storage.join(parent, _TEMPORARY_CHECKPOINTS, path)


def _compiled(config: TrainLmOnPodConfig, output: str | None) -> str | None:
    parent = _temporary_folder(config, output)
    return storage.join(parent, _COMPILED) if parent else None


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
    """Returns the variables of a training's job, without those of every job.

    Args:
        given: variables by the caller; they override all except RUN_ID.
        process: variables of the submitting process.
        workspace: folder with the accelerator defaults of Levanter's launcher.
    """
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
