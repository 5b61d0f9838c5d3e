"""The thread that directs a pool: polls requests and reports of replicas, and sends orders."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pools.config import InferencePoolConfig
from pools.pool.director import Patience, assign
from pools.pool.loads import LoadLog
from pools.protocol import Demand, DesiredState, ProxyStatus, ServedModel
from pools.proxy.client import ProxyClient
from pools.proxy.process import ProxyProcess
from pools.replica.agent_jobs import AgentJobs
from resources.errors import ProxyFailed

_log = logging.getLogger("assay.pool")
_IDLE_WAIT_SECONDS = 0.5
_BUSY_WAIT_SECONDS = 0.05
_SILENT_PROXY_SECONDS = 30.0


class DirectorLoop:
    """Sends orders to the replicas of a pool from `start` to `stop`."""

    def __init__(
        self,
        config: InferencePoolConfig,
        *,
        proxy: ProxyClient,
        proxy_process: ProxyProcess,
        agents: AgentJobs,
        models: Mapping[str, ServedModel],
        engine: str,
        on_event: Callable[[str], None],
    ) -> None:
        self.proxy = proxy
        self._longest_wait_seconds = config.longest_wait_seconds
        self._proxy_process = proxy_process
        self._agents = agents
        self._models = dict(models)
        self._engine = engine
        self._on_event = on_event
        self._loads = LoadLog(most_failures=config.max_replica_restarts, give_up=agents.give_up, on_event=on_event)
        self._desired = DesiredState()
        self._ordered_at: dict[str, float] = {}
        self._held_since: dict[str, float] = {}
        self._failed: str | None = None
        self._users_then: frozenset[str] = frozenset()
        self._proxy_silent_since: float | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-director", daemon=True)

    def start(self, replicas: Sequence[str]) -> None:
        self._publish(dict.fromkeys(replicas))
        self._agents.start(replicas)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self, seconds: float) -> bool:
        """Waits for that time; returns True at once when the loop is being stopped."""
        return self._stopping.wait(seconds)

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
        while not self._stopping.is_set():
            try:
                status = self.proxy.status(after=version, wait_seconds=wait_seconds)
                version, self._proxy_silent_since = status.version, None
                for lease in status.leases.values():
                    self._models.update(lease.models)
                suspected = {
                    served.digest for name, served in self._models.items() if status.demand.get(name, Demand()).suspects
                }
                self._loads.take_in(status.replicas, suspected=suspected)
                self._agents.look_after(status.replicas)
                self._order(status)
            except ProxyFailed:
                if self._stopping.is_set() or not self._restart_proxy():
                    return
                version = -1
                continue
            waiting = any(demand.held for demand in status.demand.values())
            wait_seconds = _BUSY_WAIT_SECONDS if waiting else _IDLE_WAIT_SECONDS
            self._stopping.wait(_BUSY_WAIT_SECONDS / 5)  # limits the polling rate under many status changes

    def _order(self, status: ProxyStatus) -> None:
        self._give_up_or_try_again(status)
        usable = self._agents.usable
        self._loads.forgive(status.leases, self._models)
        unusable = self._loads.unusable(self._models)
        lease_models = (name for lease in status.leases.values() for name in lease.wants)
        wants = [name for name in lease_models if name in self._models and name not in unusable]
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
                name: demand for name, demand in status.demand.items() if name in self._models and name not in unusable
            },
            wants=wants,
            held_seconds=self._turns(status, now),
            patience=Patience(self._loads.linger_seconds, self._longest_wait_seconds),
        )
        for replica, model in orders.items():
            if model != before.get(replica):
                self._ordered_at[replica] = now
                self._held_since.pop(replica, None)
        orders.update(dict.fromkeys(paused.intersection(usable)))
        self._publish(orders, later=[name for name in wants if name not in orders.values()])

    def _give_up_or_try_again(self, status: ProxyStatus) -> None:
        start_failure = self._loads.start_failure(self._models)
        if self._failed is None or (self._agents.usable and start_failure is None):
            of_starts = start_failure.found if start_failure else None
            self._failed = of_starts if self._agents.usable else self._agents.given_up
            self._users_then = frozenset(status.leases)
        elif status.held or not self._users_then.issuperset(status.leases):
            self._on_event("the pool had given up and tries again")
            self._failed = None
            self._agents.try_again()
            self._loads.try_again()

    def _turns(self, status: ProxyStatus, now: float) -> dict[str, float]:
        turns = {}
        for replica in status.replicas:
            model = self._models.get(self._desired.orders.get(replica.name) or "")
            if model is None or (replica.name not in self._held_since and not replica.holds(model.digest)):
                continue
            since = self._held_since.setdefault(replica.name, now)
            if now - since >= since - self._ordered_at.get(replica.name, since):
                turns[replica.name] = now - since
        return turns

    def _publish(self, orders: dict[str, str | None], *, later: Sequence[str] = ()) -> None:
        desired = DesiredState(
            models=dict(self._models),
            engine=self._engine,
            orders=orders,
            next=tuple(later),
            unusable=self._loads.unusable(self._models),
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
                self._on_event("the proxy has not answered for long and is ended")
                self._proxy_process.end()
                self._proxy_silent_since = None
            looked_until = now + _IDLE_WAIT_SECONDS
            while not (restarted := self._proxy_process.restart_if_ended()) and time.monotonic() < looked_until:
                if self._stopping.wait(_BUSY_WAIT_SECONDS):  # connecting too early, its old socket would block
                    return False
            if restarted:
                self._on_event("the proxy ended and was started again")
                self.proxy.set_state(self._desired)
        except ProxyFailed as error:
            self._failed = error.found
            self._proxy_process.stop()
            return False
        return True
