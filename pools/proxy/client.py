"""The pool's client for its proxy: starts it, sets its replicas, and reads its counters."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field

from pools.protocol import (
    Announcement,
    CellOptions,
    DesiredState,
    Lease,
    Orders,
    ProxyLimits,
    ProxyStatus,
    RequestCounters,
)
from resources.config import Config
from resources.errors import ProxyFailed, ProxyRefused
from resources.jobs.jobs import JobHandle, polls

_ADDRESS_POLL_SECONDS = 0.02
_CELL_SECONDS = 300.0  # copying to a mirror in a remote store takes long

_Method = Literal["GET", "PUT", "POST", "DELETE"]
Value = TypeVar("Value", bound=Config)


class ProxyAddress(Config):
    """Address of a proxy, as the proxy wrote it into its address file."""

    host: str
    port: int = Field(ge=1, le=65535)
    pid: int = 0
    """Id of its process; 0 if unknown."""
    scheme: Literal["http", "https"] = "http"
    """Protocol; https if a TLS terminator is in front of it."""
    path: str = ""
    """Path prefix, if a gateway in front of it serves other paths too."""

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients on this machine; ends in `/v1`."""
        return f"{self.scheme}://{_reachable(self.host)}:{self.port}{self.path}/v1"


class JournalFlags(Config):
    """Settings of a proxy's journal."""

    path: Path | None = None
    """Its file, which several proxies may share; None for the default path on the proxy's machine."""
    max_bytes: int = 4 * 2**30
    prompts: bool = False


class ProxySettings(ProxyLimits):
    """Settings of a proxy's process, its argument in JSON; its keys belong into its environment."""

    host: str = "127.0.0.1"
    """Address to listen on; auto is that of the machine it runs on."""
    port: int = 0
    """Port to listen on; 0 takes a free port."""
    lender: Path | None = None
    """Path of the Unix socket at which a listening socket is lent; None opens a new socket."""
    journal: JournalFlags | None = None
    description: str = ""
    """The pool's `PoolDescription` for clients, as JSON."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return "-m", "pools.proxy", self.model_dump_json()


def address_of_job(job: JobHandle, subject: str, *, timeout_seconds: float, remedy: str) -> ProxyAddress:
    """Returns the address that a proxy's job announces; `subject` is that of the error, which shows its log."""
    for _ in polls(timeout_seconds, longest_seconds=_ADDRESS_POLL_SECONDS):
        ended = job.status().finished  # before the look at its announcement
        if (address := job.announced()) is not None:
            return ProxyAddress.model_validate_json(address)
        if ended:
            break
    details, log = job.details(), job.logs(20).rstrip()
    state = "it ended" if details.status.finished else f"it is {details.status}"
    raise ProxyFailed(
        expected=f"{subject} to answer within {timeout_seconds:g} s",
        found=f"{state}{f', {details.reason}' if details.reason else ''}. Last lines of its log:\n{log}",
        remedy=remedy,
    )


