"""`InferencePool`: replicas of one model family behind one endpoint, for as long as a `with` block lasts."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

from pools.access import PoolAccess, engine_digest
from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engine.launch import Launcher, Servable, VllmLauncher, environment_name
from pools.jobs import is_local, labelled, pool_environment
from pools.pool.director import Patience, assign
from pools.pool.session import PoolSession
from pools.protocol import DesiredState, Failure, LoadReport, ProxyStatus, ReplicaStatus, ServedModel
from pools.proxy.client import ProxyClient
from pools.proxy.process import ProxyProcess
from pools.replica.agent import run_agent
from pools.replica.agent_jobs import AgentJobs
from resources.backends.current import current_client
from resources.environments.environments import ENVIRONMENTS, ensure_environment, planned_identity
from resources.errors import EngineStartFailed, ProxyFailed
from resources.jobs.jobs import Call, Client, JobHandle, JobRequest
from resources.settings import POOL_JOIN_TOKEN_VARIABLE, ProxyKeys

_log = logging.getLogger("assay.pool")
_IDLE_WAIT_SECONDS = 0.5
_BUSY_WAIT_SECONDS = 0.05
_SHORTEST_LINGER_SECONDS = 0.25
_LONGEST_LINGER_SECONDS = 5.0
_SILENT_PROXY_SECONDS = 30.0
_PREEMPTIONS = 100


class InferencePool:
    """Engine replicas behind one proxy; leaves no process behind, whatever happens inside.

    Every checkpoint it was told of can be asked for by name. Which replica holds which follows from what is asked:
    requests for a checkpoint that no replica holds wait at the proxy until one does.

    Args:
        config: what to serve, on what, and how patiently.
        checkpoints: those that `load` may be called for; users of the pool may bring others.
        client: runs the processes; the current client when left out.
        launcher: how an engine server is started; vLLM from its pinned environment when left out.
        on_event: told in a line what the pool is doing.
        own_session: hold a lease of one's own, which `load` needs; a pool that is kept for others has none.
        label: what the names of its jobs on the backend contain.

    Raises:
        EnvironmentBuildFailed: the engine's environment could not be built.
        ProxyFailed: the proxy did not start; whatever had been started is ended first.
    """

    def __init__(
        self,
        config: InferencePoolConfig,
        checkpoints: Sequence[Servable],
        *,
        client: Client | None = None,
        launcher: Launcher | None = None,
        on_event: Callable[[str], None] = lambda line: None,
        own_session: bool = True,
        label: str | None = None,
    ) -> None:
        self.config = config
        self._checkpoints = list(checkpoints)
        self._client = client or current_client()
        self._launcher = launcher
        self._on_event = on_event
        self._own_session = own_session
        self._label = label
        self._keys = ProxyKeys.new()
        self._proxy_process = ProxyProcess(config, client=self._client, keys=self._keys, label=label)
        self._proxy: ProxyClient | None = None
        self._agents = AgentJobs(
            self._submit_agent,
            lease_seconds=config.lease_seconds,
            max_restarts=config.max_replica_restarts,
            on_event=on_event,
        )
        self._ordered_at: dict[str, float] = {}
        self._models: dict[str, ServedModel] = {}
        self._told = DesiredState()
        self._engine_build = ""
        self._unusable: dict[str, Failure] = {}
        self._failed: str | None = None
        self._has_answered = False
        self._start_failure: Failure | None = None
        self._linger_seconds = _SHORTEST_LINGER_SECONDS
        self._closing = threading.Event()
        self._director = threading.Thread(target=self._direct, name="pool-director", daemon=True)
        self._session: PoolSession | None = None
        self._reported: set[tuple[str, str, int]] = set()
        self._explained: set[str] = set()
        self._failed_loads: Counter[str] = Counter()
        self._paused: set[str] = set()
        self._revived: dict[str, int] = {}
        self._proxy_silent_since: float | None = None
        self._tries: dict[tuple[str, str], int] = {}

    def __enter__(self) -> InferencePool:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._engine_build = self._build_engine()
        address = self._proxy_process.start()
        self.access = PoolAccess(
            address=address,
            key=self._keys.client,
            admin_key=self._keys.admin,
            config=self.config,
            engine_build=self._engine_build,
        )
        self._proxy = self.access.proxy()
        names = [f"replica-{index}" for index in range(self.config.resource_config.replicas)]
        self._models = {checkpoint.name: checkpoint.served for checkpoint in self._checkpoints}
        self._tell(dict.fromkeys(names))
        self._agents.start(names)
        self._director.start()
        if self._own_session:
            self._session = PoolSession(
                self.access, self._checkpoints, holder="the pool's owner", on_event=self._on_event
            ).__enter__()

    def _build_engine(self) -> str:
        """Names the build of the engine; where agents run on this machine it is built now, else by each of them."""
        if self._launcher is not None:
            return self._launcher.identity
        spec = ENVIRONMENTS[environment_name(self.config)]
        if not is_local(self._client):
            return planned_identity(spec)
        self._launcher = VllmLauncher(self.config, ensure_environment(spec, on_progress=self._on_event))
        return self._launcher.identity

    def _submit_agent(self, name: str) -> JobHandle:
        token = {POOL_JOIN_TOKEN_VARIABLE: self._keys.join.get_secret_value()}
        return self._client.submit(
            JobRequest(
                name=labelled(name, self._label, secrets.token_hex(3)),
                entrypoint=Call(run_agent, (name, self.config, self._launcher, self.access.address)),
                resources=self.config.resource_config.model_copy(update={"replicas": 1}),
                environment=pool_environment(self.config, env_vars=token),
                # Here the director starts it again, and counts; elsewhere a machine that is taken away is replaced.
                max_retries_preemption=0 if is_local(self._client) else _PREEMPTIONS,
            )
        )

    @property
    def session(self) -> PoolSession:
        """The owner's own use of the pool."""
        if self._session is None:
            raise ProxyFailed(
                expected="a pool that was entered, with checkpoints of its own",
                found="one that was not, or has none",
                remedy="use it in a with block; bring checkpoints, or open a session",
            )
        return self._session

    @property
    def base_url(self) -> str:
        """The endpoint, ending in `/v1`."""
        return self.session.access.address.base_url

    @property
    def key(self) -> str:
        """What clients send as `Authorization: Bearer`."""
        return self._keys.client.get_secret_value()

    def load(self, name: str) -> tuple[RunningModel, LoadReport]:
        """Wants one of the pool's checkpoints and nothing else, and waits until it answers; see `PoolSession.load`."""
        self.session.want_only(name)
        return self.session.load(name)

    def counts(self, name: str) -> dict[str, int]:
        """What the proxy counted for one checkpoint so far: answered, client_errors, server_errors, and so on."""
        return self.session.counts(name)

    def check(self, name: str) -> None:
        """Raises the reason if the pool cannot answer for a checkpoint any more; see `PoolSession.check`."""
        self.session.check(name)

    def engine_identity(self) -> dict[str, Any]:
        """Which engine answers, with what arguments."""
        return self.session.engine_identity()

    def proxy_status(self) -> ProxyStatus:
        """Replicas with their load, requests held, and counters, as the proxy sees them now."""
        return self._require_proxy().status()

    @property
    def proxy_pid(self) -> int:
        """Process id of the proxy."""
        return self._proxy_process.address.pid

    def engine_urls(self) -> list[str]:
        """Addresses of the engines themselves, for looking at one directly."""
        return [one.said.url for one in self.proxy_status().replicas if one.said.url]

    def wait_until_unused(self, idle_seconds: float) -> None:
        """Returns once nobody has had a lease, and nobody has asked anything, for so long; or the pool has failed.

        Raises:
            ProxyFailed: the proxy is gone, and its restarts are used up.
        """
        used_at = time.monotonic()
        while not self._closing.wait(min(1.0, idle_seconds / 4)):
            if self._failed is not None and not self._director.is_alive():
                raise ProxyFailed(expected="a pool that lives", found=self._failed, remedy="read its log")
            try:
                status = self.proxy_status()
            except ProxyFailed:
                continue
            if status.leases or any(one.held or one.in_flight for one in status.demand.values()):
                used_at = time.monotonic()
            recent = min((one.idle_seconds for one in status.demand.values()), default=idle_seconds)
            if time.monotonic() - used_at > idle_seconds and recent >= idle_seconds:
                return

    def _require_proxy(self) -> ProxyClient:
        if self._proxy is None:
            raise ProxyFailed(
                expected="a pool that was entered", found="one that was not", remedy="use it in a with block"
            )
        return self._proxy

    def _direct(self) -> None:
        """Directs until the pool closes; a failure of our own ends the pool, in words, rather than in silence."""
        try:
            self._direct_until_closed()
        except Exception as error:  # noqa: BLE001 - the boundary: nobody else would hear of it
            _log.exception("the pool's director failed")
            self._failed = f"its director failed: {type(error).__name__}: {error}"
            with suppress(ProxyFailed):
                self._require_proxy().set_state(self._told.model_copy(update={"failed": self._failed}))

    def _direct_until_closed(self) -> None:
        """Follows what is asked and what replicas say, and orders accordingly."""
        version = -1
        wait_seconds = _IDLE_WAIT_SECONDS
        while not self._closing.is_set():
            try:
                status = self._require_proxy().status(after=version, wait_seconds=wait_seconds)
                version, self._proxy_silent_since = status.version, None
                self._learn(status)
                self._agents.look_after(status.replicas)
                self._order(status)
            except ProxyFailed:
                if self._closing.is_set() or not self._restart_proxy():
                    return
                version = -1
                continue
            waiting = any(one.held for one in status.demand.values())
            wait_seconds = _BUSY_WAIT_SECONDS if waiting else _IDLE_WAIT_SECONDS
            self._closing.wait(_BUSY_WAIT_SECONDS / 5)  # whoever asks much must not make us ask as often

    def _learn(self, status: ProxyStatus) -> None:
        """Takes in leases and loads."""
        for lease in status.leases.values():
            self._models.update(lease.models)
        for replica in status.replicas:
            if replica.said.restarts > self._revived.get(replica.said.instance, 0):
                self._on_event(f"the engine of {replica.name} died, or hung, and is started again")
                self._revived[replica.said.instance] = replica.said.restarts
            for load in replica.said.loads:
                report = (replica.name, replica.said.instance, load.number)
                if report in self._reported:
                    continue
                self._reported.add(report)
                held = any(other.holds(load.digest) for other in status.replicas if other.name != replica.name)
                self._take_report(replica, load, held_elsewhere=held)

    def _take_report(self, replica: ReplicaStatus, load: LoadReport, *, held_elsewhere: bool) -> None:
        if load.failure is not None:
            self._on_event(f"{load.model} cannot be served by {replica.name}: {load.failure.found.splitlines()[0]}")
            if held_elsewhere:  # so it is the replica's fault, not the checkpoint's
                self._failed_loads[replica.name] += 1
                self._paused.add(replica.name)
                if self._failed_loads[replica.name] > self.config.max_replica_restarts:
                    self._agents.give_up(replica.name, load.failure.found)
                return
            self._unusable[load.model] = load.failure
            if not self._has_answered and load.failure.kind == EngineStartFailed.__name__:
                self._start_failure = load.failure  # it never worked: the next checkpoint would meet the same
            return
        self._has_answered = True
        self._failed_loads[replica.name] = 0
        if load.how in ("reload", "restart"):  # what the next swap will cost, probably
            self._linger_seconds = min(max(_SHORTEST_LINGER_SECONDS, load.seconds), _LONGEST_LINGER_SECONDS)
        why = f", since {load.reason}" if load.reason and load.reason not in self._explained else ""
        self._explained.add(load.reason or "")
        self._on_event(f"{load.model} is ready on {replica.name} ({load.how}, {load.seconds:.2f} s{why})")

    def _order(self, status: ProxyStatus) -> None:
        usable = self._agents.usable
        if not usable:
            self._failed = self._agents.given_up
        wanted = [name for lease in status.leases.values() for name in lease.wants if name in self._models]
        self._try_again(status)
        unusable = self._refused()
        wants = [name for name in wanted if name not in unusable]
        now = time.monotonic()
        before = self._told.orders
        orders = assign(
            {
                name: None if before.get(name) in unusable else before.get(name)
                for name in usable
                if name not in self._paused
            },
            demand={name: one for name, one in status.demand.items() if name in self._models and name not in unusable},
            wants=wants,
            held_seconds={name: now - self._ordered_at.get(name, now) for name in usable},
            patience=Patience(self._linger_seconds, self.config.longest_wait_seconds),
        )
        for name, model in orders.items():
            if model != before.get(name):
                self._ordered_at[name] = now
        orders.update(dict.fromkeys(self._paused.intersection(usable)))  # for a moment: then it may try again
        self._paused.clear()
        self._tell(orders, later=[name for name in wants if name not in orders.values()])

    def _refused(self) -> dict[str, Failure]:
        """Models that cannot be served; all of them if the engine did not even start for the first one."""
        if self._start_failure is not None and not self._has_answered:
            return dict.fromkeys(self._models, self._start_failure)
        return self._unusable

    def _try_again(self, status: ProxyStatus) -> None:
        """Forgets that a checkpoint could not be served once a user wants it anew."""
        tries = {(lease, name): n for lease, held in status.leases.items() for name, n in held.tries.items()}
        for (lease, name), n in tries.items():
            if name in self._unusable and n > self._tries.get((lease, name), 0):
                del self._unusable[name]
        for key, n in tries.items():
            if key[1] not in self._unusable:
                self._tries[key] = n

    def _tell(self, orders: dict[str, str | None], *, later: Sequence[str] = ()) -> None:
        """Tells the proxy what is so, if that is news."""
        desired = DesiredState(
            models=dict(self._models),
            engine=engine_digest(self.config, self._engine_build),
            orders=orders,
            next=tuple(later),
            unusable=dict(self._refused()),
            failed=self._failed,
        )
        if desired != self._told:
            self._told = desired
            self._require_proxy().set_state(desired)

    def _restart_proxy(self) -> bool:
        """Sees to a proxy that does not answer; False if it will not do so any more."""
        now = time.monotonic()
        self._proxy_silent_since = self._proxy_silent_since or now
        try:
            if now - self._proxy_silent_since > _SILENT_PROXY_SECONDS:
                self._on_event("the proxy has not answered for long and is ended")
                self._proxy_process.stop()
                self._proxy_silent_since = None
            if self._proxy_process.restart_if_ended():
                self._on_event("the proxy ended and was started again")
                self._require_proxy().set_state(self._told)
        except ProxyFailed as error:
            self._failed = error.found
            return False
        self._closing.wait(_IDLE_WAIT_SECONDS)
        return True

    def close(self) -> None:
        """Ends every process of the pool; safe to call twice."""
        if self._session is not None:
            self._session.close()
        self._closing.set()
        if self._director.is_alive():
            self._director.join()
        with ThreadPoolExecutor(2) as threads:
            threads.submit(self._agents.stop)
            threads.submit(self._proxy_process.stop)
