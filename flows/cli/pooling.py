"""Pools that are kept up between evaluations, from the command line: start, list, end."""

from __future__ import annotations

from typing import Any

from flows.cli.options import EvaluationOptions, pool_content
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable, environment_name
from pools.pool.kept import KeptPool, KeptPoolState, keep_up
from pools.weights.model_files import digest_model_folder
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.errors import NoCheckpoints
from tasks.checkpoints.discovery import find_checkpoints, name_of
from tasks.spec.loading import build_config


def start_pool(options: EvaluationOptions, *, pool_name: str | None, idle_minutes: float) -> KeptPool:
    """Keeps a pool up for every complete checkpoint at `options.model`; its engines start at the first request.

    Raises:
        NoCheckpoints: there is no complete checkpoint.
        BadInput: an option is wrong, or a pool of that name is up.
        ProxyFailed: the pool did not come up.
    """
    assert options.model is not None
    run_name = options.name or name_of(options.model)[0]
    config = build_config(pool_content(options), InferencePoolConfig, source="the options")
    found = [one for one in find_checkpoints(options.model) if one.complete and one.folder is not None]
    if not found:
        raise NoCheckpoints(
            expected=f"at least one complete checkpoint in Hugging Face layout at {options.model}",
            found="none",
            remedy="see which are there and why not: assay checkpoints PATH",
        )
    checkpoints = [
        Servable.from_folder(f"{run_name}{one.name.removeprefix(one.run)}", one.folder, digest_model_folder(one.folder))
        for one in found
        if one.folder is not None
    ]
    ensure_environment(ENVIRONMENTS[environment_name(config)])
    return keep_up(pool_name or run_name, config, checkpoints, idle_seconds=idle_minutes * 60)


def state_of(state: KeptPoolState) -> dict[str, Any]:
    """A kept pool as a row, without its keys."""
    pool, status = state.pool, state.status
    return {
        "name": pool.name,
        "state": state.state,
        "base_url": pool.access.address.base_url,
        "replicas": {
            one.name: _of_replica(one.lost, one.announcement.state, one.announcement.model) for one in status.replicas
        }
        if status
        else {},
        "held": status.held if status else None,
        "users": [lease.holder for lease in status.leases.values()] if status else [],
        "answered": sum(one.answered for one in status.models.values()) if status else None,
        "created": pool.created.isoformat(timespec="seconds"),
        "ends_after_idle_minutes": round(pool.idle_seconds / 60, 2),
        "job": pool.job_id,
    }


def _of_replica(lost: bool, state: str, model: str | None) -> str:
    return "silent" if lost else f"{state} {model}" if model and state == "ready" else state
