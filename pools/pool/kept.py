"""Pools that outlive whoever started them: kept up by a job of their own, found by name, ended when unused."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pools.access import PoolAccess
from pools.config import InferencePoolConfig, check_name
from pools.engine.launch import Launcher, Servable
from pools.engine.parallelism import require_divisible
from pools.pool.inference import InferencePool
from pools.protocol import ProxyStatus
from resources.backends.choice import client_from_url
from resources.backends.current import current_client
from resources.backends.local.client import LocalClient
from resources.config import Config, ResourceConfig
from resources.errors import BadInput, ProxyFailed
from resources.jobs.jobs import Call, JobAlreadyExists, JobHandle, JobRequest, create_environment
from resources.regions.region_check import check_reads
from resources.settings import job_id, settings

_POOL_FILE_POLL_SECONDS = 0.1
_LONGEST_NAME = 200  # a file is named after it
_log = logging.getLogger("assay.pool")


class KeptPool(Config):
    """A pool that stays up, as its file says. Holds keys: the file is its owner's alone."""

    name: str
    """Name it is found by."""
    access: PoolAccess
    """Its address, keys and configuration."""
    job_id: str
    """The job that keeps it up."""
    created: datetime
    """Start of the pool, UTC."""
    idle_seconds: float
    """Time that it stays up without a user."""
    checkpoints: dict[str, str] = {}
    """Locations of the checkpoints that it was started with, by name."""


@dataclass(frozen=True)
class KeptPoolState:
    """A kept pool as it is now; `status` is what its proxy says, none where that does not answer."""

    pool: KeptPool
    state: Literal["up", "failed", "not answering"]
    status: ProxyStatus | None


def keep_up(
    name: str,
    config: InferencePoolConfig,
    checkpoints: Sequence[Servable],
    *,
    idle_seconds: float,
    launcher: Launcher | None = None,
    reserved: Callable[[ResourceConfig], AbstractContextManager[Any]] = nullcontext,
    timeout_seconds: float = 120.0,
) -> KeptPool:
    """Starts a pool that goes on when this process ends; returns once it can be used.

    Args:
        name: to find it by.
        config: how it serves.
        checkpoints: those that may be asked for; its users may bring others.
        idle_seconds: how long it stays when nobody has a lease or asks anything.
        launcher: how an engine server is started; vLLM from its pinned environment when left out.
        reserved: holds the accelerators for as long as the pool is up, called by the pool's own process.
        timeout_seconds: how long its proxy may take to answer; engines start at the first request.

    Raises:
        BadInput: the name cannot be used, a pool of that name is up, or a replica cannot run on what it gets.
        WrongRegion: a checkpoint lies in another region, and reading it from there would cost too much.
        ProxyFailed: it ended, or did not answer in time.
    """
    _require_name(name)
    require_divisible(config, checkpoints)
    if (standing := find(name)) is not None:
        raise _is_up(standing)
    client = current_client()
    uris = [checkpoint.uri for checkpoint in checkpoints]
    check_reads(uris, config.resource_config, backend=None if client.is_local else client.url)
    backend = client.url  # the job that keeps it up is of this machine; its replicas may not be
    try:
        job = LocalClient().submit(
            JobRequest(
                name=f"pool-{name}"[:90],
                entrypoint=Call(_keep, (name, config, tuple(checkpoints), idle_seconds, launcher, reserved, backend)),
                resources=ResourceConfig(preemptible=False),
                environment=create_environment(),
                max_retries_preemption=0,
                outlives_parent=True,
            )
        )
    except JobAlreadyExists as error:
        raise BadInput(expected=error.expected, found=error.found, remedy="wait until it is up") from error
    return _wait_until_up(name, job, timeout_seconds)


def _require_name(name: str) -> None:
    try:
        check_name(name[:_LONGEST_NAME])
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"expected {_LONGEST_NAME} characters at most, found {len(name)}")
    except ValueError as error:
        raise BadInput(expected="a name for the pool", found=str(error), remedy="choose another name") from error


def _wait_until_up(name: str, job: JobHandle, timeout_seconds: float) -> KeptPool:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline and not job.status().finished:
        pool = _read(_file_of(name))
        if pool is not None and pool.job_id == job.job_id:
            return pool
        time.sleep(_POOL_FILE_POLL_SECONDS)
    ended = job.status().finished
    if ended and (standing := find(name)) is not None:
        raise _is_up(standing)
    log = job.logs(20).rstrip()
    job.terminate()
    raise ProxyFailed(
        expected=f"the pool {name} to answer within {timeout_seconds:g} s",
        found=f"{'it ended' if ended else 'it does not answer yet'}. Last lines of its log:\n{log}",
        remedy="correct what the log complains about, and start it again",
    )


