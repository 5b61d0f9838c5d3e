"""Kept pools: run by a job of their own, found by name, and ended when unused.

That job runs on the backend of the replicas and directs the pool, so that the pool survives the machine that started it
if its backend does. The pool's file holds its keys and the id of its job.
"""

from __future__ import annotations

import logging
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import SecretStr

from pools.config import InferencePoolConfig, is_address
from pools.engine.engines import with_engine_variables
from pools.engine.launch import Launcher, Servable
from pools.jobs import labelled, placed_with, pool_environment
from pools.pool.access import (
    KeptPool,
    PoolAccess,
    PublishedPool,
    access_at,
    all_published,
    described,
    places,
    publish,
    published_as,
    require_name,
    withdraw,
)
from pools.pool.inference import InferencePool, require_startable
from pools.protocol import ProxyStatus, ServedModel
from pools.proxy.client import ProxyAddress, address_of_job
from pools.settings import ProxyKeys, proxy_keys
from resources.backends.current import client_from_url, current_client
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.errors import BackendUnavailable, BadInput, ProxyFailed
from resources.jobs.announcements import announce
from resources.jobs.jobs import Call, Client, JobHandle, JobRequest
from resources.settings import settings

_STATUS_SECONDS = 5.0
_PREEMPTIONS = 100
_log = logging.getLogger("assay.pool")


@dataclass(frozen=True)
class KeptPoolState:
    """A kept pool and its state. `status` is None if its proxy does not answer; `reason` explains a failure."""

    pool: KeptPool
    state: Literal["up", "failed", "not answering", "out of reach"]
    status: ProxyStatus | None = None
    reason: str | None = None


def keep_up(
    name: str,
    config: InferencePoolConfig,
    checkpoints: Sequence[Servable],
    *,
    idle_seconds: float,
    launcher: Launcher | None = None,
    reserved: Callable[[ResourceConfig], AbstractContextManager[Any]] = nullcontext,
    variables: Mapping[str, str] = {},
    timeout_seconds: float = 120.0,
) -> KeptPool:
    """Starts a pool that outlives this process; returns once it can be used.

    Args:
        idle_seconds: time without leases and requests after which the pool ends.
        reserved: reserves the accelerators while the pool is up; called in the pool's own process.
        variables: further environment variables of that process, which `reserved` needs.
        timeout_seconds: time until its proxy must answer once it has a machine; engines start at the first request.
    """
    client, config, keys = current_client(), with_engine_variables(config), ProxyKeys.new()
    require_name(name)
    require_startable(config, checkpoints, client)
    if (standing := find(name)) is not None:
        raise _is_up(standing)
    models = {checkpoint.name: checkpoint.served for checkpoint in checkpoints}
    allowed = {"ASSAY_INSECURE": "1"} if settings().insecure else {}
    job = client.submit(
        JobRequest(
            labelled("pool", re.sub(r"[^A-Za-z0-9._-]", "-", name)[:60], secrets.token_hex(3)),
            Call(_keep, (config, models, idle_seconds, launcher, reserved)),
            resources=ResourceConfig(cpu=1, ram="2g", preemptible=False, **placed_with(config.resource_config)),
            environment=pool_environment(config, env_vars={**variables, **allowed, **keys.as_environment()}),
            max_retries_preemption=0 if client.is_local else _PREEMPTIONS,
            outlives_parent=True,
        )
    )
    try:
        remedy = "correct what the log complains about, and start it again"
        patience_seconds = timeout_seconds if client.is_local else config.startup_timeout_seconds
        address = address_of_job(job, f"the pool {name}", timeout_seconds=patience_seconds, remedy=remedy)
        access = described(address, key=keys.client, admin_key=keys.admin)
        asked = settings().jobs
        known = {model: served.uri for model, served in models.items()}  # the proxy may not have them yet
        pool = KeptPool(
            name=name,
            access=access.model_copy(update={"checkpoints": known}),
            job_id=job.job_id,
            backend=asked if asked and client_from_url(asked) is client else client.url,
            place=_place_of(client),
            created=datetime.now(UTC),
            idle_seconds=idle_seconds,
        )
        _publish(pool)
    except BaseException:
        job.terminate()
        raise
    return pool


def _publish(pool: KeptPool) -> None:
    for _ in range(2):  # `find` removes the file of a pool that has ended
        if publish(pool):
            return
        if (standing := find(pool.name)) is not None:
            raise _is_up(standing)
    raise BadInput(
        expected=f"no file {pool.name}.json in {places()[0]}",
        found="a file that describes no pool, or a link",
        remedy="remove it, or choose another name",
    )


