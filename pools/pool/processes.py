"""The jobs of a pool: its proxy, restarted on the same address, and its replicas' agents.

The process that supervises the proxy holds its listening socket and accepts nothing: connections wait in it meanwhile.
It lends the socket to each start of the proxy, over a Unix socket in a folder that only this user can enter and that
exists for the time of the start.
"""

from __future__ import annotations

import itertools
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from pools.config import InferencePoolConfig
from pools.jobs import Restarts, labelled, placed_with, pool_environment
from pools.protocol import ReplicaStatus
from pools.proxy.client import JournalFlags, ProxyAddress, ProxySettings, address_of_job
from pools.proxy.connections.wire import standing_socket
from pools.settings import ProxyKeys
from resources.config import ResourceConfig
from resources.errors import BadInput, EngineDied, ProxyFailed
from resources.jobs.addresses import folder_for_a_socket, is_loopback
from resources.jobs.jobs import Call, Client, Command, JobHandle, JobRequest, JobStatus
from resources.settings import settings

_START_SECONDS = 60.0
_MOST_RESTARTS = 10
_SILENT_LEASES = 4.0  # an agent that is silent for so many leases is restarted
_AGENT_JOB_POLL_SECONDS = 0.2


def check_network(config: InferencePoolConfig, *, is_local: bool) -> None:
    """Refuses a pool that would send keys, prompts and answers unencrypted to other machines, unless allowed."""
    stays_here = is_local if config.proxy_host == "auto" else is_loopback(config.proxy_host)
    if stays_here or settings().insecure:
        return
    raise BadInput(
        expected="a pool on loopback, since its keys, prompts and answers are not encrypted",
        found=f"proxy_host={config.proxy_host}" + ("" if is_local else ", with jobs on other machines"),
        remedy="if the network between the machines keeps strangers out (docs/security.md), say so: --insecure, or "
        "ASSAY_INSECURE=1",
    )


@contextmanager
def lent(listening: socket.socket) -> Iterator[Path]:
    """Lends a socket to the first process that connects to this path, for as long as the block lasts."""
    path = folder_for_a_socket() / "socket"
    try:
        with socket.socket(socket.AF_UNIX) as counter:
            counter.bind(str(path))
            counter.listen()
            threading.Thread(target=_lend, args=(listening, counter), name="proxy-socket", daemon=True).start()
            try:
                yield path
            finally:
                with suppress(OSError):  # wakes a lender without a connection
                    counter.shutdown(socket.SHUT_RDWR)
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


def _lend(listening: socket.socket, counter: socket.socket) -> None:
    with suppress(OSError):  # the start has failed
        borrower, _ = counter.accept()
        with borrower:
            socket.send_fds(borrower, [b"."], [listening.fileno()])


def _serve(proxy_settings: str) -> None:
    from pools.proxy.__main__ import main

    sys.exit(main(proxy_settings))


class ProxyProcess:
    """The proxy of a pool, run as a job. `description` is the pool's description for clients, as JSON."""

    description = ""

    def __init__(
        self, config: InferencePoolConfig, *, client: Client, keys: ProxyKeys, label: str | None = None
    ) -> None:
        self._config = config
        self._client = client
        self._keys = keys
        self._label = label
        self._job: JobHandle | None = None
        self.address: ProxyAddress | None = None
        self._restarts = Restarts(_MOST_RESTARTS)
        self._listening: socket.socket | None = None

    def start(self) -> ProxyAddress:
        """Starts it: after a restart on the same address, and on this machine with the same listening socket."""
        config = self._config
        if not self._client.is_local:
            return self._start(config.proxy_host, config.proxy_port, lender=None)
        host = "127.0.0.1" if config.proxy_host == "auto" else config.proxy_host
        try:
            listening = self._listening = self._listening or standing_socket(host, config.proxy_port)
        except OSError as error:
            raise ProxyFailed(
                expected=f"to listen on {host}:{config.proxy_port}",
                found=str(error),
                remedy="choose another proxy_port, or 0 for a free port; or a proxy_host of this machine",
            ) from error
        with lent(listening) as lender:
            return self._start(host, listening.getsockname()[1], lender=lender)

    def _start(self, host: str, port: int, *, lender: Path | None) -> ProxyAddress:
        config = self._config
        local = self._client.is_local
        journal = JournalFlags(
            path=settings().journal_path if local else None,
            max_bytes=config.journal_max_bytes,
            prompts=config.journal_prompts,
        )
        proxy_settings = ProxySettings(
            host=host,
            port=self.address.port if self.address else port,
            lender=lender,
            journal=journal if config.journal else None,
            description=self.description,
            max_held=config.max_pending_requests,
            hold_timeout_seconds=config.proxy_timeout_seconds,
            engine_timeout_seconds=config.engine_timeout_seconds,
            lease_seconds=config.lease_seconds,
        )
        self._job = self._client.submit(
            JobRequest(
                name=labelled("proxy", self._label, secrets.token_hex(6)),
                # Call sends our code along, for machines without an installation.
                entrypoint=Command("python", proxy_settings.arguments)
                if local
                else Call(_serve, (proxy_settings.model_dump_json(),)),
                resources=ResourceConfig(preemptible=False, **placed_with(config.resource_config)),
                environment=pool_environment(config, env_vars=self._keys.as_environment()),
                max_retries_preemption=0,  # only this process knows its address, and restarts it
            )
        )
        patience_seconds = _START_SECONDS if local else config.startup_timeout_seconds
        remedy = "choose another proxy_port, or 0 for a free port"
        address = address_of_job(self._job, "the proxy", timeout_seconds=patience_seconds, remedy=remedy)
        before = self.address or address
        if (address.host, address.port) != (before.host, before.port):
            raise ProxyFailed(
                expected=f"the proxy back at {before.host}:{before.port}, where replicas and evaluators look for it",
                found=f"it was started again on another machine, at {address.host}:{address.port}",
                remedy="run again; cells that have a record are not repeated",
            )
        self.address = address
        return address

    def restart_if_ended(self) -> bool:
        if self._job is None or not self._job.status().finished:
            return False
        if not self._restarts.allow():
            raise ProxyFailed(
                expected="the proxy's process to run",
                found=f"it ended, {self._restarts.last}. Last lines of its log:\n{self._job.logs(10).rstrip()}",
                remedy="run again; the answers so far are in the journal",
            )
        self.start()
        return True

    def end(self) -> None:
        if self._job is not None:
            self._job.terminate()

    def stop(self) -> None:
        """Ends it and refuses new connections; safe to call twice."""
        if self._listening is not None:
            self._listening.close()
        self.end()


class _Agent:
    def __init__(self, job: JobHandle, start: int, *, restarts: Restarts) -> None:
        self.take(job, start)
        self.restarts = restarts
        self.given_up: str | None = None
        self.restarting: threading.Thread | None = None
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
