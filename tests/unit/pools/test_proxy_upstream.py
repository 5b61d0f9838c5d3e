"""The proxy's connections to engines with good, bad, late, partial or missing answers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import AsyncMock, Mock

import aiohttp
import pytest
import uvloop

from fakes.engine import CANNED
from fakes.polling import until
from fakes.proxy import HEADERS, FakeReplica, PoolState, RunningProxy, running_proxy
from fakes.wire import Script, read_request, scripted_engine
from pools.protocol import Announcement
from pools.proxy.connections.room import AnswerShare, BodyRoom
from pools.proxy.connections.upstream import STREAM_BUFFER_BYTES, Call, Lost, NotConnected, TimedOut, Upstream
from pools.proxy.request import EventRelay

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture:DeprecationWarning")


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Both event loops that a proxy may run on."""
    return request.param()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream(connect_timeout_seconds=5, idle_seconds=600, look_seconds=0.02)
    yield upstream
    upstream.close()


def _answering(answer: bytes, *, times: int = 1000, then_close: bool = False) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(times):
            await read_request(reader)
            writer.write(answer)
        if not then_close:
            await reader.read()

    return script


async def _asked(upstream: Upstream, url: str, *, patience: float = 5, **options: Any) -> Call:
    call = upstream.call(url, patience_seconds=patience)
    try:
        await call.ask(b"POST", b"/v1/completions", **options)
        return call
    finally:
        if not call.is_stream:
            call.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.mark.parametrize("size", [0, 10, 65_536, 65_537, 5_000_000])
async def test_request_reaches_the_engine_as_it_was_given(upstream: Upstream, size: int) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(OK)

    body = b"b" * size
    async with scripted_engine(script) as url:
        await _asked(upstream, url, headers=[(b"X-b", b"1"), (b"x-A", b"2"), (b"X-B", b"3")], body=body)
    host = url.removeprefix("http://").encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: %b\r\nX-b: 1\r\nx-A: 2\r\nX-B: 3\r\nContent-Length: %d\r\n\r\n"
    assert seen == [(head % (host, size), body)]


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (OK, 200, b"ok"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\nT: 1\r\n\r\n", 200, b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: a\r\n\r\n" + OK, 200, b"ok"),
        (b"HTTP/1.1 429 Slow\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n", 429, b""),
        (b"HTTP/1.1 204 None\r\n\r\n", 204, b""),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok", 200, b"ok"),
        (b"HTTP/1.0 200 OK\r\n\r\nok", 200, b"ok"),
        (OK + b"HTTP/1.1 200 OK\r\n\r\n", 200, b"ok"),
    ],
    ids=["length", "chunks", "interim", "empty", "no-content", "until-close", "http-1.0", "and-more"],
)
async def test_answer_of_any_framing_comes_whole(upstream: Upstream, answer: bytes, status: int, body: bytes) -> None:
    async with scripted_engine(_answering(answer, times=1, then_close=True)) as url:
        call = await _asked(upstream, url)
    assert (call.status, call.body) == (status, body)
    assert [name for name, _ in call.headers] == ([b"Retry-After"] if status == 429 else [])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 2",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"\x00",
        b"HTTP/1.1 20 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        b"HTTP/1.1 200 OK\r\nno colon\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nA: b\x00\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        *(b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\nok" % length for length in (b"-2", b"+2", b"2,2", b"9" * 30)),
        *(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%b\r\nok\r\n0\r\n\r\n" % size
            for size in (b"-2", b"0x2", b"", b"f" * 17, b"3")
        ),
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 400_000,
    ],
)
async def test_answer_that_is_cut_or_malformed_is_lost(upstream: Upstream, answer: bytes) -> None:
    async with scripted_engine(_answering(answer, times=1, then_close=True)) as url:
        with pytest.raises(Lost):
            await _asked(upstream, url)


async def test_address_without_a_listener_is_lost(upstream: Upstream) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(Lost):
            await _asked(upstream, f"http://127.0.0.1:{closed.getsockname()[1]}")


