"""The pool under test: its processes, its counters, and if it is whole again."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.pools import InferencePool
from faults.scenarios.load import Endpoint
from faults.scenarios.processes import ancestors, command_line, descendants, engine_key, job_of, listener
from pools.config import InferencePoolConfig
from pools.engine.launch import Launcher, Servable
from pools.pool.session import OpenCell
from pools.protocol import ProxyStatus, RequestCounters
from resources.errors import ProxyFailed
from resources.settings import settings

Inject = Callable[[str, Mapping[str, Any]], None]
"""Sets faults of the engine at an address; the names are those of the engine."""

_POLL_SECONDS = 0.05
_METRICS_SECONDS = 10.0
_ENGINE_ANSWERS = "vllm:request_success_total"
_AGENT_PROGRAM = "run_call.py"


@dataclass(frozen=True)
class EngineProcess:
    """The engine of a replica: the process that accepts its connections."""

    replica: str
    pid: int
    url: str


@dataclass(frozen=True)
class Recipe:
    """Arguments for starting another pool like the target; `launcher` as of `InferencePool`."""

    config: InferencePoolConfig
    checkpoints: tuple[Servable, ...]
    launcher: Launcher | None


@dataclass(frozen=True)
class Kept:
    """Counts of a cell in the journal: `answers`, to so many different `questions`."""

    answers: int
    questions: int


class Target:
    """A pool on this machine, entered and with a session of its own.

    Args:
        model: the evaluated checkpoint.
        owner_pid: the process that entered the pool.
        recovery_seconds: time-out of the recovery of replicas.
        inject: injects faults into engines; None without such faults.
        recipe: for another pool like it.
    """

    def __init__(
        self,
        pool: InferencePool,
        model: str,
        *,
        owner_pid: int,
        recovery_seconds: float = 180.0,
        inject: Inject | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        self.pool = pool
        self.model = model
        self.inject = inject
        self.recipe = recipe
        self._owner_pid = owner_pid
        self._recovery_seconds = recovery_seconds

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.pool.base_url, self.pool.key, self.model)

    @property
    def replicas(self) -> int:
        return self.pool.config.resource_config.replicas

    @property
    def lease_seconds(self) -> float:
        """Seconds that a replica may be silent."""
        return self.pool.config.lease_seconds

    @contextmanager
    def cell(self) -> Iterator[CellView]:
        """Opens a cell of its own, so that its requests are separate from all others."""
        session = self.pool.session
        name = f"faults-{secrets.token_hex(6)}"
        opened = session.open(self.model, cell=name, attempt="first")
        try:
            yield CellView(self, opened)
        finally:
            session.close_cell(opened, finished=True)

    def status(self) -> ProxyStatus:
        """Returns the proxy's status; waits for a proxy that is restarting."""
        return self.pool.session.status()

    def instances(self) -> dict[str, str]:
        """Returns the instance of each replica's last announcement."""
        return {replica.name: replica.announcement.instance for replica in self.status().replicas}

    def engines(self) -> list[EngineProcess]:
        """Returns the ready engines, by the name of their replica."""
        processes = []
        mine = descendants(self._owner_pid)
        for replica in sorted(self.status().replicas, key=lambda replica: replica.name):
            if replica.announcement.state != "ready" or replica.announcement.url is None:
                continue
            pid = listener(int(replica.announcement.url.rpartition(":")[2]), mine)
            if pid is not None:
                processes.append(EngineProcess(replica.name, pid, replica.announcement.url))
        return processes

    def agents(self) -> dict[str, int]:
        """Returns the agent process of each replica with a ready engine: the engine's nearest ancestor of this kind."""
        pids: dict[str, int] = {}
        for engine in self.engines():
            for pid in ancestors(engine.pid):
                if job_of(pid).startswith(f"{engine.replica}-") and _AGENT_PROGRAM in " ".join(command_line(pid)):
                    pids[engine.replica] = pid
                    break
        return pids

    @property
    def proxy_pid(self) -> int:
        return self.pool.proxy_pid

    def proxy_log(self) -> str:
        """Returns the proxy's log; empty if it does not run."""
        job = job_of(self.proxy_pid)
        log = settings().jobs_dir / job / "replica-0.log"
        return log.read_text(errors="replace") if job and log.is_file() else ""

    def engine_answers(self) -> int:
        """Returns the number of answers of the ready engines since their start, by their own counters."""
        return sum(self.answers_of(engine) for engine in self.engines())

    def answers_of(self, engine: EngineProcess) -> int:
        """Returns the number of answers of an engine since its start, by its counter; 0 if it does not answer."""
        try:
            return engine_answers(engine.url)
        except OSError:
            return 0

    def unsettled(self) -> str | None:
        """Returns why the pool is not settled; None once every replica is ready and no request runs."""
        status = self.status()
        usable = [replica for replica in status.replicas if replica.usable]
        if len(usable) < self.replicas:
            seen = ", ".join(
                f"{replica.name} is {'lost' if replica.lost else replica.announcement.state}"
                for replica in status.replicas
            )
            return f"{len(usable)} of {self.replicas} replicas are usable ({seen or 'none is known'})"
        in_flight = sum(replica.in_flight for replica in status.replicas)
        if in_flight or status.held:
            return f"{in_flight} requests are in flight and {status.held} are held, though no client sends requests"
        return None

    async def settled(self) -> str | None:
        """Waits until the pool is whole and idle; after a time-out returns the reason that it is not."""
        deadline = time.monotonic() + self._recovery_seconds
        while True:
            try:
                missing = await asyncio.to_thread(self.unsettled)
            except ProxyFailed as error:
                missing = error.found
            if missing is None or time.monotonic() > deadline:
                return missing
            await asyncio.sleep(_POLL_SECONDS)


class CellView:
    """An open cell: its endpoint, and the counts of its requests."""

    def __init__(self, target: Target, opened: OpenCell) -> None:
        self._target = target
        self._opened = opened
        running = opened.running
        self.endpoint = Endpoint(running.base_url, running.api_key, running.model)

    def counts(self) -> RequestCounters:
        return self._target.pool.session.cell_counts(self._opened)

    def kept(self) -> Kept | None:
        """Returns counts of the journal; None if the pool has no journal."""
        if not self._target.pool.config.journal:
            return None
        return kept_answers(settings().journal_path, self._opened.name)


def kept_answers(path: Path, cell: str) -> Kept:
    """Counts the answers of a cell in a journal's file."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as journal:
        query = "SELECT count(*), count(DISTINCT key) FROM answers WHERE cell = ?"
        return Kept(*journal.execute(query, (cell,)).fetchone())


def engine_answers(url: str) -> int:
    """Returns the number of prompts that an engine has answered since its start, by its counter."""
    key = engine_key(int(url.rpartition(":")[2]))
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=_METRICS_SECONDS) as reply:
        lines = reply.read().decode().splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_ENGINE_ANSWERS)))
