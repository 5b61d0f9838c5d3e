"""The proxy's connections: HTTP with valid, invalid, slow and disconnected clients, and with engines of each kind."""

from __future__ import annotations

import asyncio
import http.client
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop
from hypothesis import given, settings

from fakes.fuzz import awkward_streams, check_conversation
from fakes.polling import until
from fakes.wire import EchoApplication
from pools.proxy.connections.reading import MAX_HEAD_BYTES, Bounds, RequestReader, Turn
from pools.proxy.connections.room import PART_BYTES, BodyRoom
from pools.proxy.connections.wire import Listener, standing_socket

BOUNDS = Bounds(2**26, head_timeout_seconds=5, idle_timeout_seconds=5)
POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture:DeprecationWarning")


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Both event loops that a proxy may run on."""
    return request.param()


@pytest.fixture
async def application() -> EchoApplication:
    return EchoApplication()


@asynccontextmanager
async def _listening(application: EchoApplication, bounds: Bounds = BOUNDS) -> AsyncIterator[int]:
    listener, listening = Listener(application, bounds=bounds), standing_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    await listener.start(listening)
    try:
        yield port
    finally:
        await listener.close(0.05)


@pytest.fixture
async def port(application: EchoApplication) -> AsyncIterator[int]:
    async with _listening(application) as bound:
        yield bound


async def _exchange(port: int, *pieces: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        if writer.is_closing():  # refused before all of it was sent
            break
        writer.write(piece)
        await asyncio.sleep(0)
    try:
        async with asyncio.timeout(15):
            return await reader.read()
    finally:
        writer.close()


def _closing(request: bytes) -> bytes:
    return request.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")


# --- Valid clients ----------------------------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order(port: int, application: EchoApplication) -> None:
    first = b"POST /hang HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    refused = b"GET /refused HTTP/1.1\r\nHost: x\r\n\r\n"
    asked = asyncio.create_task(_exchange(port, first + refused + GET, _closing(GET)))
    await until(lambda: len(application.requests) == 1)
    application.release.set()
    received = await asked
    assert received.count(b"HTTP/1.1 ") == 4
    assert received.index(b"hung") < received.index(b" 401 ") < received.index(b"GET /a 0")


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_000])
async def test_body_in_chunks_arrives_whole(port: int, application: EchoApplication, size: int) -> None:
    body = bytes(index % 251 for index in range(size))
    pieces = [body[at : at + 70_001] for at in range(0, size, 70_001)]
    chunks = [b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    head = _closing(POST) + b"Transfer-Encoding: chunked\r\n\r\n"
    received = await _exchange(port, head, *chunks, b"0\r\nX-Trailer: 1\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert application.requests[0].body == body


async def test_body_of_64_mib_arrives_whole(port: int, application: EchoApplication) -> None:
    body = b"0123456789abcdef" * 2**22
    received = await _exchange(port, _closing(POST) + b"Content-Length: %d\r\n\r\n" % len(body), body)
    assert b"POST /a 67108864" in received
    assert application.requests[0].body == body


@pytest.mark.parametrize(
    ("target", "path", "local"),
    [
        (b"/a?b=c", "/a", b"/a?b=c"),
        (b"/%7Ea/%2e", "/%7Ea/%2e", b"/%7Ea/%2e"),
        (b"http://host:1/a?b", "/a", b"/a?b"),
        (b"http://host", "/", b"/"),
        (b"*", "*", b"*"),
    ],
)
async def test_target_is_kept_and_its_path_is_not_decoded(
    port: int, application: EchoApplication, target: bytes, path: str, local: bytes
) -> None:
    await _exchange(port, b"OPTIONS " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    [request] = application.requests
    assert (request.head.method, request.head.path, request.head.target) == ("OPTIONS", path, local)


async def test_headers_are_kept_as_they_came(port: int, application: EchoApplication) -> None:
    await _exchange(port, _closing(GET).replace(b"\r\n\r\n", b"\r\nX-One: 1\r\nx-two:2 \r\nX-ONE: 3\r\n\r\n"))
    [request] = application.requests
    assert list(request.head.headers)[2:] == [(b"X-One", b"1"), (b"x-two", b"2 "), (b"X-ONE", b"3")]
    assert (request.head.header(b"x-one"), request.head.header(b"none")) == (b"1", None)


async def test_client_that_expects_continue_gets_it_unless_it_is_refused(
    port: int, application: EchoApplication
) -> None:
    expecting = b" HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /a" + expecting)
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"abc")
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert (await _exchange(port, b"POST /refused" + expecting)).startswith(b"HTTP/1.1 401 ")


async def test_head_request_is_answered_without_a_body(port: int) -> None:
    received = await _exchange(port, _closing(GET).replace(b"GET", b"HEAD"))
    assert b"Content-Length: 26\r\n" in received
    assert received.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(("keep", "header"), [(b"", b"Connection: close"), (b"Connection: keep-alive\r\n", b"keep-")])
async def test_http_1_0_client_is_kept_only_if_it_asks(port: int, keep: bytes, header: bytes) -> None:
    received = await _exchange(port, b"GET /a HTTP/1.0\r\n" + keep + b"\r\n", _closing(GET) if keep else b"")
    assert header in received
    assert received.count(b"GET /a 0") == (2 if keep else 1)


async def test_stream_comes_in_chunks_and_to_http_1_0_until_the_end(port: int) -> None:
    received = await _exchange(port, _closing(GET).replace(b"/a", b"/stream"))
    assert received.endswith(b"Connection: close\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    old = await _exchange(port, b"GET /stream HTTP/1.0\r\n\r\n")
    assert old.endswith(b"\r\n\r\nonetwo")
    assert b"chunked" not in old


async def test_2000_connections_at_once_are_all_answered(port: int, application: EchoApplication) -> None:
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2000)]
    for _, writer in connections:
        writer.write(GET.replace(b"/a", b"/hang"))
    await until(lambda: len(application.requests) == 2000)
    application.release.set()
    for reader, writer in connections:
        assert b"200 OK" in await reader.readuntil(b"hung")
        writer.close()


# --- Invalid clients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET /a\r\n\r\n",
        b"GET /a HTTP/2.0\r\nHost: x\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nA: b\x00\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nA: b\r\n folded\r\n\r\n",
        b"GET /a HTTP/1.1\nHost: x\n\n",
        b"GET /\xe9 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /a HTTP/1.1\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        POST + b"Content-Length: x\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        *(POST + b"Content-Length: %b\r\n\r\n" % length for length in (b"+5", b"0x5", b"5, 5", b"5 5", b"", b"9" * 30)),
        *(
            POST + b"Transfer-Encoding%b\r\n\r\n5\r\nhello\r\n0\r\n\r\n" % coding
            for coding in (
                *(b": xchunked", b": chunked, identity", b": \x0bchunked", b" : chunked", b": chunked\r\n x", b":"),
                b": identity\r\nTransfer-Encoding: chunked",
            )
        ),
        *(
            POST + b"Transfer-Encoding: chunked\r\n\r\n%b\r\nhello\r\n0\r\n\r\n" % size
            for size in (b"-5", b"+5", b"0x5", b"5 5", b"", b"5\n", b"f" * 17, b"5;a\x00")
        ),
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + GET,
        b"GET /a HTTP/1.1\r\nHost: x\r\n\rA: b\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /a HTTP/1.1 x\r\nHost: x\r\n\r\n",
        b"\x00GET /a HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + b"Transfer-Encoding: gzip\r\n\r\n",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 40 + b"\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nA: " + b"b" * 2 * MAX_HEAD_BYTES,
    ],
)
async def test_malformed_request_is_answered_400_and_the_connection_closed(
    port: int, application: EchoApplication, request_bytes: bytes
) -> None:
    received = await _exchange(port, *(request_bytes[at : at + 30_000] for at in range(0, len(request_bytes), 30_000)))
    assert received.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert received.count(b"HTTP/1.1 ") == 1
    assert application.requests == []


@pytest.mark.parametrize("size", [70_000, 300_000, 10_000_000])
@pytest.mark.parametrize("piece_bytes", [1_000, 10**8])
async def test_head_that_is_too_large_is_answered_431(port: int, size: int, piece_bytes: int) -> None:
    head = b"GET /a HTTP/1.1\r\nHost: x\r\nA: " + b"a" * size + b"\r\n\r\n"
    many = b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"A: 12345\r\n" * (size // 10) + b"\r\n"
    for request in (head, many):
        received = await _exchange(
            port, *(request[at : at + piece_bytes] for at in range(0, len(request), piece_bytes))
        )
        assert received.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("first_bytes", [10, 40_000, 60_000])
async def test_head_is_measured_over_all_the_pieces_it_comes_in(first_bytes: int) -> None:
    turns: list[Turn] = []
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for size in (60_000, 70_000):
        head = b"GET /a HTTP/1.1\r\nHost: x\r\nA: " + b"a" * size + b"\r\n\r\n"
        reader = RequestReader(Bounds(10**6), gone=gone, refuse=lambda _: None, take=turns.append)
        body = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 90000\r\n\r\n" + b"b" * 90_000
        reader.feed(body + head[:first_bytes])
        reader.feed(head[first_bytes:])
    assert [None if turn.reply is None else turn.reply.status for turn in turns] == [None, None, None, 431]


@pytest.mark.parametrize("framing", [b"Content-Length: 1001\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n"])
async def test_body_that_is_too_large_is_answered_413(application: EchoApplication, framing: bytes) -> None:
    async with _listening(application, Bounds(1000)) as port:
        assert (await _exchange(port, POST + framing, b"a" * 1001)).startswith(b"HTTP/1.1 413 ")
        fitting = b"Content-Length: 1000\r\n\r\n" + b"a" * 1000
        assert (await _exchange(port, _closing(POST) + fitting)).startswith(b"HTTP/1.1 200 ")
    assert len(application.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 600\r\n\r\n" + b"a" * 600,
        b"Transfer-Encoding: chunked\r\n\r\n258\r\n" + b"a" * 600 + b"\r\n0\r\n\r\n",
    ],
    ids=["length", "chunks"],
)
async def test_bodies_of_all_connections_share_a_memory_limit(application: EchoApplication, body: bytes) -> None:
    bounds = Bounds(1000, room=BodyRoom(1000))
    async with _listening(application, bounds) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST.replace(b"/a", b"/hang") + body)
        await until(lambda: len(application.requests) == 1)
        refused = await _exchange(port, POST + body)
        assert refused.startswith(b"HTTP/1.1 429 ") and b"Retry-After: 1\r\n" in refused
        assert (await _exchange(port, _closing(GET))).startswith(b"HTTP/1.1 200 ")
        application.release.set()
        await until(lambda: bounds.room.free == 1000)
        assert (await _exchange(port, _closing(POST) + body)).startswith(b"HTTP/1.1 200 ")
        writer.close()
        _, leaving = await asyncio.open_connection("127.0.0.1", port)
        leaving.write(POST + body[:-50])
        await until(lambda: bounds.room.free < 1000)
        leaving.close()
        await until(lambda: bounds.room.free == 1000)


async def test_body_takes_room_only_as_it_comes(application: EchoApplication) -> None:
    bounds = Bounds(1000, room=BodyRoom(1000))
    whole = b"Content-Length: 600\r\n\r\n" + b"a" * 600
    async with _listening(application, bounds) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + b"Content-Length: 1000\r\n\r\n" + b"a" * 300)
        await until(lambda: bounds.room.free == 700)
        assert (await _exchange(port, _closing(POST) + whole)).startswith(b"HTTP/1.1 200 ")
        _, hanging = await asyncio.open_connection("127.0.0.1", port)
        hanging.write(POST.replace(b"/a", b"/hang") + whole)
        await until(lambda: bounds.room.free == 100)
        writer.write(b"a" * 200)
        assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")
        assert bounds.room.free == 400
        writer.close()
        hanging.close()


async def test_refusal_comes_before_the_body_and_can_be_read_by_a_client_that_sends_it_all(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n")
    assert b"401" in await reader.readline()
    writer.close()

    def ask() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/refused", body=b"a" * 30_000_000)
        return connection.getresponse().status

    assert await asyncio.to_thread(ask) == 401


@pytest.mark.parametrize(
    "framing",
    [b"Content-Length: 900000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\ndbba0\r\n"],
    ids=["length", "chunks"],
)
async def test_body_of_a_refused_request_is_not_kept(application: EchoApplication, framing: bytes) -> None:
    bounds = Bounds(10**6, room=BodyRoom(1000))
    async with _listening(application, bounds) as port:
        refused = await _exchange(port, POST.replace(b"/a", b"/refused") + framing, *[b"a" * 10_000] * 50)
        assert refused.startswith(b"HTTP/1.1 401 ")
    assert (bounds.room.free, len(application.refused), application.requests) == (1000, 1, [])


async def test_refused_request_without_a_body_leaves_the_connection_open(port: int) -> None:
    received = await _exchange(port, GET.replace(b"/a", b"/refused"), _closing(GET))
    assert (received.count(b" 401 "), received.count(b" 200 ")) == (1, 1)


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
async def test_upgrade_is_not_obeyed(port: int, upgrade: bytes) -> None:
    request = GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: " + upgrade + b"\r\n\r\n")
    received = await _exchange(port, request + b"\x81\x85")
    assert (received.count(b"HTTP/1.1 200 OK"), received.count(b"HTTP/1.1")) == (1, 1)


@pytest.mark.parametrize(
    "body", [b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
async def test_body_of_a_request_for_an_upgrade_arrives(
    port: int, application: EchoApplication, body: bytes, piece_bytes: int
) -> None:
    stream = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + body + _closing(GET)
    received = await _exchange(port, *(stream[at : at + piece_bytes] for at in range(0, len(stream), piece_bytes)))
    assert [request.body for request in application.requests] == [b"hello", b""]
    assert received.count(b"HTTP/1.1 200 OK") == 2


# --- Slow and disconnected clients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [b"G", b"GET /a HTTP/1.1\r\nHost: x\r\n", POST + b"Content-Length: 3\r\n\r\nab"])
async def test_request_that_does_not_come_whole_is_answered_408(application: EchoApplication, part: bytes) -> None:
    async with _listening(application, Bounds(1000, head_timeout_seconds=0.1)) as port:
        received = await _exchange(port, part)
    assert received.startswith(b"HTTP/1.1 408 ")
    assert application.requests == []


async def test_1500_slow_connections_hold_no_request_up_and_end(application: EchoApplication) -> None:
    async with _listening(application, Bounds(1000, head_timeout_seconds=5)) as port:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(1500)]
        for _, writer in slow:
            writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\nA: ")
        assert (await _exchange(port, _closing(GET))).startswith(b"HTTP/1.1 200 ")
        for reader, writer in slow:  # no further writes: a closed connection would answer them with a reset
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()
        assert (await _exchange(port, _closing(GET))).startswith(b"HTTP/1.1 200 ")
    assert len(application.requests) == 2


@pytest.mark.parametrize("first", [b"", GET])
async def test_connection_without_a_request_is_closed_in_time(application: EchoApplication, first: bytes) -> None:
    async with _listening(application, Bounds(1000, head_timeout_seconds=0.1, idle_timeout_seconds=0.1)) as port:
        assert (await _exchange(port, first)).count(b"HTTP/1.1") == (1 if first else 0)


async def test_client_that_leaves_cancels_its_request(port: int, application: EchoApplication) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET.replace(b"/a", b"/hang"))
    await until(lambda: len(application.requests) == 1)
    assert not application.requests[0].gone.done()
    writer.close()
    await until(lambda: application.cancelled == 1)
    assert application.requests[0].gone.done()


async def test_stream_to_a_client_that_does_not_read_waits_and_ends(application: EchoApplication) -> None:
    async with _listening(application, Bounds(1000, idle_timeout_seconds=0.2)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"/a", b"/endless"))
        await until(lambda: application.cancelled == 1)
        assert application.written < 2**25
        assert not reader.at_eof()
        writer.close()


async def test_large_answer_to_a_client_that_takes_nothing_ends(application: EchoApplication) -> None:
    bounds = Bounds(1000, idle_timeout_seconds=0.2)
    size = bounds.room.free
    async with _listening(application, bounds) as port:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(GET.replace(b"/a", b"/large"))
        await until(lambda: len(application.requests) == 1)
        assert bounds.room.free == size - 2**25 + PART_BYTES
        await until(lambda: application.requests[0].gone.done())
        sock.close()
        assert bounds.room.free == size


async def test_large_answer_holds_room_until_its_client_has_taken_it(application: EchoApplication) -> None:
    bounds = Bounds(1000, idle_timeout_seconds=60)
    size = bounds.room.free
    async with _listening(application, bounds) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"/a", b"/large"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert bounds.room.free < size and b"Content-Length: %d\r\n" % 2**25 in head
        assert (await _exchange(port, _closing(GET))).startswith(b"HTTP/1.1 200 ")
        assert await reader.readexactly(2**25) == b"x" * 2**25
        await until(lambda: bounds.room.free == size)
        writer.write(_closing(GET))
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


# --- Failures while answering -----------------------------------------------------------------------------------------


async def test_application_that_fails_is_answered_500_and_not_quoted(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    received = await _exchange(port, b"POST /fail HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nsecret")
    assert received.startswith(b"HTTP/1.1 500 ")
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("value", [b"a\r\nSet-Cookie: b", b"a\nb", b"a\r", b"a\0"])
async def test_header_that_would_end_its_line_is_not_sent(port: int, value: bytes) -> None:
    length = b"Content-Length: %d\r\n\r\n" % len(value)
    received = await _exchange(port, b"POST /split HTTP/1.1\r\nHost: x\r\n" + length + value)
    assert received.startswith(b"HTTP/1.1 500 ")
    assert b"Set-Cookie" not in received and b"200" not in received


async def test_stream_that_fails_has_no_end(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET.replace(b"/a", b"/half"))
    received = b""
    try:
        received = await reader.read(1000)
        received += await reader.read(1000)
    except ConnectionResetError:
        pass
    assert b"0\r\n\r\n" not in received
    writer.close()


async def test_listener_that_closes_finishes_what_is_answered_in_time_and_cancels_the_rest() -> None:
    application = EchoApplication()
    listener, listening = Listener(application, bounds=BOUNDS), standing_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    await listener.start(listening)
    idle_reader, idle = await asyncio.open_connection("127.0.0.1", port)
    idle.write(GET)
    await idle_reader.readuntil(b"\r\n\r\n")
    hanging = asyncio.create_task(_exchange(port, GET.replace(b"/a", b"/hang")))
    await until(lambda: len(application.requests) == 2)
    closing = asyncio.create_task(listener.close(10))
    await idle_reader.read()
    application.release.set()
    await closing
    assert (await hanging).endswith(b"hung")
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


# --- Arbitrary bytes --------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(awkward_streams())
def test_any_bytes_are_answered_like_http_or_not_at_all(pieces: list[bytes]) -> None:
    check_conversation(pieces)
