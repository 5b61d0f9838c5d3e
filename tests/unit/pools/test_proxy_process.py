"""The proxy's job: restarted at its old address, the only address that clients use."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import httpx
import pytest

from fakes.jobs import FakeClient, FakeJob
from fakes.polling import eventually
from fakes.pools import InferencePool
from fakes.proxy import CLIENT_KEY, running_proxy
from pools.config import InferencePoolConfig
from pools.jobs import Restarts
from pools.pool.processes import ProxyProcess, check_network, lent
from pools.proxy.client import ProxyAddress, ProxySettings
from pools.proxy.connections.wire import standing_socket
from pools.settings import ProxyKeys
from resources.errors import BadInput, ProxyFailed
from resources.jobs.jobs import Command, JobStatus
from resources.settings import settings


def started_at(*addresses: ProxyAddress) -> tuple[ProxyProcess, FakeClient]:
    """Returns a proxy that was started and has ended; each start announces the next address."""
    left = list(addresses)

    def announces(job: FakeJob) -> None:
        job.announcement = left.pop(0).model_dump_json()

    client = FakeClient(announces)
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}})
    process = ProxyProcess(config, client=client, keys=ProxyKeys.new())
    assert process.start() == addresses[0]
    client.submitted[0].says(JobStatus.FAILED)
    return process, client


def test_proxy_that_has_ended_is_started_again_on_its_port() -> None:
    again = ProxyAddress(host="10.0.0.1", port=4321, pid=2)
    process, client = started_at(again.model_copy(update={"pid": 1}), again)
    assert process.restart_if_ended()
    assert process.address == again
    command = client.requests[1].entrypoint
    assert isinstance(command, Command)
    assert ProxySettings.model_validate_json(command.args[-1]).port == 4321


def test_proxy_that_ends_for_ever_is_given_up_and_for_ten_minutes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("pools.pool.processes.Restarts", partial(Restarts, clock=lambda: now))
    process, client = started_at(*[ProxyAddress(host="10.0.0.1", port=4321, pid=pid) for pid in range(13)])
    for _ in range(10):
        assert process.restart_if_ended()
        client.submitted[-1].says(JobStatus.FAILED)
    with pytest.raises(ProxyFailed, match=r"it ended, for the 11\. time in ten minutes"):
        process.restart_if_ended()
    now = 601.0
    assert process.restart_if_ended()


def test_proxy_that_comes_back_on_another_machine_is_given_up_and_can_be_ended() -> None:
    first = ProxyAddress(host="10.0.0.1", port=4321, pid=1)
    process, client = started_at(first, first.model_copy(update={"host": "10.0.0.2"}))
    with pytest.raises(ProxyFailed, match=r"at 10\.0\.0\.2:4321"):
        process.restart_if_ended()
    assert process.address == first
    process.stop()
    assert client.submitted[1].status() is JobStatus.STOPPED


@pytest.mark.parametrize(
    ("address", "is_local", "leaves"),
    [
        ("auto", True, False),
        ("auto", False, True),
        ("127.0.0.1", False, False),
        ("0.0.0.0", True, True),
        ("::", True, True),
        ("10.0.0.1", True, True),
        ("evaluations.internal", True, True),
    ],
)
def test_pool_with_keys_leaving_the_machine_is_refused_unless_allowed(
    address: str, is_local: bool, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}, "proxy_host": address})
    settings.cache_clear()
    with pytest.raises(BadInput, match="--insecure") if leaves else nullcontext():
        check_network(config, is_local=is_local)
    monkeypatch.setenv("ASSAY_INSECURE", "1")
    settings.cache_clear()
    check_network(config, is_local=is_local)
    settings.cache_clear()


def test_pool_beyond_loopback_is_refused_before_anything_is_started() -> None:
    client = FakeClient()
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}, "proxy_host": "0.0.0.0"})
    with pytest.raises(BadInput, match="ASSAY_INSECURE=1"), InferencePool(config, [], client=client):
        pass
    assert client.requests == []


def test_connections_wait_while_the_proxy_is_started_again_with_its_socket(tmp_path: Path) -> None:
    with standing_socket("127.0.0.1", 0) as standing:
        host, port = standing.getsockname()
        for _ in range(2):
            with socket.create_connection((host, port)) as early, lent(standing) as lender:
                early.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                with running_proxy(tmp_path, lender=lender, port=port) as proxy:
                    assert early.recv(100).startswith(b"HTTP/1.1 503 ")
                    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
                    assert httpx.get(f"{proxy.url}/v1/models", headers=headers).status_code == 200
                    proxy.process.kill()
    eventually(lambda: is_refused(host, port))


def is_refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return True
    return False


def test_port_that_is_taken_is_named_with_its_remedy() -> None:
    with standing_socket("127.0.0.1", 0) as taken:
        content = {"model": {"name": "run"}, "proxy_port": taken.getsockname()[1]}
        config = InferencePoolConfig.model_validate(content)
        with pytest.raises(ProxyFailed, match="choose another proxy_port"):
            ProxyProcess(config, client=FakeClient(), keys=ProxyKeys.new()).start()
