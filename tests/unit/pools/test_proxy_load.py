"""The proxy in front of engines that are slow to report, to accept or to be read, as on a machine under load."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from fakes.engine import CANNED, FakeEngine
from fakes.polling import until
from fakes.proxy import HEADERS, FakeReplica, PoolState, RunningProxy, replica_of, running_proxy, state_of
from fakes.wire import read_request, scripted_engine
from pools.protocol import Announcement


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path_factory.mktemp("proxy"), probe_interval_seconds=0.05) as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers=HEADERS) as session:
        yield session


async def _ask(http: aiohttp.ClientSession, proxy: RunningProxy) -> tuple[int, bytes]:
    body = json.dumps({"model": "m", "prompt": "Once", "max_tokens": 8})
    async with http.post(f"{proxy.url}/v1/completions", data=body) as reply:
        return reply.status, await reply.read()


@pytest.mark.parametrize(("restarts", "status"), [(0, 200), (1, 502)], ids=["engine-lives", "engine-restarts"])
async def test_request_taken_from_a_silent_replica_fails_by_deaths_only(
    proxy: RunningProxy, http: aiohttp.ClientSession, restarts: int, status: int
) -> None:
    async with FakeEngine() as engine:
        proxy.tell(state_of("m", engine))
        engine.faults.hang = 5
        asked = asyncio.create_task(_ask(http, proxy))
        for taken in range(5):
            await until(lambda: engine.stats.in_flight == 1 or asked.done())
            if asked.done():
                break
            ready, dead = replica_of(engine), replica_of(engine, state="dead")
            proxy.announce(dead)
            await until(lambda count=taken + 1: engine.stats.aborted == count)
            back = ready.announcement.model_copy(update={"restarts": restarts * (taken + 1)})
            proxy.announce(FakeReplica(ready.name, back))
        assert (await asked)[0] == status
        assert engine.stats.requests == (6 if status == 200 else 3)


async def test_request_that_engines_do_not_accept_waits(proxy: RunningProxy, http: aiohttp.ClientSession) -> None:
    # An engine that stops listening after each probe refuses the request before processing any of it.
    probes = 0
    refusing = 4

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal probes
        head, _ = await read_request(reader)
        body = CANNED if head.startswith(b"POST") else b""
        if not body:
            probes += 1
        if not body and probes < refusing:
            server.close()
        answer = (
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        )
        writer.write(answer % (len(body), body))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    ready = Announcement(instance="first", url=f"http://127.0.0.1:{port}", digest="d", capacity=8, state="ready")
    proxy.tell(PoolState({"m": "d"}, (FakeReplica("refusing", ready),)))
    asked = asyncio.create_task(_ask(http, proxy))
    for refusals in range(1, refusing + 1):
        seen = lambda: proxy.client.status().replicas[0].consecutive_failures  # noqa: E731
        await until(lambda count=refusals, seen=seen: seen() >= count)
        server = await asyncio.start_server(serve, "127.0.0.1", port)
    assert (await asked)[0] == 200
    server.close()


async def test_answers_that_clients_do_not_read_stay_at_the_engine(tmp_path: Path) -> None:
    size, clients, room = 24 * 2**20, 8, 2**25
    large = json.dumps({"choices": [{"index": 0, "text": "x" * size, "finish_reason": "stop"}]}).encode()
    sent = finished = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent, finished
        while True:
            is_large = b"large" in (await read_request(reader))[1]
            answer = large if is_large else CANNED
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % len(answer))
            for at in range(0, len(answer), 2**18):
                writer.write(answer[at : at + 2**18])
                await writer.drain()
                sent += is_large
            finished += is_large

    async def ask(prompt: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.address.port, limit=2**16)
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
        head = "".join(
            f"{name}: {value}\r\n" for name, value in {"Host": "x", "Connection": "close", **HEADERS}.items()
        )
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return reader, writer

    async def answer(to: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
        answered = await to[0].read()
        to[1].close()
        return answered

    kept = tmp_path / "journal.sqlite"
    with running_proxy(tmp_path, journal=kept, max_buffered_bytes=room, max_body_bytes=room) as proxy:
        async with scripted_engine(script) as url:
            ready = Announcement(instance="first", url=url, digest="d", capacity=8, state="ready")
            proxy.tell(PoolState({"m": "d"}, (FakeReplica("r", ready),)))
            asked = [await ask(f"large {number}") for number in range(clients)]
            before = -1
            while before != sent or sent < clients:  # until the engine can send no more
                before = sent
                for _ in range(20):
                    assert (await answer(await ask("small"))).startswith(b"HTTP/1.1 200 ")
            assert finished < clients // 2
            for answered in await asyncio.gather(*map(answer, asked)):
                assert answered.endswith(large)
            unread = await ask("large 0")  # the journal has it, and its client does not read it
            await unread[0].readuntil(b"\r\n\r\n")
            assert b" 429 " in (await answer(await ask("large 1")))[:20]
            unread[1].close()
            while b" 429 " in (again := await answer(await ask("large 1")))[:20]:
                pass
            assert again.endswith(large) and finished == clients


async def test_proxy_that_was_stopped_takes_no_replica_for_silent(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    lease = 0.5
    with running_proxy(tmp_path, lease_seconds=lease) as stopped:
        async with FakeEngine() as engine, AsyncExitStack() as ending:
            ending.callback(stopped.process.send_signal, signal.SIGCONT)
            stopped.tell(state_of("m", engine))
            engine.faults.delay_seconds = lease
            asked = asyncio.create_task(_ask(http, stopped))
            await until(lambda: engine.stats.in_flight == 1)
            stopped.process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            await until(lambda: time.monotonic() > began + 2 * lease)
            stopped.process.send_signal(signal.SIGCONT)
            await asyncio.to_thread(stopped.announce, replica_of(engine))
            assert (await asked)[0] == 200
    assert "has run out" not in stopped.log_file.read_text()