def _keep(
    config: InferencePoolConfig,
    models: Mapping[str, ServedModel],
    idle_seconds: float,
    launcher: Launcher | None,
    reserved: Callable[[ResourceConfig], AbstractContextManager[Any]],
) -> None:
    # SIGTERM alone would skip the exits of the blocks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    with (
        reserved(config.resource_config),
        InferencePool(config, (), models=models, launcher=launcher, on_event=_log.info, keys=proxy_keys()) as pool,
    ):
        announce(pool.access.address.model_dump_json())
        pool.wait_until_unused(idle_seconds)
        _log.info("no client has used the pool for %g s", idle_seconds)


def access_to(pool: str, *, key: SecretStr | None = None, admin_key: SecretStr | None = None) -> PoolAccess:
    """Returns access to a pool by its name or address; without keys, an address uses those of the settings."""
    if not is_address(pool):
        return require(pool).access
    if key is None and admin_key is None:
        key, admin_key = settings().pool_key, settings().pool_admin_key
    return access_at(pool, key=key, admin_key=admin_key)


def find(name: str) -> KeptPool | None:
    """Returns the kept pool of that name; None if there is none, or its job has ended (its file is then removed)."""
    published = published_as(name)
    if published is None or (state := _state_of(published)) is None:
        return None
    if state.state == "out of reach":
        raise BackendUnavailable(
            expected=f"an answer of the pool {name} at {state.pool.access.address.base_url}, or of its backend",
            found=f"neither: {state.reason}",
            remedy=f"see that {state.pool.place} can be reached from here; if it is gone for good, delete "
            f"{published.uri}",
        )
    return state.pool


def require(name: str) -> KeptPool:
    """Returns the kept pool of that name, which must exist."""
    require_name(name)
    pool = find(name)
    if pool is None:
        up = ", ".join(state.pool.name for state in list_kept())
        raise BadInput(
            expected=f"a pool named {name} in {' or '.join(places())}",
            found=f"there: {up or 'none'}",
            remedy="start a pool (assay pool up --model PATH --name NAME), set ASSAY_POOLS to where it was published, "
            "or give its address",
        )
    return pool


def list_kept() -> list[KeptPoolState]:
    """Returns all published kept pools with their states, sorted by name."""
    states = (_state_of(published) for published in all_published())
    return [state for state in states if state is not None]


def take_down(name: str) -> KeptPool:
    """Ends a kept pool with all its processes, even if it is in use; needs access to its backend."""
    pool = require(name)
    if (job := _job_of(pool)) is not None:
        job.terminate()
    published = published_as(name)
    if published is not None and published.pool.job_id == pool.job_id:
        withdraw(published)
    return pool


def job_of(name: str) -> JobHandle | None:
    """Returns the job that keeps a pool up; None once it has ended."""
    return _job_of(require(name))


def _state_of(published: PublishedPool) -> KeptPoolState | None:
    pool = published.pool
    if (state := _as_its_proxy_says(pool)) is not None:
        return state
    try:
        job = _job_of(pool)
    except BackendUnavailable as error:
        return KeptPoolState(pool, "out of reach", reason=error.found)
    if job is None:
        withdraw(published)
        return None
    announced = job.announced()
    address = ProxyAddress.model_validate_json(announced) if announced else pool.access.address
    if address != pool.access.address:  # its machine was preempted, and it is up on another
        pool = pool.model_copy(update={"access": pool.access.model_copy(update={"address": address})})
        publish(pool, in_place_of=published)
    return _as_its_proxy_says(pool) or KeptPoolState(pool, "not answering")


def _as_its_proxy_says(pool: KeptPool) -> KeptPoolState | None:
    try:
        status = pool.access.proxy(timeout_seconds=_STATUS_SECONDS).status()
    except ProxyFailed:
        return None
    return KeptPoolState(pool, "failed" if status.failed is not None else "up", status, status.failed)


def _job_of(pool: KeptPool) -> JobHandle | None:
    try:
        client = LocalClient() if pool.backend == "local" else client_from_url(pool.backend)
        local_place = _place_of(client)
    except BadInput as error:
        raise BackendUnavailable(expected=error.expected, found=error.found, remedy=error.remedy) from error
    if local_place != pool.place:
        raise BackendUnavailable(
            expected=f"to reach {pool.place}, where the pool {pool.name} runs",
            found=f"{pool.backend} is {local_place} on this machine",
            remedy="run this on the machine that started the pool, or on a machine that uses the same cluster",
        )
    try:
        job = client.attach(pool.job_id)
    except BadInput:
        return None
    return None if job.status().finished else job


def _place_of(client: Client) -> str:
    if not client.is_local:
        return client.description
    return f"{socket.gethostname()}, {settings().jobs_dir if client.url == 'local' else client.url}"


def _is_up(pool: KeptPool) -> BadInput:
    return BadInput(
        expected=f"no pool named {pool.name}",
        found=f"a pool of that name is up at {pool.access.address.base_url}",
        remedy=f"use it, choose another name, or end it: assay pool down {pool.name}",
    )
