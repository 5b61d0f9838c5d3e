"""A pool on the deterministic engine for the scenarios of the fault suite."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from fakes.pools import InferencePool
from faults.scenarios.target import Recipe, Target
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from resources.backends.local.client import LocalClient

MODEL = "run-1"


def pool_config(**fields: Any) -> InferencePoolConfig:
    """Returns a configuration with short leases and practically unlimited restarts."""
    return InferencePoolConfig.model_validate(
        {
            "model": {"name": "run"},
            "startup_timeout_seconds": 60,
            "engine_timeout_seconds": 60,
            "proxy_timeout_seconds": 120,
            "lease_seconds": 1.5,
            "max_replica_restarts": 50,
            **fields,
        }
    )


@contextmanager
def running_target(
    folder: Path, *, replicas: int, on_event: Callable[[str], None] = lambda line: None, **fields: Any
) -> Iterator[Target]:
    """Runs a pool of fake engines; the same sampled request gets another sample each time."""
    checkpoint = Servable.from_uri(MODEL, str(write_checkpoint(folder / "step-1", seed=1)))
    config = pool_config(resource_config={"replicas": replicas}, **fields)
    launcher = FakeLauncher(folder, faults={"fresh_samples": True})
    other = folder / "another"
    other.mkdir()
    recipe = Recipe(config, (checkpoint,), FakeLauncher(other, faults={"fresh_samples": True}))
    client = LocalClient(grace_seconds=2)
    try:
        with InferencePool(config, [checkpoint], client=client, launcher=launcher, on_event=on_event) as pool:
            pool.load(MODEL)
            yield Target(pool, MODEL, owner_pid=os.getpid(), recovery_seconds=60, inject=inject, recipe=recipe)
    finally:
        client.shutdown()


def inject(url: str, faults: Mapping[str, Any]) -> None:
    httpx.put(f"{url}/fake/faults", json=dict(faults), timeout=30).raise_for_status()
