"""`InferencePool`: replicas of a model family behind a single endpoint, for the duration of a `with` block."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

from pools.config import InferencePoolConfig
from pools.engine.engines import with_engine_variables
from pools.engine.launch import Launcher, Servable, VllmLauncher, environment_name
from pools.engine.parallelism import require_divisible, require_place
from pools.jobs import labelled, pool_environment
from pools.pool.access import PoolAccess, PoolDescription, engine_digest
from pools.pool.director_loop import DirectorLoop
from pools.pool.session import PoolSession
from pools.protocol import ServedModel
from pools.proxy.process import ProxyProcess, check_network
from pools.replica.agent import run_agent
from pools.replica.agent_jobs import AgentJobs
from pools.settings import POOL_JOIN_TOKEN_VARIABLE, ProxyKeys
from resources.backends.current import current_client
from resources.environments.environments import ENVIRONMENTS, ensure_environment, pinned_versions, planned_identity
from resources.errors import ProxyFailed
from resources.jobs.jobs import Call, Client, JobHandle, JobRequest
from resources.regions.region_check import check_reads

_PREEMPTIONS = 100
_DIRECTOR_SECONDS = 3.0  # an established listening socket still accepts connections for a proxy that has ended


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
            self.config,
            proxy=self.access.proxy(timeout_seconds=_DIRECTOR_SECONDS),
            proxy_process=self._proxy_process,
            agents=agents,
            models=self._models,
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
        while not director.wait(min(1.0, idle_seconds / 4)):
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