def _keep(
    name: str,
    config: InferencePoolConfig,
    checkpoints: tuple[Servable, ...],
    idle_seconds: float,
    launcher: Launcher | None,
    reserved: Callable[[ResourceConfig], AbstractContextManager[Any]],
    backend: str,
) -> None:
    """The pool's own job: serves until nobody uses the pool any more, or it is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by itself it would skip the blocks' ends
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    with (
        reserved(config.resource_config),
        InferencePool(
            config,
            checkpoints,
            client=client_from_url(backend),
            launcher=launcher,
            on_event=_log.info,
            own_session=False,
        ) as pool,
    ):
        kept = KeptPool(
            name=name,
            access=pool.access,
            job_id=job_id(),
            created=datetime.now(UTC),
            idle_seconds=idle_seconds,
            checkpoints={checkpoint.name: checkpoint.uri for checkpoint in checkpoints},
        )
        _publish(kept)
        try:
            pool.wait_until_unused(idle_seconds)
            _log.info("nobody has used the pool for %g s", idle_seconds)
        finally:
            _remove(kept)


def find(name: str) -> KeptPool | None:
    """The kept pool of that name; None if there is none, or its job has ended (its file is removed then)."""
    pool = _read(_file_of(name))
    if pool is None:
        return None
    if _job_of(pool) is None:
        _remove(pool)
        return None
    return pool


def require(name: str) -> KeptPool:
    """The kept pool of that name.

    Raises:
        BadInput: there is none, or none can have it.
    """
    _require_name(name)
    pool = find(name)
    if pool is None:
        up = ", ".join(state.pool.name for state in list_kept())
        raise BadInput(
            expected=f"a pool named {name}",
            found=f"on this machine: {up or 'none'}",
            remedy="start one: assay pool up --model PATH --name NAME",
        )
    return pool


def list_kept() -> list[KeptPoolState]:
    """Every kept pool of this machine, by name, with what it is doing."""
    states = []
    for file in sorted(settings().pools_dir.glob("*.json")):
        pool = find(file.stem)
        if pool is None:
            continue
        try:
            status = pool.access.proxy().status()
            states.append(KeptPoolState(pool, "failed" if status.failed is not None else "up", status))
        except ProxyFailed:
            states.append(KeptPoolState(pool, "not answering", None))
    return states


def take_down(name: str) -> KeptPool:
    """Ends a kept pool with everything it runs, whoever uses it.

    Raises:
        BadInput: there is none of that name.
    """
    pool = require(name)
    job = _job_of(pool)
    if job is not None:
        job.terminate()
    _remove(pool)
    return pool


def _job_of(pool: KeptPool) -> JobHandle | None:
    """The job that keeps a pool up, None once it has ended."""
    try:
        job = LocalClient().attach(pool.job_id)
    except BadInput:
        return None
    return None if job.status().finished else job


def _read(file: Path) -> KeptPool | None:
    try:
        return KeptPool.model_validate_json(file.read_bytes()) if file.is_file() else None
    except (FileNotFoundError, ValidationError):
        return None


def _is_up(pool: KeptPool) -> BadInput:
    return BadInput(
        expected=f"no pool named {pool.name}",
        found=f"one that is up at {pool.access.address.base_url}",
        remedy=f"use it, choose another name, or end it: assay pool down {pool.name}",
    )


def _publish(pool: KeptPool) -> None:
    """Writes the file of a pool at once, readable for its owner alone.

    Raises:
        BadInput: another pool of that name is up.
    """
    file = _file_of(pool.name)
    with _alone():
        standing = _read(file)
        if standing is not None and _job_of(standing) is not None:
            raise _is_up(standing)
        unfinished = file.with_suffix(".part")
        unfinished.unlink(missing_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # no link, no rights from before
        with os.fdopen(descriptor, "w") as stream:
            stream.write(pool.model_dump_json(indent=2))
        unfinished.replace(file)


def _remove(pool: KeptPool) -> None:
    """Removes the file of a pool, unless it is another's by now."""
    file = _file_of(pool.name)
    with _alone():
        standing = _read(file)
        if standing is not None and standing.job_id == pool.job_id:
            file.unlink()


@contextmanager
def _alone() -> Iterator[None]:
    """Keeps every other process from changing files of kept pools meanwhile."""
    folder = settings().pools_dir
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _file_of(name: str) -> Path:
    return settings().pools_dir / f"{name}.json"
