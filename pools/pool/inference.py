"""`InferencePool`: replicas of a model family behind a single endpoint, for the duration of a `with` block.

A thread directs it: polls requests and reports of replicas, and sends orders.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Self

from pools.config import InferencePoolConfig
from pools.engine.engines import with_engine_variables
from pools.engine.launch import Launcher, Servable, VllmLauncher, environment_name
from pools.engine.parallelism import require_divisible, require_place
from pools.jobs import labelled, pool_environment
from pools.pool.access import PoolAccess, PoolDescription, engine_digest
from pools.pool.director import assign
from pools.pool.loads import LoadLog
from pools.pool.processes import AgentJobs, ProxyProcess, check_network
from pools.pool.session import PoolSession
from pools.protocol import Demand, DesiredState, ProxyStatus, ServedModel
from pools.proxy.client import ProxyClient
from pools.replica.agent import run_agent
from pools.settings import POOL_JOIN_TOKEN_VARIABLE, ProxyKeys
from resources.backends.current import current_client
from resources.environments.environments import ENVIRONMENTS, ensure_environment, pinned_versions, planned_identity
from resources.errors import ProxyFailed
from resources.jobs.jobs import Call, Client, JobHandle, JobRequest
from resources.regions.region_check import check_reads

_log = logging.getLogger("assay.pool")
_PREEMPTIONS = 100
_DIRECTOR_SECONDS = 3.0  # an established listening socket still accepts connections for a proxy that has ended
_IDLE_WAIT_SECONDS = 0.5
_BUSY_WAIT_SECONDS = 0.05
_SILENT_PROXY_SECONDS = 30.0


def require_startable(config: InferencePoolConfig, checkpoints: Sequence[Servable], client: Client) -> None:
    """Refuses a pool that its network, its resources or the regions of its checkpoints do not allow."""
    check_network(config, is_local=client.is_local)
    require_place(config.resource_config, is_local=client.is_local)
    require_divisible(config, checkpoints)
    locations = [location for checkpoint in checkpoints for location in checkpoint.locations]
    check_reads(locations, config.resource_config, backend=None if client.is_local else client.url)


class InferencePool:
    """Engine replicas behind a proxy; all their processes end with the block.

    Checkpoints are requested by name. Requests decide which replica holds which checkpoint; those for a checkpoint that
    no replica holds wait at the proxy until a replica does. Users may request `models`, and add others.
    """

    access: PoolAccess
    session: PoolSession
    """The owner's session with its `checkpoints`, if there are any."""
    _director: DirectorLoop

    def __init__(
        self,
        config: InferencePoolConfig,
        checkpoints: Sequence[Servable],
        *,
        client: Client | None = None,
        launcher: Launcher | None = None,
        on_event: Callable[[str], None] = lambda line: None,
        models: Mapping[str, ServedModel] = {},
        label: str | None = None,
        keys: ProxyKeys | None = None,
    ) -> None:
        self.config = with_engine_variables(config)
        self._checkpoints = list(checkpoints)
        self._client = client or current_client()
        self._launcher = launcher
        self._on_event = on_event
        self._models = {**models, **{checkpoint.name: checkpoint.served for checkpoint in checkpoints}}
        self._label = label
        self._keys = keys or ProxyKeys.new()
        self._proxy_process = ProxyProcess(config, client=self._client, keys=self._keys, label=label)
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as ending:
            self._start(ending)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of the pool; safe to call twice."""
        self._ending.close()

    def _start(self, ending: ExitStack) -> None:
        require_startable(self.config, self._checkpoints, self._client)
        is_foreign = not isinstance(self._launcher, VllmLauncher | None)
        own = None if is_foreign else ENVIRONMENTS[environment_name(self.config)]
        build = self._build_engine()
        if self._launcher is not None and self._client.is_local:  # imported once for all replicas of this machine
            self._launcher = ending.enter_context(self._launcher.warmed(self._client))
        agents = AgentJobs(self._submit_agent, self.config, on_event=self._on_event)
        ending.callback(self._end_processes, agents)
        description = PoolDescription(
            config=self.config,
            engine_build=build,
            engine_packages=pinned_versions(own) if own else {},
            checkpoints={name: served.uri for name, served in self._models.items()},
        )
        self._proxy_process.description = description.model_dump_json(exclude={"checkpoints"})
        self.access = PoolAccess(
            **dict(description), address=self._proxy_process.start(), key=self._keys.client, admin_key=self._keys.admin
        )
        self._director = DirectorLoop(
            config=self.config,
            proxy=self.access.proxy(timeout_seconds=_DIRECTOR_SECONDS),
            proxy_process=self._proxy_process,
            agents=agents,
            models=dict(self._models),
            engine=engine_digest(self.config, build),
            on_event=self._on_event,
        )
        ending.callback(self._director.stop)
        self._director.start([f"replica-{index}" for index in range(self.config.resource_config.replicas)])
        if self._checkpoints:
            session = PoolSession(self.access, self._checkpoints, holder="the pool's owner", on_event=self._on_event)
            self.session = ending.enter_context(session)

    def _end_processes(self, agents: AgentJobs) -> None:
        with ThreadPoolExecutor(2) as threads:
            threads.submit(agents.stop)
            threads.submit(self._proxy_process.stop)

    def _build_engine(self) -> str:
        if self._launcher is not None:
            return self._launcher.identity
        spec = ENVIRONMENTS[environment_name(self.config)]
        if not self._client.is_local:
            return planned_identity(spec)
        self._launcher = VllmLauncher(self.config, ensure_environment(spec, on_progress=self._on_event))
        return self._launcher.identity

    def _submit_agent(self, name: str, start: int) -> JobHandle:
        token = {POOL_JOIN_TOKEN_VARIABLE: self._keys.join.get_secret_value()}
        return self._client.submit(
            JobRequest(
                name=labelled(name, self._label, secrets.token_hex(3)),
                entrypoint=Call(run_agent, (name, self.config, self._launcher, self.access.address, start)),
                resources=self.config.resource_config.model_copy(update={"replicas": 1}).by_machine(),
                environment=pool_environment(self.config, env_vars=token),
                # On a local client the director restarts it and counts; elsewhere the backend replaces preempted
                # machines.
                max_retries_preemption=0 if self._client.is_local else _PREEMPTIONS,
            )
        )

    def wait_until_unused(self, idle_seconds: float) -> None:
        """Returns after `idle_seconds` without leases and requests, or when the pool stops."""
        director = self._director
        used_at = time.monotonic()
        while not director.stopping.wait(min(1.0, idle_seconds / 4)):
            if director.failure is not None:
                raise ProxyFailed(expected="a pool that lives", found=director.failure, remedy="read its log")
            try:
                status = director.proxy.status()
            except ProxyFailed:
                continue
            if status.leases or any(demand.held or demand.in_flight for demand in status.demand.values()):
                used_at = time.monotonic()
            recent = min((demand.idle_seconds for demand in status.demand.values()), default=idle_seconds)
            if time.monotonic() - used_at > idle_seconds and recent >= idle_seconds:
                return


@dataclass(kw_only=True, eq=False)
class DirectorLoop:
    """Sends orders to the replicas of a pool from `start` to `stop`."""

    config: InferencePoolConfig
    proxy: ProxyClient
    proxy_process: ProxyProcess
    agents: AgentJobs
    models: dict[str, ServedModel]
    engine: str
    on_event: Callable[[str], None]
    stopping: threading.Event = field(default_factory=threading.Event)
    _desired: DesiredState = field(default_factory=DesiredState)
    _ordered_at: dict[str, float] = field(default_factory=dict)
    _held_since: dict[str, float] = field(default_factory=dict)
    _failed: str | None = None
    _users_then: frozenset[str] = frozenset()
    _proxy_silent_since: float | None = None

    def __post_init__(self) -> None:
        self._loads = LoadLog(
            most_failures=self.config.max_replica_restarts, give_up=self.agents.give_up, on_event=self.on_event
        )
        self._thread = threading.Thread(target=self._run, name="pool-director", daemon=True)

    def start(self, replicas: Sequence[str]) -> None:
        self._publish(dict.fromkeys(replicas))
        self.agents.start(replicas)
        self._thread.start()

    def stop(self) -> None:
        self.stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def failure(self) -> str | None:
        return None if self._thread.is_alive() else self._failed

    def _run(self) -> None:
        try:
            self._direct()
        except Exception as error:  # noqa: BLE001 - the boundary: no caller would receive it
            _log.exception("the pool's director failed")
            self._failed = f"its director failed: {type(error).__name__}: {error}"
            with suppress(ProxyFailed):
                self.proxy.set_state(self._desired.model_copy(update={"failed": self._failed, "tries_again": False}))

    def _direct(self) -> None:
        version = -1
        wait_seconds = _IDLE_WAIT_SECONDS
        while not self.stopping.is_set():
            try:
                status = self.proxy.status(after=version, wait_seconds=wait_seconds)
                version, self._proxy_silent_since = status.version, None
                for lease in status.leases.values():
                    self.models.update(lease.models)
                suspected = {
                    served.digest for name, served in self.models.items() if status.demand.get(name, Demand()).suspects
                }
                self._loads.take_in(status.replicas, suspected=suspected)
                self.agents.look_after(status.replicas)
                self._order(status)
            except ProxyFailed:
                if self.stopping.is_set() or not self._restart_proxy():
                    return
                version = -1
                continue
            waiting = any(demand.held for demand in status.demand.values())
            wait_seconds = _BUSY_WAIT_SECONDS if waiting else _IDLE_WAIT_SECONDS
            self.stopping.wait(_BUSY_WAIT_SECONDS / 5)  # limits the polling rate under many status changes

    def _order(self, status: ProxyStatus) -> None:
        self._give_up_or_try_again(status)
        usable = self.agents.usable
        self._loads.forgive(status.leases, self.models)
        unusable = self._loads.unusable(self.models)
        lease_models = (name for lease in status.leases.values() for name in lease.wants)
        wants = [name for name in lease_models if name in self.models and name not in unusable]
        now = time.monotonic()
        before = self._desired.orders
        paused = self._loads.take_paused()
        orders = assign(
            {
                replica: None if before.get(replica) in unusable else before.get(replica)
                for replica in usable
                if replica not in paused
            },
            demand={
                name: demand for name, demand in status.demand.items() if name in self.models and name not in unusable
            },
            wants=wants,
            held_seconds=self._turns(status, now),
            linger_seconds=self._loads.linger_seconds,
            longest_wait_seconds=self.config.longest_wait_seconds,
        )
        for replica, model in orders.items():
            if model != before.get(replica):
                self._ordered_at[replica] = now
                self._held_since.pop(replica, None)
        orders.update(dict.fromkeys(paused.intersection(usable)))
        self._publish(orders, later=[name for name in wants if name not in orders.values()])

    def _give_up_or_try_again(self, status: ProxyStatus) -> None:
        start_failure = self._loads.start_failure(self.models)
        if self._failed is None or (self.agents.usable and start_failure is None):
            of_starts = start_failure.found if start_failure else None
            self._failed = of_starts if self.agents.usable else self.agents.given_up
            self._users_then = frozenset(status.leases)
        elif status.held or not self._users_then.issuperset(status.leases):
            self.on_event("the pool had given up and tries again")
            self._failed = None
            self.agents.try_again()
            self._loads.try_again()

    def _turns(self, status: ProxyStatus, now: float) -> dict[str, float]:
        turns = {}
        for replica in status.replicas:
            model = self.models.get(self._desired.orders.get(replica.name) or "")
            if model is None or (replica.name not in self._held_since and not replica.holds(model.digest)):
                continue
            since = self._held_since.setdefault(replica.name, now)
            if now - since >= since - self._ordered_at.get(replica.name, since):
                turns[replica.name] = now - since
        return turns

    def _publish(self, orders: dict[str, str | None], *, later: Sequence[str] = ()) -> None:
        desired = DesiredState(
            models=dict(self.models),
            engine=self.engine,
            orders=orders,
            next=tuple(later),
            unusable=self._loads.unusable(self.models),
            failed=self._failed,
            tries_again=self._failed is not None,
        )
        if desired != self._desired:
            self.proxy.set_state(desired)
            self._desired = desired

    def _restart_proxy(self) -> bool:
        now = time.monotonic()
        self._proxy_silent_since = self._proxy_silent_since or now
        try:
            if now - self._proxy_silent_since > _SILENT_PROXY_SECONDS:
                self.on_event("the proxy has not answered for long and is ended")
                self.proxy_process.end()
                self._proxy_silent_since = None
            looked_until = now + _IDLE_WAIT_SECONDS
            while not (restarted := self.proxy_process.restart_if_ended()) and time.monotonic() < looked_until:
                if self.stopping.wait(_BUSY_WAIT_SECONDS):  # connecting too early, its old socket would block
                    return False
            if restarted:
                self.on_event("the proxy ended and was started again")
                self.proxy.set_state(self._desired)
        except ProxyFailed as error:
            self._failed = error.found
            self.proxy_process.stop()
            return False
        return True
