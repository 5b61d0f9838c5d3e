"""Hosts of a multi-host replica: host 0 sends orders to the other hosts, which report their state.

The agent of host 0 represents the replica and runs the engine's server. The other hosts poll it with the pool's join
token, and send their state with each poll. Orders are a desired state, so late or repeated messages are harmless. The
hosts get the address of host 0 from the proxy, and announce nothing there. A host that is silent for a lease is lost:
all agents of the replica then end with their part of the engine, since its ranks would hang, and the backend restarts
them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pydantic import ValidationError

from pools.config import InferencePoolConfig
from pools.engine.launch import HostPart, free_port
from pools.protocol import Failure, ServedModel
from resources.config import Config
from resources.errors import EngineStartFailed, error_of

_log = logging.getLogger("assay.agent")
_LONGEST_STATE_BYTES = 2**20
_STRANGER_SECONDS = 10.0
_GOODBYE_SECONDS = 5.0
_LONGEST_BEAT_SECONDS = 1.0


class HostState(Config):
    """The state of a host, as it reports it."""

    instance: str
    start: int
    """Number of its start among the pool's starts of agents."""
    sequence: int = 0
    """Grows with every report: an older report that arrives late is ignored."""
    seen: int = -1
    """Version of the last orders received; the response is delayed briefly while there are none newer."""
    checked: int = 0
    folder: str = ""
    """Local folder with the checkpoint of that check."""
    failure: Failure | None = None
    part: int = 0
    """Number of the engine start for which it runs its part, or ran it until that ended; 0 for none."""
    ended: bool = False
    """True if that part has ended by itself."""
    log: str = ""
    """Last log lines of a part that has ended."""


class HostOrders(Config):
    """Orders of host 0, in response to a host's state."""

    version: int = 0
    stop: bool = False
    """True if the host must end: the replica ends, or another process has its rank."""
    check: int = 0
    """Number of the check; for each, the host stages the checkpoint and verifies its files against their digests."""
    served: ServedModel | None = None
    """The checkpoint to check."""
    next: ServedModel | None = None
    part: int = 0
    """Number of the engine start for which to run its part, with the checkpoint checked last; 0 for none."""
    meeting: tuple[str, int] | None = None
    """Address and port of host 0 at which the parts connect."""


