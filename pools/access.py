"""Access to a pool: its address, its keys, and how it serves. Kept pools write it into a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import SecretStr, field_serializer

from pools.config import InferencePoolConfig
from pools.engine.engines import engine_kwargs
from pools.engine.launch import Servable
from pools.engine.parallelism import require_divisible
from pools.proxy.client import ProxyAddress, ProxyClient
from resources.config import Config
from resources.jobs.addresses import is_loopback
from resources.regions.region_check import check_reads

_NOTHING_TO_DO_WITH_ANSWERS = frozenset(
    {
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "max_num_seqs",
        "max_num_batched_tokens",
        "disable_log_stats",
        "disable_log_requests",
        "enable_log_requests",
        "uvicorn_log_level",
    }
)


class PoolAccess(Config):
    """A pool's address, keys and configuration; a file with it must be nobody else's to read."""

    address: ProxyAddress
    """Of its proxy."""
    key: SecretStr
    """For requests to its models."""
    admin_key: SecretStr
    """For asking it to serve checkpoints."""
    config: InferencePoolConfig
    """Its configuration."""
    engine_build: str
    """Names the build of its engine."""
    engine_packages: dict[str, str] = {}
    """Versions of its packages, and a digest over all of them."""

    @field_serializer("key", "admin_key", when_used="json")
    def _key_in_the_clear(self, key: SecretStr) -> str:
        return key.get_secret_value()

    def proxy(self, *, timeout_seconds: float = 10) -> ProxyClient:
        """Speaks to its proxy, which may take so long to answer."""
        return ProxyClient(self.address, admin_key=self.admin_key.get_secret_value(), timeout_seconds=timeout_seconds)

    def engine_identity(self) -> dict[str, Any]:
        """The engine that answers: build, device and arguments."""
        return {
            "name": "vllm",
            "build": self.engine_build,
            "packages": self.engine_packages,
            "device": self.config.device,
            "arguments": engine_kwargs(self.config),
            **self.config.model.unnamed_inputs(),
        }


def require_usable(access: PoolAccess, checkpoints: Sequence[Servable]) -> None:
    """Refuses what a pool cannot serve, or should not read; where it runs is known if it names regions, or is here.

    Raises:
        BadInput: its engines cannot divide a checkpoint over their chips.
        WrongRegion: one lies in another region, and reading it from there would cost too much.
    """
    require_divisible(access.config, checkpoints)
    resources = access.config.resource_config
    if resources.regions or is_loopback(access.address.host):
        check_reads([checkpoint.uri for checkpoint in checkpoints], resources, backend=None)


def engine_digest(config: InferencePoolConfig, build: str) -> str:
    """Identifies an engine as far as its answers depend on it: build, device, variables, and arguments.

    Those about sizes and logs do not count.
    """
    arguments = {
        name: value for name, value in engine_kwargs(config).items() if name not in _NOTHING_TO_DO_WITH_ANSWERS
    }
    content = json.dumps(
        [build, config.device, {**arguments, **config.model.unnamed_inputs()}], sort_keys=True, default=str
    )
    return hashlib.sha256(content.encode()).hexdigest()[:32]
