"""A proxy with a jumping wall clock: leases, time-outs, journal and counters must not be affected."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fakes.engine import FakeEngine
from fakes.polling import until
from fakes.proxy import ADMIN_KEY, HEADERS, KEYS, RunningProxy, announced_in, replica_of, state_of
from pools.protocol import Lease
from pools.proxy.client import JournalFlags, ProxyClient, ProxySettings
from resources.settings import process_environment

MODEL = "m"
LEASE_SECONDS = 2.0
JUMPY = """
import itertools, time
real, jumps = time.time, itertools.cycle((0.0, -40e6, 40e6, -1.5e9, 86_400.0, -3600.0))
time.time = lambda: real() + next(jumps)
time.time_ns = lambda: int(time.time() * 1e9)
"""


@pytest.fixture
def jumpy_proxy(tmp_path: Path) -> Iterator[RunningProxy]:
    """Runs a proxy that reads another time, by years, at each call."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(JUMPY)
    address_file, log_file = tmp_path / "proxy.json", tmp_path / "proxy.log"
    journal = JournalFlags(path=tmp_path / "journal.sqlite", max_bytes=2**24)
    settings = ProxySettings(
        journal=journal, lease_seconds=LEASE_SECONDS, engine_timeout_seconds=20, hold_timeout_seconds=20
    )
    command = [sys.executable, *settings.arguments]
    variables = {"ASSAY_ANNOUNCEMENT": str(address_file), "PYTHONPATH": str(tmp_path / "clock")}
    environment = process_environment({**KEYS.as_environment(), **variables})
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=Path(__file__).parents[2])
    try:
        address = announced_in(address_file, process)
        yield RunningProxy(process, address, ProxyClient(address, key=ADMIN_KEY), log_file)
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        yield session


async def _ask(http: aiohttp.ClientSession, proxy: RunningProxy, prompt: str, **fields: Any) -> tuple[int, bytes]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    async with http.post(f"{proxy.url}/v1/completions", json=body) as answer:
        return answer.status, await answer.read()


async def test_clock_of_the_proxy_jumps_and_requests_are_answered_kept_and_replayed(
    jumpy_proxy: RunningProxy, http: aiohttp.ClientSession
) -> None:
    async with FakeEngine(models=(MODEL,)) as engine:
        jumpy_proxy.tell(state_of(MODEL, engine))
        jumpy_proxy.client.take_lease("user", Lease(holder="a test", seconds=60))
        first = [await _ask(http, jumpy_proxy, f"prompt {number}") for number in range(50)]
        jumpy_proxy.announce(replica_of(engine))
        again = [await _ask(http, jumpy_proxy, f"prompt {number}") for number in range(50)]
        assert {status for status, _ in first} == {200}
        assert again == first
        assert engine.stats.requests == 50
        status = jumpy_proxy.client.status()
        assert status.journal is not None
        assert (status.journal.kept, status.journal.hits, status.journal.errors) == (50, 50, 0)
        assert 0 < status.leases["user"].seconds_left <= 60
        assert not any(replica.lost for replica in status.replicas)
        async with http.get(f"{jumpy_proxy.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        [total] = [float(line.split()[-1]) for line in lines if "request_seconds_sum" in line]
        assert 0 <= total < 60


async def test_clock_of_the_proxy_jumps_and_a_silent_replica_still_loses_its_lease(
    jumpy_proxy: RunningProxy, http: aiohttp.ClientSession
) -> None:
    async with FakeEngine(models=(MODEL,)) as engine:
        jumpy_proxy.tell(state_of(MODEL, engine))
        jumpy_proxy.client.take_lease("user", Lease(holder="a test", seconds=1))
        await until(lambda: jumpy_proxy.client.status().replicas[0].lost)
        assert jumpy_proxy.client.status().leases == {}
        jumpy_proxy.announce(replica_of(engine))
        assert (await _ask(http, jumpy_proxy, "after"))[0] == 200


def test_clock_of_the_proxy_does_jump(tmp_path: Path, jumpy_proxy: RunningProxy) -> None:
    # without jumps the tests above prove nothing
    code = "import time; print(time.time(), time.time())"
    environment = process_environment({"PYTHONPATH": str(tmp_path / "clock")})
    completed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    first, second = map(float, completed.stdout.split())
    assert abs(first - second) > 10e6
    running = Path(f"/proc/{jumpy_proxy.process.pid}/environ").read_bytes().split(b"\0")
    assert f"PYTHONPATH={tmp_path / 'clock'}".encode() in running
