"""Reads requests from the bytes of a connection: HTTP/1.1, within bounds, with errors reported at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

from pools.proxy.connections.messages import Head, Header, Refusal, Reply, Request, no_room
from pools.proxy.connections.room import AnswerShare, BodyRoom

MAX_HEAD_BYTES = 64 * 2**10

BETWEEN, HEAD, BODY, NOTHING = range(4)
"""Part of a request that the next byte belongs to; NOTHING if the connection reads no more."""

_MALFORMED = Refusal(400, "The request is not well-formed HTTP/1.1.")
_HEAD_TOO_LARGE = Refusal(431, f"The request line and headers are larger than {MAX_HEAD_BYTES} bytes.")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a connection."""

    max_body_bytes: int
    head_timeout_seconds: float = 30.0
    """Time limit for a client to send the headers, and then each piece of the body."""
    idle_timeout_seconds: float = 75.0
    """Time limit of silence between requests, and of a client that takes nothing of its answer."""
    room: BodyRoom = field(default_factory=BodyRoom)
    """Shared by all connections."""


@dataclass(slots=True)
class Turn:
    """A request in the order of its connection: complete, or refused with a reply."""

    request: Request | None
    reply: Reply | None
    keep_alive: bool
    takes_body: bool = True
    old: bool = False
    """True for HTTP/1.0: no chunks, and the connection closes unless the request keeps it alive."""
    linger: bool = False
    """The client may still be sending: it gets time to read the reply before the connection closes."""
    begun: bool = False
    ended: bool = False
    body: bytes = b""
    """Body of a large answer, of which the first piece is written."""
    room_bytes: int = 0
    """Bytes of the room that its body takes until the turn ends."""


class _Stop(Exception):
    """Ends the parsing of a connection from within the parser."""


