"""The proxy's listener and its side of client connections: HTTP/1.1 in, complete replies or streams out.

Requests are parsed as their bytes arrive and answered in order, each in its own task. An error in a request is answered
as soon as it is detected, before the body is read; the connection then ends, after a pause in which the client can read
the answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import traceback
from collections import deque
from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

from pools.proxy.connections.messages import Application, ClientGone, Header, Refusal, Reply, Request
from pools.proxy.connections.reading import BETWEEN, BODY, HEAD, NOTHING, Bounds, RequestReader, Turn

_BACKLOG = 4096
LINGER_SECONDS = 2.0
LINGER_BYTES = 64 * 2**20
_JOINED_BYTES = 64 * 2**10  # copying less than this costs less than a second buffer
_CLOSING_POLL_SECONDS = 0.01
_PIECE_BYTES = 256 * 2**10  # of a large answer, in a single turn of the loop

_log = logging.getLogger("assay.proxy")

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_BODILESS = frozenset({204, 304})


class ClientConnection(asyncio.Protocol):
    """A client's connection, and the responder of its current request. It adds and removes itself in `connections`."""

    def __init__(self, application: Application, *, bounds: Bounds, connections: set[ClientConnection]) -> None:
        self._application = application
        self._bounds = bounds
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._reader = RequestReader(bounds, gone=self._gone, refuse=application.refuse, take=self._take)
        self._transport: asyncio.Transport
        self._turns: deque[Turn] = deque()
        self._turn: Turn | None = None
        self.task: asyncio.Task[None] | None = None
        self._closed = False
        self._write_paused = self._read_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._unsent = 0
        self._deadline = self._loop.time() + bounds.head_timeout_seconds
        self._discarded = 0

    # --- Callbacks of the event loop ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the work on unanswered requests."""
        self._closed = True
        self._connections.discard(self)
        self._reader.stop()
        for turn in (self._turn, *self._turns):
            self._give_room_back(turn)
        self._turns.clear()
        if not self._gone.done():
            self._gone.set_result(None)
        if self.task is not None:
            self.task.cancel()

    def eof_received(self) -> bool:
        """Treats a client that sends no more as disconnected, as TCP cannot distinguish the two."""
        self._closed = True
        self._deadline = self._loop.time() + self._bounds.idle_timeout_seconds
        return False

    def pause_writing(self) -> None:
        self._write_paused = True
        self._unsent = self._transport.get_write_buffer_size()
        self._deadline = self._loop.time() + self._bounds.idle_timeout_seconds

    def resume_writing(self) -> None:
        self._write_paused = False
        self._deadline = self._next_deadline()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._advance()

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader.state == NOTHING:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES:
                self._transport.abort()
            return
        reader.feed(data)
        if reader.owes_continue:
            self._send_continue()
        if self._turns and not self._read_paused and not self._closed:
            self._read_paused = True
            self._transport.pause_reading()
        if reader.moved and self._turn is None and reader.state in (HEAD, BODY):
            self._deadline = self._next_deadline()

    def _take(self, turn: Turn) -> None:
        self._turns.append(turn)
        self._advance()

    # --- Answering ---------------------------------------------------------------------------------------------------

    def send(self, reply: Reply) -> None:
        turn = self._turn
        if self._closed or turn is None or turn.begun:
            return
        lines = _lines(reply.status, reply.headers)
        turn.begun = turn.ended = True
        body = reply.body
        if reply.status in _BODILESS:
            body = b""
        else:
            lines.append(b"Content-Length: %d\r\n" % len(body))
        if not turn.keep_alive:
            lines.append(b"Connection: close\r\n")
        elif turn.old:
            lines.append(b"Connection: keep-alive\r\n")
        lines.append(b"\r\n")
        if len(body) <= _JOINED_BYTES:
            if turn.takes_body:
                lines.append(body)
            self._transport.write(b"".join(lines))
        elif turn.takes_body:
            turn.body = body
            self._transport.writelines([b"".join(lines), body[:_PIECE_BYTES]])
        else:
            self._transport.writelines(lines)

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        """Starts a stream, in chunks except for HTTP/1.0."""
        turn = self._turn
        if self._closed or turn is None:
            return
        lines = _lines(status, headers)
        turn.begun = True
        if turn.old:
            turn.keep_alive = False
        else:
            lines.append(b"Transfer-Encoding: chunked\r\n")
        if not turn.keep_alive:
            lines.append(b"Connection: close\r\n")
        lines.append(b"\r\n")
        self._transport.write(b"".join(lines))

    async def write(self, chunk: bytes) -> None:
        turn = self._turn
        if self._closed or turn is None:
            raise ClientGone
        if chunk:
            self._transport.write(chunk if turn.old else b"%x\r\n%b\r\n" % (len(chunk), chunk))
        await self._drain()

    async def _drain(self) -> None:
        if self._write_paused:
            self._drained = self._loop.create_future()
            await self._drained

    def end(self) -> None:
        turn = self._turn
        if self._closed or turn is None or turn.ended:
            return
        turn.ended = True
        if not turn.old:
            self._transport.write(b"0\r\n\r\n")

    def _advance(self) -> None:
        while self._turns and self._turn is None and not self._write_paused and not self._closed:
            turn = self._turn = self._turns.popleft()
            if turn.reply is not None:
                self.send(turn.reply)
                self._end_turn(turn)
            elif turn.request is not None:
                self._deadline = math.inf
                self.task = self._loop.create_task(self._answer(turn.request))
        if self._read_paused and not self._turns and not self._closed:
            self._read_paused = False
            self._transport.resume_reading()

    async def _answer(self, request: Request) -> None:
        turn = self._turn
        assert turn is not None
        try:
            await self._application.answer(request, self)
        except Exception as error:  # noqa: BLE001 - the boundary: no text of a request may appear in a log
            (place,) = traceback.extract_tb(error.__traceback__, limit=-1)
            _log.error("%s at %s:%s", type(error).__name__, place.filename, place.lineno)
        for at in range(_PIECE_BYTES, len(turn.body), _PIECE_BYTES):
            await (self._drain() if self._write_paused else asyncio.sleep(0))
            if self._closed:
                break
            self._transport.write(turn.body[at : at + _PIECE_BYTES])
        self.task = None
        if self._closed:
            return
        if not turn.begun:
            turn.keep_alive = False
            self.send(Refusal(500, "The proxy failed to handle this request.").reply())
        elif not turn.ended:  # the client must not mistake half an answer for a complete answer
            self._transport.abort()
            return
        self._end_turn(turn)
        self._advance()

    def _give_room_back(self, turn: Turn | None) -> None:
        if turn is not None:
            self._bounds.room.give_back(turn.room_bytes)
            turn.room_bytes = 0
            if turn.request is not None:
                turn.request.share.end()

    def _end_turn(self, turn: Turn) -> None:
        self._turn = None
        self._give_room_back(turn)
        if turn.keep_alive:
            if not self._write_paused:
                self._deadline = self._next_deadline()
            if self._reader.owes_continue:
                self._send_continue()
        elif turn.linger:
            self._transport.write_eof()
            self._deadline = self._next_deadline()
        else:
            self._close()

    def _next_deadline(self) -> float:
        if self._turn is not None:
            return math.inf
        if self._reader.state == BETWEEN:
            return self._loop.time() + self._bounds.idle_timeout_seconds
        wait = LINGER_SECONDS if self._reader.state == NOTHING else self._bounds.head_timeout_seconds
        return self._loop.time() + wait

    def _send_continue(self) -> None:
        if self._turn is None and not self._turns and not self._closed:
            self._reader.owes_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # --- Ending ------------------------------------------------------------------------------------------------------

    def look_at(self, now: float, *, stalled_seconds: float = 0.0) -> None:
        """Ends the connection after its deadline; time in which this process read nothing does not count."""
        self._deadline += stalled_seconds
        if now < self._deadline:
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent < self._unsent:  # slow, but it progresses
            self._unsent = unsent
            self._deadline = now + self._bounds.idle_timeout_seconds
        elif unsent or self._closed or self._reader.state == NOTHING:
            self._transport.abort()
        elif self._reader.state == BETWEEN:
            self._close()
        else:
            self._reader.refuse(
                Refusal(408, f"The request was not whole after {self._bounds.head_timeout_seconds:g} s.")
            )

    def finish(self) -> None:
        """Closes the connection as soon as the received requests are answered."""
        self._reader.stop()
        if self._turn is None and not self._turns:
            self._close()
        for turn in (self._turn, *self._turns):
            if turn is not None:
                turn.keep_alive = False

    def abort(self) -> None:
        self._transport.abort()

    def _close(self) -> None:
        self._closed = True
        self._deadline = self._loop.time() + self._bounds.idle_timeout_seconds
        self._transport.close()


