"""Access to a pool: address, keys and engine, from the file of a running pool or from its proxy."""

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

_NOTHING_TO_DO_WITH_ANSWERS = {
    *("kv_cache_memory_bytes", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens"),
    *("disable_log_stats", "disable_log_requests", "enable_log_requests", "uvicorn_log_level"),
}


class PoolDescription(Config):
    """A pool's description, as its proxy returns it to clients with a key."""

    config: InferencePoolConfig
    engine_build: str
    engine_packages: dict[str, str] = {}
    """Versions of its packages, and a digest over all of them."""
    checkpoints: dict[str, str] = {}


class PoolAccess(PoolDescription):
    """A pool with its address and keys. A file with it must be readable by its owner only."""

    address: ProxyAddress
    key: SecretStr
    """Key for requests to its models, and for evaluating the models it already has."""
    admin_key: SecretStr | None = None
    """Key for adding checkpoints and for copies of answers; None for users without it."""

    @field_serializer("key", "admin_key", when_used="json")
    def _key_in_the_clear(self, key: SecretStr | None) -> str | None:
        return key.get_secret_value() if key is not None else None

    def proxy(self, *, timeout_seconds: float = 10) -> ProxyClient:
        key = self.admin_key or self.key
        return ProxyClient(self.address, key=key.get_secret_value(), timeout_seconds=timeout_seconds)

    def engine_identity(self) -> dict[str, Any]:
        return {
            "name": "vllm",
            "build": self.engine_build,
            "packages": self.engine_packages,
            "device": self.config.device,
            "arguments": engine_kwargs(self.config),
            **self.config.model.unnamed_inputs(),
        }


def require_usable(access: PoolAccess, checkpoints: Sequence[Servable]) -> None:
    """Refuses checkpoints that the pool cannot serve or should not read.

    The region check needs the pool's location: it runs only if the pool names regions or is on this machine.
    """
    require_divisible(access.config, checkpoints)
    resources = access.config.resource_config
    if resources.regions or is_loopback(access.address.host):
        check_reads([place for checkpoint in checkpoints for place in checkpoint.locations], resources, backend=None)


def access_at(url: str, *, key: SecretStr | None, admin_key: SecretStr | None = None) -> PoolAccess:
    """Returns the access to the pool at an address: `https://host/…`, or http where that is allowed.

    Reads the pool's description from its proxy. `key` is the client key; it defaults to the admin key.
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
        problem = error.found if isinstance(error, ProxyRefused) else "something else answers, or another Assay"
        raise BadInput(
            expected=f"a pool at {url} that takes this key",
            found=problem,
            remedy="correct the address or the key: `assay pool env NAME` prints both where the pool was started",
        ) from error


def described(address: ProxyAddress, *, key: SecretStr, admin_key: SecretStr | None) -> PoolAccess:
    """Returns the access to the pool behind a proxy; reads the pool's description from the proxy."""
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
    """Returns a digest of the engine as far as its answers depend on it, without arguments about sizes and logs."""
    arguments = {
        name: value for name, value in engine_kwargs(config).items() if name not in _NOTHING_TO_DO_WITH_ANSWERS
    }
    content = json.dumps(
        [build, config.device, {**arguments, **config.model.unnamed_inputs()}], sort_keys=True, default=str
    )
    return hashlib.sha256(content.encode()).hexdigest()[:32]