class Gang:
    """Host 0's view of the other hosts; a no-op for a replica on a single host."""

    def __init__(self, name: str, config: InferencePoolConfig, *, host: str, token: str, start: int) -> None:
        self._name = name
        self._hosts = config.resource_config.hosts_per_replica
        self._lease_seconds = config.lease_seconds
        self._beat_seconds = min(_LONGEST_BEAT_SECONDS, config.lease_seconds / 4)
        self._patience_seconds = config.startup_timeout_seconds
        self._host = host
        self._start = start
        self._changed = threading.Condition()
        self._orders = HostOrders()
        self._states: dict[int, HostState] = {}
        self._heard: dict[int, float] = {}
        self._lost: str | None = None
        self._parts = 0
        self._stopped = False
        self._door = _Door(host, token, self._answer) if self._hosts > 1 else None

    @property
    def door(self) -> str | None:
        if self._door is None:
            return None
        host, port = (f"[{self._host}]" if ":" in self._host else self._host), self._door.server_address[1]
        return f"http://{host}:{port}"

    @property
    def lost(self) -> str | None:
        """The reason that the replica cannot go on: a host that was silent for a lease."""
        now = time.monotonic()
        silent = [rank for rank, heard in list(self._heard.items()) if now - heard > self._lease_seconds]
        if silent and self._lost is None:
            self._lost = f"host {silent[0]} has been silent for {self._lease_seconds:g} s"
        return self._lost

    def prefetch(self, served: ServedModel) -> None:
        self._want(next=served)

    def check(self, served: ServedModel) -> int:
        """Orders the other hosts to stage a checkpoint, or verify its staged files; returns the check's number."""
        with self._changed:
            return self._want(check=self._orders.check + 1, served=served).check

    def folders(self, check: int) -> tuple[str, ...]:
        """Waits until all other hosts have done a check; returns their folders with its checkpoint."""
        states = self._until(lambda state: state.checked >= check)
        for rank, state in states:
            if state.failure is not None:
                error = error_of(state.failure.model_dump())
                raise type(error)(
                    expected=f"{error.expected}, on host {rank} of {self._name}", found=error.found, remedy=error.remedy
                )
        return tuple(state.folder for _, state in states)

    def begin_parts(self) -> HostPart | None:
        """Orders the other hosts to start their parts of an engine; returns this host's part, None on a single host."""
        if self._hosts == 1:
            return None
        meeting = (self._host, free_port(self._host))
        with self._changed:
            self._parts += 1
            self._want(part=self._parts, meeting=meeting)
        return HostPart(0, self._hosts, meeting, self._host)

    def end_parts(self) -> None:
        """Orders the other hosts to end their parts, and waits until all have ended or are lost."""
        self._want(part=0)
        with self._changed:
            while any(state.part for state in self._states.values()) and not (self._stopped or self.lost):
                self._changed.wait(1.0)

    @property
    def ended_part(self) -> str | None:
        part = self._orders.part
        ended = [state for state in list(self._states.values()) if part and state.part == part and state.ended]
        return ended[0].log if ended else None

    def close(self) -> None:
        """Orders the other hosts to end, then stops answering them; safe to call twice."""
        self._stopped = True
        self._want(stop=True)
        if self._door is None:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._heard, _GOODBYE_SECONDS)
        self._door.close()

    def _want(self, **fields: object) -> HostOrders:
        with self._changed:
            if any(getattr(self._orders, name) != value for name, value in fields.items()):
                version = self._orders.version + 1
                self._orders = self._orders.model_copy(update={**fields, "version": version})
                self._changed.notify_all()
            return self._orders

    def _until(self, condition: Callable[[HostState], bool]) -> list[tuple[int, HostState]]:
        deadline = time.monotonic() + self._patience_seconds
        with self._changed:
            while True:
                missing = [rank for rank in range(1, self._hosts) if rank not in self._states]
                if not missing and all(condition(state) for state in self._states.values()):
                    return sorted(self._states.items())
                if self._stopped or self.lost or (missing and time.monotonic() > deadline):
                    raise EngineStartFailed(
                        expected=f"all {self._hosts} hosts of {self._name}",
                        found=self.lost or (f"host {missing[0]} has not come" if missing else "the replica's end"),
                        remedy="look at the log of the replica's job, which has a part for each host",
                    )
                self._changed.wait(1.0)

    def _answer(self, rank: int, state: HostState) -> HostOrders:
        with self._changed:
            before = self._states.get(rank)
            another = before is not None and before.instance != state.instance
            if another or state.start != self._start or not 0 < rank < self._hosts:
                _log.warning("a second process, or one of another start, was refused as host %d", rank)
                return HostOrders(stop=True)
            self._heard[rank] = time.monotonic()
            if before is None or state.sequence > before.sequence:
                self._states[rank] = state
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._orders.version != state.seen, timeout=self._beat_seconds)
            if self._orders.stop:
                self._heard.pop(rank, None)
                self._changed.notify_all()
            return self._orders


class _Door(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, token: str, answer: Callable[[int, HostState], HostOrders]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        class Handler(BaseHTTPRequestHandler):
            timeout = _STRANGER_SECONDS

            def do_POST(self) -> None:
                given = self.headers.get("Authorization", "").encode()
                length = self.headers.get("Content-Length", "")
                if not compare_digest(given, f"Bearer {token}".encode()):
                    return self.send_error(401)
                if not length.isdecimal() or int(length) > _LONGEST_STATE_BYTES:
                    return self.send_error(400)
                try:
                    rank = int(self.path.removeprefix("/hosts/"))
                    state = HostState.model_validate_json(self.rfile.read(int(length)))
                except (ValueError, ValidationError):
                    return self.send_error(400)
                body = answer(rank, state).model_dump_json().encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...  # hosts poll several times a second

        super().__init__((host, 0), Handler)
        self._thread = threading.Thread(target=self.serve_forever, name="gang-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None: ...  # no traceback for a broken connection


def leave(reason: str) -> None:
    """Ends this process by SIGTERM, as a preemption would, so that the backend restarts all hosts of the replica."""
    _log.error("this host of the replica ends: %s", reason)
    logging.shutdown()
    os.kill(os.getpid(), signal.SIGTERM)
