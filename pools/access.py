"""Access to a pool: its address, its keys, and how it serves; from the file of a kept pool, or asked of its proxy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationError, field_serializer

from pools.config import InferencePoolConfig
from pools.engine.engines import engine_kwargs
from pools.engine.launch import Servable
from pools.engine.parallelism import require_divisible
from pools.proxy.client import ProxyAddress, ProxyClient
from resources.addresses import refuse_user_information
from resources.config import Config
from resources.errors import BadInput, ProxyRefused
from resources.jobs.addresses import is_loopback
from resources.regions.region_check import check_reads
from resources.settings import settings

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


class PoolDescription(Config):
    """A pool as its proxy describes it to whoever has a key of it."""

    config: InferencePoolConfig
    """Its configuration."""
    engine_build: str
    """Names the build of its engine."""
    engine_packages: dict[str, str] = {}
    """Versions of its packages, and a digest over all of them."""
    checkpoints: dict[str, str] = {}
    """Locations of the checkpoints that it knows, by name."""


class PoolAccess(PoolDescription):
    """A pool with its address and keys; a file with it must be nobody else's to read."""

    address: ProxyAddress
    """Of its proxy."""
    key: SecretStr
    """For requests to its models, and for evaluating those that it knows."""
    admin_key: SecretStr | None = None
    """For bringing it checkpoints, and for copies of answers; None where the user was not given it."""

    @field_serializer("key", "admin_key", when_used="json")
    def _key_in_the_clear(self, key: SecretStr | None) -> str | None:
        return key.get_secret_value() if key is not None else None

    def proxy(self, *, timeout_seconds: float = 10) -> ProxyClient:
        """Speaks to its proxy, which may take so long to answer."""
        key = self.admin_key or self.key
        return ProxyClient(self.address, key=key.get_secret_value(), timeout_seconds=timeout_seconds)

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
    """Refuses what a pool cannot serve, or should not read; where it runs is known if it names regions, or is here."""
    require_divisible(access.config, checkpoints)
    resources = access.config.resource_config
    if resources.regions or is_loopback(access.address.host):
        check_reads([place for checkpoint in checkpoints for place in checkpoint.locations], resources, backend=None)


def access_at(url: str, *, key: SecretStr | None, admin_key: SecretStr | None = None) -> PoolAccess:
    """Access to the pool at an address, which says itself how it serves.

    Args:
        url: `https://host/…`, or http where that is allowed.
        key: that of its clients; the admin key will do in its place.
        admin_key: its admin key, where the user has it.
    """
    address = _address_of(url)
    key = key or admin_key
    if key is None:
        raise BadInput(
            expected=f"the key of the pool at {url}",
            found="neither ASSAY_POOL_KEY nor a block with it",
            remedy="set ASSAY_POOL_KEY to what `assay pool env NAME` prints where the pool was started",
        )
    try:
        return described(address, key=key, admin_key=admin_key)
    except (ProxyRefused, ValidationError) as error:
        found = error.found if isinstance(error, ProxyRefused) else "something else answers, or another Assay"
        raise BadInput(
            expected=f"a pool at {url} that takes this key",
            found=found,
            remedy="correct the address or the key: `assay pool env NAME` prints both where the pool was started",
        ) from error


def described(address: ProxyAddress, *, key: SecretStr, admin_key: SecretStr | None) -> PoolAccess:
    """Access to the pool behind a proxy, as that says itself how it serves.

    Raises:
        ValidationError: something else answers.
    """
    content = ProxyClient(address, key=key.get_secret_value()).describe()
    description = PoolDescription.model_validate_json(content)
    return PoolAccess(**dict(description), address=address, key=key, admin_key=admin_key)


def _address_of(url: str) -> ProxyAddress:
    refuse_user_information(url, place="the address of a pool")
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        whole = bool(parts.hostname) and not parts.query and not parts.fragment
    except (ValueError, KeyError):
        port, whole = 0, False
    host = parts.hostname or ""
    if not whole:
        raise BadInput(
            expected="the address of a pool, such as https://pool.example.org",
            found=url,
            remedy="correct it, or give the name of a pool",
        )
    if parts.scheme == "http" and not is_loopback(host) and not settings().insecure:
        raise BadInput(
            expected="https, since the pool's key, prompts and answers would travel unencrypted",
            found=url,
            remedy="put TLS before the pool (docs/security.md); or, if the network keeps strangers out, say so: "
            "--insecure, or ASSAY_INSECURE=1",
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return ProxyAddress.model_validate({"host": host, "port": port, "scheme": parts.scheme, "path": path})


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
