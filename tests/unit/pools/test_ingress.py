"""The ingress to an engine for a remote proxy: key check, unchanged bytes, and both ends closing together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from fakes.polling import eventually
from fakes.wire import read_request, scripted_engine
from pools.protocol import EngineKeys
from pools.proxy.connections.upstream import Lost, Upstream
from pools.replica.ingress import Ingress

BODY = bytes(range(256)) * 4096


@asynccontextmanager
async def ingress_to(url: str | None) -> AsyncIterator[Ingress]:
    port = int(url.rpartition(":")[2]) if url else None
    ingress = await asyncio.to_thread(Ingress, "127.0.0.1", lambda: port)
    try:
        yield ingress
    finally:
        await asyncio.to_thread(ingress.close)


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream(connect_timeout_seconds=5)
    try:
        yield upstream
    finally:
        upstream.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        _, body = await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()


@asynccontextmanager
async def stranger(ingress: Ingress, content: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    host, _, port = ingress.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(content)
    try:
        yield reader
    finally:
        writer.close()


async def ask(upstream: Upstream, ingress: Ingress, key: str | None, body: bytes = BODY) -> bytes:
    call = upstream.call(ingress.url, patience_seconds=10, keys=EngineKeys(ingress=key))
    try:
        await call.ask(b"POST", b"/v1/completions", body=body)
        return call.body
    finally:
        call.close()


async def test_request_with_the_key_passes_byte_for_byte_also_on_a_kept_connection() -> None:
    async with scripted_engine(echo) as url, ingress_to(url) as ingress, upstream() as proxy:
        assert [await ask(proxy, ingress, ingress.key) for _ in range(3)] == [BODY] * 3


@pytest.mark.parametrize("key", [None, "another-key-of-the-same-kind"])
async def test_connection_without_the_key_never_reaches_the_engine(key: str | None) -> None:
    reached: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(await reader.read(1))

    async with scripted_engine(note) as url, ingress_to(url) as ingress, upstream() as proxy:
        with pytest.raises(Lost):
            await ask(proxy, ingress, key)
    assert reached == []


async def test_connections_without_the_key_are_few_and_keep_no_request_out() -> None:
    async with scripted_engine(echo) as url, ingress_to(url) as ingress, upstream() as proxy, AsyncExitStack() as stack:
        oldest = await stack.enter_async_context(stranger(ingress))
        for _ in range(300):
            await stack.enter_async_context(stranger(ingress))
        assert await ask(proxy, ingress, ingress.key) == BODY
        assert await asyncio.wait_for(oldest.read(), 5) == b""


async def test_first_line_that_is_longer_than_a_key_is_not_waited_for() -> None:
    async with ingress_to(None) as ingress, stranger(ingress, b"x" * 300) as reader:
        with suppress(ConnectionError):  # unread bytes reset the connection
            assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_requests_that_come_all_at_once_are_no_strangers() -> None:
    async with scripted_engine(echo) as url, ingress_to(url) as ingress, upstream() as proxy:
        answers = await asyncio.gather(*(ask(proxy, ingress, ingress.key, body=b"x") for _ in range(150)))
    assert answers == [b"x"] * 150


async def test_engine_hears_when_the_client_leaves(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await reader.read(1)
        left.set()

    async with scripted_engine(work) as url, ingress_to(url) as ingress, upstream() as proxy:
        asking = asyncio.create_task(ask(proxy, ingress, ingress.key))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asking, 1)
        await asyncio.wait_for(left.wait(), 10)


async def test_ingress_without_an_engine_closes_connections() -> None:
    async with ingress_to(None) as ingress, upstream() as proxy:
        with pytest.raises(Lost):
            await ask(proxy, ingress, ingress.key)


def test_closed_ingress_listens_no_more() -> None:
    ingress = Ingress("127.0.0.1", lambda: None)
    host, _, port = ingress.url.removeprefix("http://").partition(":")
    ingress.close()
    ingress.close()

    async def connects() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return False
        writer.close()
        return True

    eventually(lambda: not asyncio.run(connects()))
