"""The real proxy as a process, for tests: nothing in it is fake but who uses it."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from fakes.engine import FakeEngine
from pools.proxy.client import ProxyAddress, ProxyClient, proxy_command, wait_for_address
from pools.proxy.state import DesiredReplica, DesiredState, ProxyLimits, ReplicaState
from resources.settings import ProxyKeys, process_environment

CLIENT_KEY = "client-key-5eb1"
ADMIN_KEY = "admin-key-90ca"
KEYS = ProxyKeys(client=SecretStr(CLIENT_KEY), admin=SecretStr(ADMIN_KEY))
HEADERS = {"Authorization": f"Bearer {CLIENT_KEY}", "Content-Type": "application/json"}


@dataclass(frozen=True)
class RunningProxy:
    """A proxy's process and the pool's connection to it."""

    process: subprocess.Popen[bytes]
    address: ProxyAddress
    client: ProxyClient
    log_file: Path

    @property
    def url(self) -> str:
        """Address without a path."""
        return self.address.base_url.removesuffix("/v1")


@contextmanager
def running_proxy(folder: Path, **limits: Any) -> Iterator[RunningProxy]:
    """A proxy with these limits; ends with the block."""
    address_file, log_file = folder / "proxy.json", folder / "proxy.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            proxy_command(address_file, host="127.0.0.1", port=0, limits=ProxyLimits(**limits)),
            env=process_environment(KEYS.as_environment()),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        address = wait_for_address(address_file, timeout_seconds=30, is_running=lambda: process.poll() is None)
        yield RunningProxy(process, address, ProxyClient(address, admin_key=ADMIN_KEY), log_file)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def replica_of(engine: FakeEngine, *, state: ReplicaState = "ready", digest: str | None = "d") -> DesiredReplica:
    """A replica that is this engine, under a name of its own."""
    return DesiredReplica(name=f"r{engine.port}", url=engine.url, digest=digest, capacity=8, state=state)


def state_of(model: str, *engines: FakeEngine) -> DesiredState:
    """One model, on all of these engines, which are ready."""
    return DesiredState(models={model: "d"}, replicas=tuple(replica_of(engine) for engine in engines))


async def until(condition: Callable[[], bool], *, timeout_seconds: float = 10) -> None:
    """Returns as soon as a condition holds; fails after the time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for does not happen"
        await asyncio.sleep(0.01)
