"""Conversations of the proxy with clients that send arbitrary bytes, without sockets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import h11
from hypothesis import strategies as st

from fakes.wire import EchoApplication
from pools.proxy.connections.reading import Bounds
from pools.proxy.connections.room import BodyRoom
from pools.proxy.connections.wire import ClientConnection

_SPACES = re.compile(rb"\A([A-Z]+) +(\S+) +(?=HTTP/)")
_POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
_REQUESTS = [
    b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    _POST + b"Content-Length: 5\r\n\r\nhello",
    _POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    b"GET /stream HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n",
    b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    _POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nhello",
]
_TOKENS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b" ",
    b":",
    b"Content-Length: 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"0",
]

_changes = st.lists(
    st.tuples(st.integers(0, 400), st.integers(0, 12), st.one_of(st.sampled_from(_TOKENS), st.binary(max_size=4))),
    max_size=4,
)


@st.composite
def _changed_requests(draw: st.DrawFn) -> list[bytes]:
    stream = b"".join(draw(st.lists(st.sampled_from(_REQUESTS), min_size=1, max_size=4)))
    for at, length, replacement in draw(_changes):
        at %= len(stream) + 1
        stream = stream[:at] + replacement + stream[at + length :]
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def awkward_streams() -> st.SearchStrategy[list[bytes]]:
    """Returns streams in pieces: requests with some bytes changed, and random bytes."""
    return st.one_of(_changed_requests(), st.lists(st.binary(max_size=200), max_size=3))


def check_conversation(pieces: list[bytes]) -> None:
    """Asserts that replies are well-formed, and the connection closes and frees its room, for arbitrary bytes.

    No more requests may succeed than another parser finds.
    """
    bounds = Bounds(1000, head_timeout_seconds=1, room=BodyRoom(1500))
    statuses, closed = asyncio.run(converse(pieces, bounds=bounds))
    stream = b"".join(pieces)
    assert closed and bounds.room.free == 1500
    assert set(statuses) <= {200, 400, 401, 408, 413, 429, 431}
    assert sum(status == 200 for status in statuses) <= whole_requests(stream), stream


@dataclass
class RecordingTransport(asyncio.Transport):
    """Records the bytes that a connection writes; there is no peer."""

    sent: bytearray = field(default_factory=bytearray)
    closed: bool = False
    ended: bool = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed and not self.ended, "written after the end"
        self.sent += data

    def writelines(self, list_of_data: Sequence[bytes]) -> None:  # type: ignore[override]
        for data in list_of_data:
            self.write(data)

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


async def converse(pieces: Sequence[bytes], *, bounds: Bounds) -> tuple[list[int], bool]:
    """Returns the statuses of the replies, all well-formed HTTP, and if the connection closed; time-outs expire."""
    transport = RecordingTransport()
    connections: set[ClientConnection] = set()
    connection = ClientConnection(EchoApplication(), bounds=bounds, connections=connections)
    connection.connection_made(transport)
    for piece in pieces:
        if not transport.closed:
            connection.data_received(piece)
        for _ in range(3):  # a task starts, answers, and the next task gets its turn
            await asyncio.sleep(0)
    while connection.task is not None:
        await asyncio.sleep(0)
    later = asyncio.get_running_loop().time()
    for _ in range(3):
        later += bounds.head_timeout_seconds + bounds.idle_timeout_seconds
        if not transport.closed:
            connection.look_at(later)
    connection.connection_lost(None)
    return _statuses(bytes(transport.sent)), transport.closed


def whole_requests(stream: bytes) -> int:
    """Counts the requests that another parser finds in a stream of bytes before it is malformed or ends.

    Corrects what servers may accept and h11 refuses: empty lines before a request, and spaces in its first line.
    """
    count = 0
    while stream := _SPACES.sub(rb"\1 \2 ", stream.lstrip(b"\r\n")):
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=2**24)
        parser.receive_data(stream)
        try:
            event = parser.next_event()
            while not isinstance(event, h11.EndOfMessage):
                if not isinstance(event, h11.Request | h11.Data):
                    return count
                event = parser.next_event()
        except h11.RemoteProtocolError:
            return count
        count += 1
        stream = parser.trailing_data[0]
    return count


def _statuses(sent: bytes) -> list[int]:
    statuses: list[int] = []
    rest = sent
    while rest:
        head, end, rest = rest.partition(b"\r\n\r\n")
        assert end, head
        first, *lines = head.split(b"\r\n")
        assert first.startswith(b"HTTP/1.1 "), first
        status = int(first.split()[1])
        headers = dict(line.lower().split(b": ", 1) for line in lines)
        if status == 100:
            continue
        statuses.append(status)
        if headers.get(b"transfer-encoding") == b"chunked":
            size = 1
            while size:
                line, _, rest = rest.partition(b"\r\n")
                size = int(line, 16)
                assert rest[size : size + 2] == b"\r\n"
                rest = rest[size + 2 :]
        elif b"content-length" in headers:
            length = int(headers[b"content-length"])
            assert len(rest) >= length
            rest = rest[length:]
        else:
            assert headers[b"connection"] == b"close"  # the end of the connection is the end of the stream
            rest = b""
    return statuses