class ProxyClient:
    """Client of a proxy, for its pool or for a user of the pool. Thread-safe.

    Each call opens a new connection: calls are few, and a restarted proxy is reached at once. `timeout_seconds` adds to
    the requested waiting time.

    Raises:
        ProxyFailed: the proxy does not answer.
        ProxyRefused: it refuses the request.
    """

    def __init__(self, address: ProxyAddress, *, key: str, timeout_seconds: float = 10) -> None:
        self._address = address
        self._key = key
        self._timeout_seconds = timeout_seconds

    def set_state(self, desired: DesiredState) -> ProxyStatus:
        return self._asked(ProxyStatus, "PUT", "/admin/state", desired)

    def status(self, *, after: int | None = None, wait_seconds: float = 0) -> ProxyStatus:
        """Returns replicas with their load, demand, leases, and counters of the requests for each model.

        The answer may be held back for `wait_seconds`, until its version is not `after`.
        """
        query = f"?after={after}&wait={wait_seconds:g}" if after is not None else ""
        return self._asked(ProxyStatus, "GET", f"/admin/status{query}", wait=wait_seconds)

    def announce(self, replica: str, announcement: Announcement, *, join_token: str) -> Orders:
        """Announces a replica; the answer may be held back for up to `announcement.wait_seconds`."""
        wait = announcement.wait_seconds
        return self._asked(Orders, "POST", f"/replicas/{replica}", announcement, key=join_token, wait=wait)

    def take_lease(self, name: str, lease: Lease) -> ProxyStatus:
        return self._asked(ProxyStatus, "PUT", f"/admin/leases/{name}", lease)

    def end_lease(self, name: str) -> ProxyStatus:
        return self._asked(ProxyStatus, "DELETE", f"/admin/leases/{name}")

    def announced(self, name: str, *, join_token: str) -> Announcement:
        """Returns the last valid announcement under a replica's name, without keys."""
        return self._asked(Announcement, "GET", f"/replicas/{name}", key=join_token)

    def open_cell(self, cell: str, attempt: str, *, mirror: str | None, traceparent: str | None = None) -> None:
        """Opens an attempt at a cell: its requests come under `/cells/<cell>/<attempt>/v1`.

        The cell's name is the same in every attempt that may replay its answers. `mirror` is a folder in any store that
        its answers are read from now, and copied to; `traceparent` is the span of its requests, for engines that trace.
        """
        body = json.dumps({"mirror": mirror, "traceparent": traceparent})  # the proxy checks them
        self.ask_for("PUT", f"/admin/cells/{cell}/{attempt}", body=body, wait=_CELL_SECONDS)

    def cell_counts(self, cell: str, attempt: str) -> RequestCounters:
        return RequestCounters(**json.loads(self.ask_for("GET", f"/admin/cells/{cell}/{attempt}")))

    def close_cell(self, cell: str, attempt: str, *, drop: bool) -> RequestCounters:
        """Closes an attempt at a cell; `drop` deletes the mirrored answers, since the cell has its record."""
        body = CellOptions(drop=drop).model_dump_json()
        answer = self.ask_for("DELETE", f"/admin/cells/{cell}/{attempt}", body=body, wait=_CELL_SECONDS)
        return RequestCounters(**json.loads(answer))

    def _asked(
        self,
        kind: type[Value],
        method: _Method,
        path: str,
        value: Config | None = None,
        *,
        key: str | None = None,
        wait: float = 0,
    ) -> Value:
        body = value.model_dump_json() if value is not None else None
        return kind.model_validate_json(self.ask_for(method, path, body=body, key=key, wait=wait))

    def ask_for(
        self, method: _Method, path: str, *, body: str | None = None, key: str | None = None, wait: float = 0
    ) -> bytes:
        address = self._address
        # https takes the certificates of the system, or of SSL_CERT_FILE
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(_reachable(address.host, in_url=False), address.port, timeout=self._timeout_seconds + wait)
        content = body.encode() if body is not None else None
        headers = {"Authorization": f"Bearer {key or self._key}", "Content-Type": "application/json"}
        try:
            connection.request(method, f"{address.path}{path}", body=content, headers=headers)
            reply = connection.getresponse()
            answer = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise ProxyFailed(
                expected=f"an answer of the proxy at {address.host}:{address.port}",
                found=f"{type(error).__name__}: {error}",
                remedy=f"see whether process {address.pid} still runs, and read the end of its log"
                if address.pid
                else "check that the pool is up, and any proxy or firewall in front of it",
            ) from error
        finally:
            connection.close()
        if reply.status != 200:
            raise ProxyRefused(
                expected=f"the proxy at {address.host}:{address.port} to take {method} {path}",
                found=f"status {reply.status}: {_message(answer)}",
                remedy="use the keys of this very pool, and what the message says",
            )
        return answer


def _reachable(host: str, *, in_url: bool = True) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if in_url and ":" in host else host


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"
