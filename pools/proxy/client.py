"""The pool's side of its proxy: how to start it, to tell it what replicas there are, and to read its counters."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from pools.proxy.state import DesiredState, ProxyHealth, ProxyLimits, ProxyStatus
from resources.config import Config
from resources.errors import ProxyFailed

_POLL_SECONDS = 0.02


class ProxyAddress(Config):
    """Where a proxy listens, as it wrote it into its address file."""

    host: str
    """Address it is bound to."""
    port: int = Field(ge=1, le=65535)
    """Port it is bound to."""
    pid: int
    """Its process."""

    @property
    def base_url(self) -> str:
        """What OpenAI clients on this machine take as their base URL; ends in `/v1`."""
        return f"http://{_reachable(self.host)}:{self.port}/v1"


def proxy_command(address_file: Path, *, host: str, port: int, limits: ProxyLimits) -> tuple[str, ...]:
    """The command that starts a proxy with this interpreter; its keys belong into its environment.

    Args:
        address_file: where it is to write its address; must not exist from an earlier start.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        limits: its bounds and time-outs.
    """
    command = [sys.executable, "-m", "pools.proxy", "--host", host, "--port", str(port)]
    command += ["--address-file", str(address_file)]
    for name, value in limits.model_dump().items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(command)


def wait_for_address(address_file: Path, *, timeout_seconds: float, is_running: Callable[[], bool]) -> ProxyAddress:
    """The address of a proxy that was just started, once it listens.

    Args:
        address_file: the file its command names.
        timeout_seconds: how long it may take.
        is_running: whether its process is still there.

    Raises:
        ProxyFailed: it ended, or took too long.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        was_running = is_running()
        try:
            return ProxyAddress.model_validate_json(address_file.read_bytes())
        except FileNotFoundError:
            pass
        if not was_running:
            raise ProxyFailed(
                expected="the proxy to listen",
                found="its process ended before it did",
                remedy="read the end of its log",
            )
        if time.monotonic() > deadline:
            raise ProxyFailed(
                expected=f"the proxy to listen within {timeout_seconds:g} s",
                found="it runs, but has not written its address",
                remedy="look at its log and at the load of this machine",
            )
        time.sleep(_POLL_SECONDS)


class ProxyClient:
    """Speaks to one proxy as its pool, over a new connection each time. May be used from several threads.

    Args:
        address: of the proxy.
        admin_key: the pool's key.
        timeout_seconds: how long the proxy may take to answer.
    """

    def __init__(self, address: ProxyAddress, *, admin_key: str, timeout_seconds: float = 10) -> None:
        self._address = address
        self._admin_key = admin_key
        self._timeout_seconds = timeout_seconds

    def set_state(self, desired: DesiredState) -> ProxyStatus:
        """Replaces what the proxy knows of models and replicas; it holds when this returns.

        Returns:
            the proxy's status under the new state.

        Raises:
            ProxyFailed: the proxy does not answer, or refuses.
        """
        return self._ask_status("PUT", "/admin/state", body=desired.model_dump_json().encode())

    def status(self) -> ProxyStatus:
        """Replicas with their load, and what became of the requests for each model.

        Raises:
            ProxyFailed: the proxy does not answer, or refuses.
        """
        return self._ask_status("GET", "/admin/status", body=None)

    def health(self) -> ProxyHealth:
        """Whether requests are answered now, held, or refused.

        Raises:
            ProxyFailed: the proxy does not answer.
        """
        status, body = self._ask("GET", "/health", body=None)
        try:
            return ProxyHealthReply.model_validate_json(body).status
        except ValidationError as error:
            raise self._failed(f"status {status} and something else") from error

    def _ask_status(self, method: Literal["GET", "PUT"], path: str, *, body: bytes | None) -> ProxyStatus:
        status, answer = self._ask(method, path, body=body)
        if status != 200:
            raise self._failed(f"status {status} from {path}: {_message(answer)}")
        return ProxyStatus.model_validate_json(answer)

    def _ask(self, method: Literal["GET", "PUT"], path: str, *, body: bytes | None) -> tuple[int, bytes]:
        host, port = _reachable(self._address.host, in_url=False), self._address.port
        connection = http.client.HTTPConnection(host, port, timeout=self._timeout_seconds)
        try:
            headers = {"Authorization": f"Bearer {self._admin_key}", "Content-Type": "application/json"}
            connection.request(method, path, body=body, headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _failed(self, found: str) -> ProxyFailed:
        return ProxyFailed(
            expected=f"an answer of the proxy at {self._address.host}:{self._address.port}",
            found=found,
            remedy=f"see whether process {self._address.pid} still runs, and read the end of its log",
        )


class ProxyHealthReply(Config):
    """Answer of `GET /health`."""

    status: ProxyHealth
    """Whether requests are answered now, held, or refused."""
    replicas: tuple[dict[str, str | bool | int], ...]
    """Name, state, suspicion and load of each replica."""
    held: int
    """Requests that wait for a replica."""


def _reachable(host: str, *, in_url: bool = True) -> str:
    """An address to connect to for an address to listen on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if in_url and ":" in host else host


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"