class RequestReader:
    """Parses the bytes of a connection into turns, and calls `take` with each, in order.

    `state` is the part that the next byte belongs to, `moved` is True if the last bytes began a request or belonged to
    a body, and `owes_continue` is True if the client waits for a 100 Continue. `refuse` returns an answer that can be
    given before the body is read, or None.
    """

    def __init__(
        self,
        bounds: Bounds,
        *,
        gone: asyncio.Future[None],
        refuse: Callable[[Head], Reply | None],
        take: Callable[[Turn], None],
    ) -> None:
        self._max_body_bytes = bounds.max_body_bytes
        self._room = bounds.room
        self._gone = gone
        self._refusal_of = refuse
        self._take = take
        self._parser = httptools.HttpRequestParser(self)
        self._body = bytearray()  # not a list: a body may arrive in pieces of 1 byte
        self._head: Head
        self._refused: Reply | None = None
        self._piece_bytes = self._begun_in_bytes = self._head_bytes = self._quiet_bytes = self._room_bytes = 0
        self._old = self._keep_alive = self._resuming = False
        self._framing: bytes | None = None
        self.state = BETWEEN
        self.moved = False
        self.owes_continue = False

    def feed(self, data: bytes) -> None:
        """Parses received bytes; an error becomes a refusal as a turn."""
        before = self.state
        self.moved = False
        self._piece_bytes = len(data)
        if before == HEAD:
            self._head_bytes += len(data)
        self._parse(data)
        if self.state == HEAD and not self.moved and self._head_bytes - self._begun_in_bytes > MAX_HEAD_BYTES:
            self.refuse(_HEAD_TOO_LARGE)
        elif self.state == BODY and before == BODY and not self.moved:  # endless chunk lengths or trailers
            self._quiet_bytes += len(data)
            if self._quiet_bytes > MAX_HEAD_BYTES:
                self.refuse(_MALFORMED)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
            return
        except httptools.HttpParserUpgrade as upgrade:
            end = upgrade.args[0]
        except httptools.HttpParserError as error:
            if isinstance(error, httptools.HttpParserCallbackError) and not isinstance(error.__context__, _Stop):
                raise
            self.refuse(_MALFORMED)
            return
        self._ignore_upgrade(data[end:])

    def _ignore_upgrade(self, rest: bytes) -> None:
        if self._framing is None:  # there is no body: the request was taken as usual
            self.stop()
            return
        self._parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + self._framing + b"\r\n\r\n")
        self._resuming = False
        self._framing = None
        self._parse(rest)

    def refuse(self, why: Refusal | Reply) -> None:
        """Takes an error as a turn, and stops reading."""
        if self.state == NOTHING:
            return
        self.stop()
        reply = why.reply() if isinstance(why, Refusal) else why
        self._take(Turn(None, reply, keep_alive=False, linger=True))

    def stop(self) -> None:
        self.state = NOTHING
        self.owes_continue = False
        self._body = bytearray()
        self._room.give_back(self._room_bytes)
        self._room_bytes = 0

    # --- Callbacks of the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.state == NOTHING:
            raise _Stop
        if self._resuming:
            return
        self.state = HEAD
        self.moved = True
        self._target = b""
        self._headers: list[Header] = []
        self._first: dict[bytes, bytes] = {}
        self._two_hosts = False
        self._head_bytes = self._begun_in_bytes = (
            self._piece_bytes
        )  # more than the head's bytes, after an earlier request

    def on_url(self, url: bytes) -> None:
        if self.state == HEAD:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.state == HEAD:
            self._headers.append((name, value))
            lower = name.lower()
            if lower not in self._first:
                self._first[lower] = value
            elif lower == b"host":
                self._two_hosts = True

    def on_headers_complete(self) -> None:
        if self._resuming:
            return
        first, version = self._first, self._parser.get_http_version()
        coding = first.get(b"transfer-encoding")
        if self._head_bytes > MAX_HEAD_BYTES and self._size_of_head() > MAX_HEAD_BYTES:
            self.refuse(_HEAD_TOO_LARGE)
            raise _Stop
        if (
            version not in ("1.1", "1.0")
            or (coding is not None and coding.lower() != b"chunked")
            or self._two_hosts
            or (b"host" not in first and version == "1.1")
        ):
            self.refuse(_MALFORMED)
            raise _Stop
        self.state = BODY
        self._old = version == "1.0"
        self._body = bytearray()
        self._quiet_bytes = 0
        method, target = self._parser.get_method().decode("ascii"), _local(self._target)
        path = target.partition(b"?")[0].decode("latin-1")
        self._head = Head(method, path, target, self._headers, first)
        length = int(first.get(b"content-length", b"0"))
        self._refused = self._refusal_of(self._head)
        if self._refused is None and length > self._max_body_bytes:
            self._refused = self._too_large().reply()
        elif self._refused is None and length > self._room.free_for_requests:
            self._refused = no_room().reply()
        if self._refused is not None and (length or coding is not None):
            self.refuse(self._refused)
            raise _Stop
        self._keep_alive = self._parser.should_keep_alive()
        if self._parser.should_upgrade() and (length or coding is not None):
            self._framing = b"Content-Length: %d" % length if coding is None else b"Transfer-Encoding: chunked"
        self.owes_continue = first.get(b"expect", b"").lower() == b"100-continue" and self._refused is None

    def on_body(self, body: bytes) -> None:
        self._body += body
        self._room.free -= len(body)
        self._room_bytes += len(body)
        self._quiet_bytes = 0
        self.moved = True
        if len(self._body) > self._max_body_bytes:
            self.refuse(self._too_large())
            raise _Stop
        if self._room.free_for_requests < 0:
            self.refuse(no_room())
            raise _Stop

    def on_message_complete(self) -> None:
        if self._framing is not None:
            return
        request = None
        if self._refused is None:
            request = Request(self._head, bytes(self._body), self._gone, AnswerShare(self._room))
        keep_alive = self._keep_alive and not self._parser.should_upgrade()
        turn = Turn(request, self._refused, keep_alive, self._head.method != "HEAD", self._old)
        turn.room_bytes, self._room_bytes = self._room_bytes, 0
        self._body = bytearray()
        self.owes_continue = False
        self.state = BETWEEN if keep_alive else NOTHING
        self._take(turn)

    def _size_of_head(self) -> int:
        return len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def _too_large(self) -> Refusal:
        return Refusal(413, f"The body is larger than {self._max_body_bytes} bytes.")


def _local(target: bytes) -> bytes:
    if target.startswith(b"/") or b"://" not in target:
        return target
    _, slash, rest = target.partition(b"://")[2].partition(b"/")
    return slash + rest or b"/"