async def test_engine_that_hangs_up_as_soon_as_it_is_connected_is_lost(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def connect_late(*args: Any, **options: Any) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        # Returns after the connection is gone, as on a busy machine.
        transport, protocol = await connect(*args, **options)
        await until(transport.is_closing)
        return transport, protocol

    monkeypatch.setattr(loop, "create_connection", connect_late)
    async with scripted_engine(script) as url:
        with pytest.raises(Lost):
            await _asked(upstream, url)


@pytest.mark.parametrize("host", ["a\0b", "a..b", "\u2028", "a" * 300])
async def test_impossible_host_is_lost(upstream: Upstream, host: str) -> None:
    with pytest.raises(Lost):
        await _asked(upstream, f"http://{host}:80")


async def test_engine_that_is_silent_times_out_and_is_hung_up_on(upstream: Upstream) -> None:
    hung_up = asyncio.Event()

    async def script(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        try:
            await read_request(reader)  # ends within the request where this machine takes longer than the patience
            await reader.read()
        finally:
            hung_up.set()

    async with scripted_engine(script) as url:
        with pytest.raises(TimedOut):
            await _asked(upstream, url, patience=0.1)
        await asyncio.wait_for(hung_up.wait(), 5)


async def test_stall_of_this_process_while_it_connects_does_not_count(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def stall_and_connect(*args: Any, **options: Any) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        time.sleep(0.3)  # blocks the loop, as a busy machine does
        return await connect(*args, **options)

    monkeypatch.setattr(loop, "create_connection", stall_and_connect)
    async with scripted_engine(_answering(OK)) as url:
        assert (await _asked(upstream, url, patience=0.1)).body == b"ok"


async def test_host_that_accepts_no_connection_in_time_was_not_reached(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
    with pytest.raises(NotConnected):
        await _asked(upstream, "http://127.0.0.1:9", patience=0.1)


@pytest.mark.parametrize(("idle_seconds", "connections"), [(600, 1), (0.02, 2)])
async def test_connection_is_used_again_unless_it_was_idle_for_too_long(idle_seconds: float, connections: int) -> None:
    opened = closed = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened, closed
        opened += 1
        try:
            await _answering(OK)(reader, writer)
        finally:
            closed += 1

    # It checks at every turn of the event loop, so also while it connects.
    upstream = Upstream(connect_timeout_seconds=5, idle_seconds=idle_seconds, look_seconds=0)
    async with scripted_engine(script) as url:
        await _asked(upstream, url)
        await until(lambda: closed == connections - 1)
        await _asked(upstream, url)
        assert opened == connections
        upstream.close()


async def test_connection_that_was_closed_when_used_again_costs_nothing(upstream: Upstream) -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await read_request(reader)
        writer.write(OK)
        await reader.read(1)  # the next request arrives and is not answered

    async with scripted_engine(script) as url:
        for _ in range(3):
            assert (await _asked(upstream, url)).body == b"ok"
    assert connections == 3


async def test_engine_that_says_half_an_answer_on_a_used_connection_is_lost(upstream: Upstream) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        writer.write(b"HTTP/1.1 200")

    async with scripted_engine(script) as url:
        await _asked(upstream, url)
        with pytest.raises(Lost):
            await _asked(upstream, url)


async def test_stream_without_a_reader_is_not_taken_from_the_engine(upstream: Upstream) -> None:
    sent = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n")
        for _ in range(400):
            writer.write(b"x" * 2**17)
            await writer.drain()
            sent += 2**17

    async with scripted_engine(script) as url:
        call = await _asked(upstream, url, stream=True)
        assert call.is_stream
        before = -1
        while before != sent:  # until the engine is blocked
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 400 * 2**17
        taken = 0
        while piece := await call.read():
            assert len(piece) < 2 * STREAM_BUFFER_BYTES
            taken += len(piece)
        assert taken == 400 * 2**17
        call.close()


def _large(size: int, *, stream: bool) -> Script:
    kind = b"text/event-stream" if stream else b"text/plain"

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, size))
        for _ in range(size // 2**16):
            writer.write(b"x" * 2**16)
            await writer.drain()
        await reader.read()

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_large_answers_take_half_of_the_room_and_the_oldest_goes_on(upstream: Upstream, stream: bool) -> None:
    size, answer, asked = 2**24, 7 * 2**20, 8
    room = BodyRoom(size)
    most = 0

    async def ask(url: str) -> int:
        nonlocal most
        share = AnswerShare(room)
        call = upstream.call(url, patience_seconds=5, share=share)
        await call.ask(b"POST", b"/v1/completions", stream=stream)
        taken = 0 if stream else len(call.body)
        while stream and (piece := await call.read()):
            taken += len(piece)
            most = max(most, size - room.free)
            await asyncio.sleep(0)
        most = max(most, size - room.free)
        call.close()
        share.end()
        return taken

    async with scripted_engine(_large(answer, stream=stream)) as url:
        assert await asyncio.gather(*(ask(url) for _ in range(asked))) == [answer] * asked
    assert room.free == size
    assert size // 2 < most < size * 3 // 4 + answer + asked * STREAM_BUFFER_BYTES < asked * answer


async def test_answers_wait_for_whole_answers_that_no_client_took(upstream: Upstream) -> None:
    room = BodyRoom(2**24)
    shares = [AnswerShare(room) for _ in range(4)]
    async with scripted_engine(_large(2**23, stream=False)) as url:
        # Time spent waiting for room does not count, although it is checked many times.
        asking = [
            asyncio.create_task(upstream.call(url, patience_seconds=1, share=share).ask(b"POST", b"/v1/completions"))
            for share in shares
        ]
        waiting = dict(zip(asking, shares, strict=True))
        while waiting:
            (whole,), _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            async with scripted_engine(_answering(OK)) as small:
                assert (await _asked(upstream, small)).body == b"ok"
            assert [task for task in waiting if task.done()] == [whole]  # 7 MiB of it are more than a quarter
            waiting.pop(whole).end()
    assert room.free == 2**24


@pytest.mark.parametrize("blocked", [False, True])
def test_answer_to_a_slow_client_is_not_the_oldest(blocked: bool) -> None:
    room = BodyRoom(2**20)
    first, second = AnswerShare(room), AnswerShare(room)
    resume = Mock()
    assert first.hold(2**21, Mock()) and not second.hold(2**21, resume)
    first.hold(2**21, Mock(), blocked=blocked)
    assert second.hold(2**21) is blocked is resume.called
    first.end()
    assert second.hold(2**21) and room.free == 0
    second.end()
    first.hold(2**21)
    assert room.free == 2**20


# --- Through the whole proxy -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running_proxy(tmp_path_factory.mktemp("wire"), probe_interval_seconds=0.05) as running:
        yield running


async def _through(
    proxy: RunningProxy, scripts: list[Script], body: dict[str, Any], **headers: str
) -> tuple[int, bytes]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(scripted_engine(script)) for script in scripts]
        replicas = [FakeReplica(f"r{url}".replace("://", "-").replace(":", "-"), _ready(url)) for url in urls]
        proxy.tell(PoolState({"m": "d"}, tuple(replicas)))
        session = await stack.enter_async_context(aiohttp.ClientSession(headers={**HEADERS, **headers}))
        async with session.post(f"{proxy.url}/v1/completions", json={"model": "m", **body}) as reply:
            return reply.status, await reply.read()


def _ready(url: str) -> Announcement:
    return Announcement(instance="first", url=url, digest="d", capacity=8, state="ready")


def _json_answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def test_request_headers_reach_the_engine_less_those_of_the_connection_and_the_key(proxy: RunningProxy) -> None:
    heads: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await read_request(reader))[0])
        writer.write(_json_answer(CANNED))

    headers = {"X-Request-Id": "mine", "Cookie": "a=b", "Proxy-Authorization": "c", "TE": "trailers", "Accept": "a/b"}
    assert (await _through(proxy, [script], {}, **headers))[0] == 200
    names = [line.partition(b":")[0].lower() for line in heads[0].split(b"\r\n")[1:] if line]
    assert sorted(names) == [
        *(b"accept", b"accept-encoding", b"content-length", b"content-type", b"host", b"user-agent", b"x-request-id")
    ]


EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def _streaming(*pieces: bytes) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")
        await reader.read()

    return script


@pytest.mark.parametrize(
    "pieces",
    [[EVENT + LAST + DONE], [EVENT, LAST, DONE], [(EVENT + LAST + DONE)[at : at + 1] for at in range(146)]],
    ids=["at-once", "by-event", "by-byte"],
)
async def test_stream_that_is_whole_comes_byte_for_byte(proxy: RunningProxy, pieces: list[bytes]) -> None:
    assert b"".join(pieces).endswith(DONE)
    assert await _through(proxy, [_streaming(*pieces)], {"stream": True}) == (200, EVENT + LAST + DONE)


PING = b": ping\n\n"


@pytest.mark.parametrize(
    "pieces",
    [[EVENT, LAST, DONE + PING * 20], [EVENT, LAST, DONE, *[PING] * 20], [EVENT + LAST + DONE[:-1], b"\n" + PING * 20]],
    ids=["with-it", "after-it", "split"],
)
async def test_stream_with_comments_after_its_last_line_is_whole(proxy: RunningProxy, pieces: list[bytes]) -> None:
    assert await _through(proxy, [_streaming(*pieces)], {"stream": True}) == (200, EVENT + LAST + DONE + PING * 20)


@pytest.mark.parametrize("pieces", [[b"%b" + PING], [b"%b", PING], [b"%b", PING[:3], PING[3:]]])
async def test_stream_of_a_response_with_comments_after_its_last_event_is_done(pieces: list[bytes]) -> None:
    responder = Mock(write=AsyncMock())
    relay = EventRelay(responder, of_response=True)
    last = b"event: response.completed\ndata: {}\n\n"
    for piece in pieces:
        await relay.send(piece.replace(b"%b", last))
        assert relay.is_done
    await relay.finish()
    assert b"".join(call.args[0] for call in responder.write.await_args_list) == last + PING


@pytest.mark.parametrize("pieces", [[EVENT], [EVENT, LAST], [EVENT, LAST, b"data: [DO"]], ids=["cut", "no-end", "half"])
async def test_stream_that_ends_without_its_last_line_ends_with_an_error(
    proxy: RunningProxy, pieces: list[bytes]
) -> None:
    status, body = await _through(proxy, [_streaming(*pieces)], {"stream": True})
    *events, error = body.removesuffix(b"\n\n").split(b"\n\n")
    assert status == 200
    assert b"\n\n".join([*events, b""]) == b"".join(piece for piece in pieces if piece in (EVENT, LAST))
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 502
