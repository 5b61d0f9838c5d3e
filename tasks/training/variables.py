"""The environment variables of a training, by precedence: the caller's, defaults of the accelerator, ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from resources.config import Device, TpuConfig
from resources.errors import BadInput
from resources.storage.yaml_text import load_yaml
from tasks.training.layout import Training

_LEVANTER_FILES = (".levanter.yaml", ".config")
_WITHOUT_WANDB = {"disabled", "offline", "dryrun"}
_DEFAULTS = {
    "HF_DATASETS_TRUST_REMOTE_CODE": "1",
    "HF_ALLOW_CODE_EVAL": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TPU_MIN_LOG_LEVEL": "2",
    "TPU_STDERR_LOG_LEVEL": "2",
}


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