def _lines(status: int, headers: Sequence[Header]) -> list[bytes]:
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    lines += [b"%b: %b\r\n" % header for header in headers]
    head = b"".join(lines)
    if not head.count(b"\n") == head.count(b"\r") == len(lines) or b"\0" in head:
        raise ValueError("a header would end its line")  # a client would read the rest as headers, or as an answer
    return lines


def standing_socket(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes a free port. Takes a port in TIME_WAIT, which a killed proxy leaves."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


class Listener:
    """Accepts connections and passes their requests to an application. Use from a single loop."""

    def __init__(self, application: Application, *, bounds: Bounds) -> None:
        self._application = application
        self._bounds = bounds
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, listening: socket.socket) -> None:
        """Accepts the connections of a socket from now on, and closes it at the end."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, sock=listening, backlog=_BACKLOG)
        self._look_at_connections()

    async def close(self, grace_seconds: float) -> None:
        """Stops accepting, and closes every connection; open answers have `grace_seconds` to end."""
        if self._server is not None:
            self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_seconds
        for connection in tuple(self._connections):
            connection.finish()
        while self._connections and loop.time() < end:
            await asyncio.sleep(_CLOSING_POLL_SECONDS)
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        for connection in tuple(self._connections):
            connection.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connection(self) -> ClientConnection:
        return ClientConnection(self._application, bounds=self._bounds, connections=self._connections)

    def _look_at_connections(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        stalled = max(0.0, now - (self._timer.when() if self._timer is not None else now))
        for connection in tuple(self._connections):
            connection.look_at(now, stalled_seconds=stalled)
        pause = min(1.0, self._bounds.head_timeout_seconds / 4, self._bounds.idle_timeout_seconds / 4)
        self._timer = loop.call_later(pause, self._look_at_connections)
