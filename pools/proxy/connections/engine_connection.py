"""Connections to a replica: each carries a single request at a time, and parses its answer."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from pools.protocol import NO_KEYS, EngineKeys
from pools.proxy.connections.messages import HOP_BY_HOP, Header

ENGINE_TARGETS = frozenset(
    {
        *(b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/inference/v1/generate"),
        *(b"/tokenize", b"/health", b"/metrics"),
    }
)
"""The only paths that the proxy requests from engines; other paths are reserved for the engine's own agent."""
MAX_HEAD_BYTES = 64 * 2**10
STALE_SECONDS = 1.0
"""Time in which a reused connection that the engine was closing breaks: a round trip at most."""
_JOINED_BYTES = 64 * 2**10  # copying less than this costs less than a second buffer


class _Stop(Exception):
    """Ends the parsing of an answer from within the parser."""


class Receiver(Protocol):
    """Receives the answer that a connection reads: its head without the connection's headers, then pieces of its body.

    `arrived` follows each read, and returns True to go on reading. After `complete` the connection is used for other
    requests; `broke` is stale if the engine had closed the connection unread.
    """

    def begun(self, status: int, headers: list[Header], content_type: bytes) -> None: ...
    def got(self, data: bytes) -> None: ...
    def arrived(self) -> bool: ...
    def complete(self) -> None: ...
    def broke(self, *, stale: bool) -> None: ...


class Origin:
    """An engine's address with its keys, and the open connections to it."""

    def __init__(
        self, url: str, loop: asyncio.AbstractEventLoop, idle_seconds: float, keys: EngineKeys = NO_KEYS
    ) -> None:
        parts = urlsplit(url)
        self.loop = loop
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host_line = b"Host: %b\r\n" % parts.netloc.rpartition("@")[2].encode()
        self.key_line = f"Authorization: Bearer {keys.engine}\r\n".encode() if keys.engine else b""
        self.first_line = f"{keys.ingress}\n".encode() if keys.ingress else b""
        self.idle: list[EngineConnection] = []
        self.connections: set[EngineConnection] = set()
        self._idle_seconds = idle_seconds

    def take(self) -> EngineConnection | None:
        """Returns the most recently used connection that is still usable, or None."""
        oldest = self.loop.time() - self._idle_seconds
        while self.idle:
            connection = self.idle.pop()
            if connection.idle_since > oldest and connection.is_open:
                return connection
            connection.drop()
        return None

    def close_idle(self, now: float) -> None:
        """Closes connections that were idle for too long."""
        while self.idle and self.idle[0].idle_since <= now - self._idle_seconds:
            self.idle.pop(0).drop()


class EngineConnection(asyncio.Protocol):
    """A connection to a replica, and the parser of its answers."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._call: Receiver | None = None
        self._silent = self._reused = self._paused = self._keep_alive = False
        self._asked = 0.0
        self.idle_since = 0.0
        self._reset()

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def send(self, call: Receiver, message: Sequence[bytes]) -> None:
        """Sends a request for a call; the call breaks at once if the engine has hung up meanwhile."""
        if not self.is_open:  # the call would never end, and uvloop raises an error
            call.broke(stale=False)
            return
        self._call = call
        self._silent = True
        self._asked = self._origin.loop.time()
        self._reset()
        if len(message) == 1:
            self._transport.write(message[0])
        else:
            self._transport.writelines(message)

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def abandon(self) -> None:
        """Aborts the connection during an answer, so that the engine stops working on it."""
        self._call = None
        self._transport.abort()

    def drop(self) -> None:
        self._transport.close()

    # --- Callbacks of the event loop ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._origin.connections.add(self)
        if self._origin.first_line:
            self._transport.write(self._origin.first_line)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the open answer: it is complete if the end of the connection marks its end."""
        origin, call = self._origin, self._call
        origin.connections.discard(self)
        if call is None:
            if self in origin.idle:
                origin.idle.remove(self)
            return
        self._call = None
        if exc is None and self._until_eof:
            call.complete()
            return
        stale = self._reused and self._silent and origin.loop.time() - self._asked < STALE_SECONDS
        call.broke(stale=stale)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            self._transport.abort()  # no request is open
            return
        self._silent = False
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(error.__context__, _Stop):
                raise
            if not self._complete:
                self._malformed(call)
                return
            self._transport.abort()  # it sends more than an answer; the answer is complete nevertheless
        if self._complete:
            self._release(call)
        elif self._in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._malformed(call)
        elif not call.arrived():
            self._paused = True
            self._transport.pause_reading()

    def _release(self, call: Receiver) -> None:
        self._call = None
        usable = self._keep_alive and not self._transport.is_closing()
        if usable and self._transport.get_write_buffer_size() == 0:  # else it answered before it had read everything
            self._reused = True
            self.idle_since = self._origin.loop.time()
            self._origin.idle.append(self)
        else:
            self._transport.close()
        call.complete()

    def _malformed(self, call: Receiver) -> None:
        self._call = None
        self._transport.abort()
        call.broke(stale=False)

    def _reset(self) -> None:
        self._headers: list[Header] = []
        self._in_head = True
        self._interim = self._until_eof = self._complete = False
        self._head_bytes = 0
        self._length = self._coding = self._content_type = b""

    # --- Callbacks of the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            raise _Stop

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return
        lower = name.lower()
        if lower not in HOP_BY_HOP:
            self._headers.append((name, value))
            if lower == b"content-type":
                self._content_type = value
        elif lower == b"content-length":
            self._length = value
        elif lower == b"transfer-encoding":
            self._coding = value

    def on_headers_complete(self) -> None:
        call = self._call
        status = self._parser.get_status_code()
        if call is None or (self._coding and self._coding.lower() != b"chunked"):
            raise _Stop
        self._in_head = False
        self._interim = status < 200
        if not self._interim:
            self._until_eof = not self._length and not self._coding and status not in (204, 304)
            call.begun(status, self._headers, self._content_type)

    def on_body(self, body: bytes) -> None:
        if self._call is not None:
            self._call.got(body)

    def on_message_complete(self) -> None:
        if self._interim:
            self._reset()
        else:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()


def message_of(
    origin: Origin, method: bytes, target: bytes, headers: Sequence[Header], body: bytes
) -> tuple[bytes, ...]:
    """Returns the bytes of a request: a single piece, or a head and a large body."""
    if target not in ENGINE_TARGETS:
        raise ValueError("no request of the proxy goes to that path of an engine")
    lines = [b"%b %b HTTP/1.1\r\n" % (method, target), origin.host_line, origin.key_line]
    lines += [b"%b: %b\r\n" % header for header in headers]
    if body or method != b"GET":
        lines.append(b"Content-Length: %d\r\n" % len(body))
    lines.append(b"\r\n")
    if len(body) <= _JOINED_BYTES:
        lines.append(body)
        return (b"".join(lines),)
    return b"".join(lines), body
