"""The real proxy as a process; only its users are fake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from fakes.engine import FakeEngine
from fakes.polling import eventually
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.access import PoolAccess
from pools.pool.session import PoolSession
from pools.protocol import Announcement, DesiredState, ReplicaState, ServedModel
from pools.proxy.client import JournalFlags, ProxyAddress, ProxyClient, ProxySettings
from pools.settings import ProxyKeys
from resources.settings import process_environment

CLIENT_KEY = "client-key-5eb1"
ADMIN_KEY = "admin-key-90ca"
JOIN_TOKEN = "join-token-17d3"
KEYS = ProxyKeys(client=SecretStr(CLIENT_KEY), admin=SecretStr(ADMIN_KEY), join=SecretStr(JOIN_TOKEN))
HEADERS = {"Authorization": f"Bearer {CLIENT_KEY}", "Content-Type": "application/json"}
NEVER_EXPIRES = 3600.0


@dataclass(frozen=True)
class FakeReplica:
    name: str
    announcement: Announcement


@dataclass(frozen=True)
class PoolState:
    """The state that a pool and its replicas send to a proxy."""

    models: Mapping[str, str]
    replicas: tuple[FakeReplica, ...] = ()
    failed: str | None = None

    @property
    def desired(self) -> DesiredState:
        """The state set by the pool; every order keeps its replica unchanged."""
        return DesiredState(
            models={name: ServedModel(digest=digest) for name, digest in self.models.items()},
            orders={replica.name: None for replica in self.replicas},
            failed=self.failed,
        )


@dataclass(frozen=True)
class RunningProxy:
    process: subprocess.Popen[bytes]
    address: ProxyAddress
    client: ProxyClient
    log_file: Path

    @property
    def url(self) -> str:
        return self.address.base_url.removesuffix("/v1")

    def tell(self, state: PoolState) -> None:
        """Sets the orders, then announces each replica."""
        self.client.set_state(state.desired)
        for replica in state.replicas:
            self.announce(replica)

    def announce(self, replica: FakeReplica) -> None:
        self.client.announce(replica.name, replica.announcement, join_token=JOIN_TOKEN)


def announced_in(file: Path, process: subprocess.Popen[bytes]) -> ProxyAddress:
    """Returns the address that a starting proxy announces in a file."""
    assert eventually(lambda: file.exists() or process.poll() is not None)
    return ProxyAddress.model_validate_json(file.read_text())


@contextmanager
def running_proxy(folder: Path, *, journal: Path | None = None, **settings: Any) -> Iterator[RunningProxy]:
    """Runs a proxy with these settings, and a journal in that file."""
    address_file, log_file = folder / "proxy.json", folder / "proxy.log"
    address_file.unlink(missing_ok=True)
    kept = JournalFlags(path=journal) if journal is not None else None
    given = {"journal": kept, "lease_seconds": NEVER_EXPIRES, **settings}
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *ProxySettings(**given).arguments],
            env=process_environment({**KEYS.as_environment(), "ASSAY_ANNOUNCEMENT": str(address_file)}),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        address = announced_in(address_file, process)
        yield RunningProxy(process, address, ProxyClient(address, key=ADMIN_KEY), log_file)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def replica_of(engine: FakeEngine, *, state: ReplicaState = "ready", digest: str | None = "d") -> FakeReplica:
    """Returns a replica that is this engine, under a name of its own."""
    announcement = Announcement(instance="first", url=engine.url, digest=digest, capacity=8, state=state)
    return FakeReplica(f"r{engine.port}", announcement)


def state_of(model: str, *engines: FakeEngine) -> PoolState:
    """Returns a state of a single model, ready on all of these engines."""
    return PoolState(models={model: "d"}, replicas=tuple(replica_of(engine) for engine in engines))


def session_of(proxy: RunningProxy, checkpoint: Servable) -> PoolSession:
    """Returns a session with a pool of a single replica that holds the checkpoint."""
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}})
    access = PoolAccess(address=proxy.address, key=KEYS.client, admin_key=KEYS.admin, config=config, engine_build="b")
    ready = Announcement(
        instance="first", url="http://127.0.0.1:9", state="ready", digest=checkpoint.digests.checkpoint
    )
    proxy.client.set_state(DesiredState(models={checkpoint.name: checkpoint.served}, orders={"a": checkpoint.name}))
    proxy.client.announce("a", ready, join_token=JOIN_TOKEN)
    return PoolSession(access, [checkpoint], holder="a test")
