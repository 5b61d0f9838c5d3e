"""Access to a pool: address, keys and engine, from the published file of a kept pool or from its proxy.

Files are published in a folder or store, and found by name. A local file must be readable by its owner alone, as ssh
requires for keys; other files are refused. In a store, read access to the bucket grants use of the pool.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationError, field_serializer

from pools.config import InferencePoolConfig, check_name
from pools.engine.engines import engine_kwargs
from pools.engine.launch import Servable
from pools.engine.parallelism import require_divisible
from pools.proxy.client import ProxyAddress, ProxyClient
from resources.addresses import refuse_user_information
from resources.config import Config
from resources.errors import BadInput, ProxyRefused, StorageError
from resources.jobs.addresses import is_loopback
from resources.regions.region_check import check_reads
from resources.settings import settings
from resources.storage import storage
from resources.storage.conditional_writes import (
    Version,
    creates_exclusively,
    delete_version,
    read_version,
    replace_bytes,
)
from resources.storage.regular_files import open_regular

_LONGEST_NAME = 200  # it becomes a file name
_OPEN_TO_OTHERS, _WRITTEN_BY_OTHERS = 0o077, 0o022
_SUFFIX = ".json"
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
    content = ProxyClient(address, key=key.get_secret_value()).ask_for("GET", "/pool")
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


class KeptPool(Config):
    """The published file of a kept pool. Holds keys."""

    name: str
    access: PoolAccess
    job_id: str
    """The job that keeps it up."""
    backend: str
    """The backend of that job, as in `ASSAY_JOBS`."""
    place: str
    """Description of that backend and its machine, since an address may mean another backend on another machine."""
    created: datetime
    idle_seconds: float
    """Time without a user after which it ends."""


@dataclass(frozen=True)
class PublishedPool:
    """A kept pool with the URI of its file and the version that was read."""

    pool: KeptPool
    uri: str
    version: Version


def places() -> list[str]:
    """Returns the locations that are searched for names; pools are published in the first."""
    own = str(settings().pools_dir)
    shared = settings().pools
    return [storage.absolute(shared), own] if shared else [own]


def require_name(name: str) -> None:
    """Raises BadInput if a pool cannot have that name."""
    try:
        check_name(name[:_LONGEST_NAME])
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"expected {_LONGEST_NAME} characters at most, found {len(name)}")
    except ValueError as error:
        raise BadInput(expected="a name for the pool", found=str(error), remedy="choose another name") from error


def publish(pool: KeptPool, *, in_place_of: PublishedPool | None = None) -> bool:
    """Publishes a pool under its name; returns False if a file of that name exists, or `in_place_of` has changed."""
    content = pool.model_dump_json(indent=2).encode()
    if in_place_of is not None:
        return replace_bytes(in_place_of.uri, content, standing=in_place_of.version, mode=0o600)
    place = places()[0]
    if storage.is_local(place):
        folder = storage.local_path(place)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _require_own(folder, folder.stat(), others=_WRITTEN_BY_OTHERS)
    if not creates_exclusively(place):
        raise BadInput(
            expected="a store where only one of several writers can create a file",
            found=f"{place}, where the second writer replaces the file of the first",
            remedy="set ASSAY_POOLS to a folder that the machines share, or to gs:// or s3://",
        )
    return storage.create_bytes(_file(place, pool.name), content, mode=0o600)


def withdraw(published: PublishedPool) -> None:
    """Removes the file of a pool unless another pool has replaced it."""
    delete_version(published.uri, standing=published.version)


def published_as(name: str) -> PublishedPool | None:
    """Returns the pool of a name; None if no location has a valid file for it."""
    pools = (_read(_file(place, name)) for place in places())
    return next((published for published in pools if published is not None), None)


def all_published() -> Iterator[PublishedPool]:
    """Yields the pools of all locations, sorted by name, each name once."""
    files = {storage.basename(file.uri) for place in places() for file in storage.list_files(place)}
    for name in sorted(file.removesuffix(_SUFFIX) for file in files if file.endswith(_SUFFIX)):
        if (published := published_as(name)) is not None:
            yield published


def _file(place: str, name: str) -> str:
    return storage.join(place, f"{name}{_SUFFIX}")


def _read(uri: str) -> PublishedPool | None:
    if not storage.is_local(uri):
        version = read_version(uri)
        pool = _pool_in(version.content) if version is not None else None
        return PublishedPool(pool, uri, version) if pool is not None and version is not None else None
    path = storage.local_path(uri)
    try:
        with open_regular(path.parent, path.name) as stream:
            status, content = os.fstat(stream.fileno()), stream.read()
    except PermissionError as error:
        remedy = "start a pool of your own, or use the address and the key of this pool"
        raise StorageError(expected=f"to read {path}", found=str(error), remedy=remedy) from error
    except OSError:
        return None  # no file, a link, or a folder
    if (pool := _pool_in(content)) is None:
        return None
    _require_own(path, status, others=_OPEN_TO_OTHERS)
    _require_own(path.parent, path.parent.stat(), others=_WRITTEN_BY_OTHERS)
    return PublishedPool(pool, uri, Version(content, None))


def _pool_in(content: bytes) -> KeptPool | None:
    try:
        return KeptPool.model_validate_json(content)
    except ValidationError:
        return None


def _require_own(path: Path, status: os.stat_result, *, others: int) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid() and not mode & others:
        return
    rights = "600" if stat.S_ISREG(status.st_mode) else "700"
    owner = "yours" if status.st_uid == os.geteuid() else f"user {status.st_uid}'s"
    raise BadInput(
        expected=f"{path} to be yours alone (mode {rights}), since it holds keys of pools",
        found=f"it is {owner}, mode {mode:o}",
        remedy="set ASSAY_POOLS to a folder of your own; if it is yours: chmod "
        f"{rights} {path}, and restart the pools with keys that other users may have read",
    )
