"""The jobs that run a pool's replica agents: submitted, and restarted when they end or fall silent."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from pools.config import InferencePoolConfig
from pools.jobs import Restarts
from pools.protocol import ReplicaStatus
from resources.errors import EngineDied
from resources.jobs.jobs import JobHandle, JobStatus

_SILENT_LEASES = 4.0  # an agent that is silent for so many leases is restarted
_AGENT_JOB_POLL_SECONDS = 0.2


class _Agent:
    def __init__(self, job: JobHandle, start: int, *, restarts: Restarts) -> None:
        self.job = job
        self.start = start
        self.started_at = time.monotonic()
        self.restarts = restarts
        self.given_up: str | None = None
        self.restarting: threading.Thread | None = None
        self.details = job.details()
        self._looked_at = self.started_at

    def look(self) -> bool:
        now = time.monotonic()
        if now - self._looked_at < _AGENT_JOB_POLL_SECONDS:
            return False
        self._looked_at = now
        before, self.details = self.details, self.job.details()
        if self.details.status is JobStatus.PENDING or self.details.preemptions > before.preemptions:
            self.started_at = now
        return True

    def take(self, job: JobHandle, start: int) -> None:
        self.job, self.start, self.details, self.started_at = job, start, job.details(), time.monotonic()

    @property
    def is_restarting(self) -> bool:
        return self.restarting is not None and self.restarting.is_alive()


class AgentJobs:
    """The agents of a pool, one of them per replica; `submit` starts the agent of a replica.

    It gets the replica's name and the number of this start among all. A replica is given up after too many restarts of
    its agent in ten minutes.
    """

    def __init__(
        self, submit: Callable[[str, int], JobHandle], config: InferencePoolConfig, *, on_event: Callable[[str], None]
    ) -> None:
        self._submit = submit
        self._patience_seconds = _SILENT_LEASES * config.lease_seconds
        self._startup_seconds = config.startup_timeout_seconds
        self._max_restarts = config.max_replica_restarts
        self._on_event = on_event
        self._starts = itertools.count(1)
        self._agents: dict[str, _Agent] = {}
        self._closing = threading.Event()

    def start(self, names: Iterable[str]) -> None:
        for name in names:
            start = next(self._starts)
            self._agents[name] = _Agent(self._submit(name, start), start, restarts=Restarts(self._max_restarts))

    @property
    def usable(self) -> list[str]:
        return [name for name, agent in self._agents.items() if agent.given_up is None]

    @property
    def given_up(self) -> str:
        return "; ".join(f"{name}: {agent.given_up}" for name, agent in self._agents.items() if agent.given_up)

    def give_up(self, name: str, why: str) -> None:
        self._agents[name].given_up = why

    def look_after(self, replicas: Iterable[ReplicaStatus]) -> None:
        heard = {replica.name: replica for replica in replicas}
        for name, agent in self._agents.items():
            if agent.given_up is not None or agent.is_restarting or not agent.look():
                continue
            replica = heard.get(name)
            silent = replica is not None and is_silent(
                replica.silent_seconds,
                started_seconds=time.monotonic() - agent.started_at,
                patience_seconds=self._patience_seconds,
                startup_seconds=self._startup_seconds,
            )
            last = replica.announcement if replica is not None else None
            failure = last.failure if last is not None and last.start == agent.start else None
            if failure is not None and failure.kind == EngineDied.__name__:
                agent.given_up = failure.found
            elif agent.details.status.finished or silent:
                self._start_again(name, agent, why="was silent" if silent else "ended")

    def _start_again(self, name: str, agent: _Agent, *, why: str) -> None:
        if not agent.restarts.allow():
            log = agent.job.logs(15).rstrip()
            agent.given_up = f"its process {why}, {agent.restarts.last}. Last lines of its log:\n{log}"
            agent.job.terminate()
            return
        self._on_event(f"{name} {why} and is started again")
        self._replace(name, agent)

    def try_again(self) -> None:
        for name, agent in self._agents.items():
            if agent.given_up is not None:
                agent.given_up, agent.restarts = None, Restarts(self._max_restarts)
                self._replace(name, agent)

    def _replace(self, name: str, agent: _Agent) -> None:
        def replace() -> None:
            agent.job.terminate()
            if not self._closing.is_set():
                start = next(self._starts)
                agent.take(self._submit(name, start), start)

        agent.restarting = threading.Thread(target=replace, name=f"restart-{name}")
        agent.restarting.start()  # a hung job ends slowly; the other replicas need orders meanwhile

    def stop(self) -> None:
        """Ends every agent with its engine, and reports agents that may still run; safe to call twice."""
        self._closing.set()
        for agent in self._agents.values():
            if agent.restarting is not None:
                agent.restarting.join()
        with ThreadPoolExecutor(max(1, len(self._agents))) as threads:
            ending = {name: threads.submit(agent.job.terminate) for name, agent in self._agents.items()}
        for name, ended in ending.items():
            if (error := ended.exception()) is not None:
                self._on_event(f"{name} may still run, as it could not be ended: {error}")


def is_silent(
    silent_seconds: float, *, started_seconds: float, patience_seconds: float, startup_seconds: float
) -> bool:
    """Returns True if an announcement of an agent is overdue; `silent_seconds` may count from an earlier agent's last.

    A new agent has `startup_seconds`, since it may have to build the engine's environment.
    """
    has_spoken = silent_seconds < started_seconds
    return silent_seconds > patience_seconds if has_spoken else started_seconds > startup_seconds
