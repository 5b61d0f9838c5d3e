"""The proxy's connections to replicas: kept alive, each for a single request at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pools.protocol import NO_KEYS, EngineKeys
from pools.proxy.connections.engine_connection import EngineConnection, Origin, message_of
from pools.proxy.connections.messages import Header
from pools.proxy.connections.room import AnswerShare, BodyRoom

STREAM_BUFFER_BYTES = 2**20
KEPT_BYTES = 8 * 2**20
"""Largest streamed answer that is kept in memory."""
_EVENT_STREAM = b"text/event-stream"


class Lost(Exception):
    """No connection to the replica, or a connection that broke before the answer was complete."""


class NotConnected(Lost):
    """No connection could be made in time: the replica has not received the request."""


class TakenAway(Lost):
    """The proxy ended the call, since the replica is silent or reports the death of its engine."""


class TimedOut(Exception):
    """No answer within the engine's time limit."""


class _Stale(Lost):
    """A reused connection that the engine closed before it had read the request."""


@dataclass(slots=True, eq=False)
class Call:
    """A request to a replica, and the answer received so far. Created by `Upstream.call`.

    `status`, `headers` (without those of the connection) and `content_type` are set once `ask` has returned. Always
    close it: this abandons an incomplete answer and ends the engine's work on it.
    """

    _upstream: Upstream
    origin: Origin
    _patience: float
    _share: AnswerShare
    status: int = 0
    headers: list[Header] = field(default_factory=list)
    content_type: bytes = b""
    is_stream: bool = False
    deadline: float = math.inf
    _wants_stream: bool = False
    _connection: EngineConnection | None = None
    _connecting: asyncio.Timeout | None = None
    _chunks: list[bytes] = field(default_factory=list)
    _buffered: int = 0
    _held: int = 0
    _waits_for_room: bool = False
    _whole: bool = False
    _error: Exception | None = None
    _waiter: asyncio.Future[None] | None = None

    async def ask(
        self, method: bytes, target: bytes, *, headers: Sequence[Header] = (), body: bytes = b"", stream: bool = False
    ) -> None:
        """Sends the request; returns when the answer is complete, or, with `stream`, when a stream of events has begun.

        `target` must be in `ENGINE_TARGETS`.

        Raises:
            Lost: there is no connection, or it broke.
            TimedOut: the replica took too long.
        """
        origin = self.origin
        message = message_of(origin, method, target, headers, body)
        self._wants_stream = stream
        self._upstream.calls.add(self)
        connection = origin.take()
        if connection is not None:
            try:
                await self._exchange(connection, message)
                return
            except _Stale:
                self._error = None
        await self._exchange(await self._connect(origin), message)

    @property
    def body(self) -> bytes:
        if len(self._chunks) != 1:
            self._chunks = [b"".join(self._chunks)]  # joined in place: the pieces would take as much memory again
        return self._chunks[0]

    async def read(self) -> bytes:
        """Returns the part of a stream received since the last call; empty at its end.

        Raises:
            Lost: the connection broke.
            TimedOut: no bytes arrived for too long.
        """
        while True:
            if self._chunks:
                data = self.body
                self._chunks = []
                self._buffered = 0
                self.deadline = math.inf
                self._go_on()
                return data
            if self._error is not None:
                raise self._error
            if self._whole:
                return b""
            self.deadline = self.origin.loop.time() + self._patience
            await self._news()

    def lose(self) -> None:
        """Ends the call for a silent or dead replica; it raises `TakenAway`."""
        self._fail(TakenAway())

    def close(self) -> None:
        self._upstream.calls.discard(self)
        if self._connection is not None:
            self._connection.abandon()
            self._connection = None

    async def _exchange(self, connection: EngineConnection, message: Sequence[bytes]) -> None:
        if self._error is not None:
            connection.drop()
            raise self._error
        self._connection = connection
        self.deadline = self.origin.loop.time() + self._patience
        connection.send(self, message)
        while self._error is None and not self._whole and not (self.is_stream and self._chunks):
            await self._news()
        if self._error is not None:
            raise self._error

    async def _news(self) -> None:
        self._waiter = self.origin.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def _connect(self, origin: Origin) -> EngineConnection:
        self.deadline = origin.loop.time() + min(self._upstream.connect_timeout_seconds, self._patience)
        try:
            if "\0" in origin.host:
                raise ValueError("a host name with a NUL: uvloop would look up only the part before it")
            async with asyncio.timeout(None) as self._connecting:  # ended by `_fail`
                _, connection = await origin.loop.create_connection(
                    lambda: EngineConnection(origin), origin.host, origin.port, ssl=origin.tls
                )
                return connection
        except (OSError, ValueError) as error:  # OSError includes TimeoutError; ValueError is an impossible host name
            raise self._error or NotConnected() from error
        finally:
            self._connecting = None

    # --- Callbacks of its connection and of the upstream -------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        if self._error is not None or self._whole:
            return
        self._error = error
        if self._connecting is not None:
            self._connecting.reschedule(self.origin.loop.time())
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def begun(self, status: int, headers: list[Header], content_type: bytes) -> None:
        self.status, self.headers, self.content_type = status, headers, content_type
        self.is_stream = (
            self._wants_stream and status == 200 and content_type.partition(b";")[0].strip().lower() == _EVENT_STREAM
        )

    def got(self, data: bytes) -> None:
        self._chunks.append(data)
        self._buffered += len(data)
        self._held += len(data)

    def arrived(self) -> bool:
        """Wakes the reader of a stream; returns True if the connection may go on reading."""
        if self.is_stream and self._chunks:
            self._wake()
        return self._may_go_on()

    def _may_go_on(self) -> bool:
        blocked = self.is_stream and self._buffered >= STREAM_BUFFER_BYTES
        held = min(self._held, KEPT_BYTES) if self.is_stream else self._held
        has_room = self._share.hold(held, self._go_on, blocked=blocked)
        self._waits_for_room = not (has_room or blocked)
        return has_room and not blocked

    def _go_on(self) -> None:
        if self._connection is not None and self._may_go_on():
            self._connection.resume()

    def complete(self) -> None:
        self._whole = True
        self._connection = None
        self._share.complete()
        self.deadline = math.inf
        self._wake()

    def broke(self, *, stale: bool) -> None:
        self._connection = None
        self._fail(_Stale() if stale else Lost())

    def look_at(self, now: float, *, stalled_seconds: float) -> None:
        """Fails the call after its deadline; time in which this process read nothing does not count."""
        self.deadline += stalled_seconds
        if self._waits_for_room:  # no time-out: the proxy itself stopped reading
            self.deadline = max(self.deadline, now + self._patience)
        if now >= self.deadline:
            self._fail(TimedOut() if self._connecting is None else NotConnected())


class Upstream:
    """Creates calls to replicas. Use from a single loop; close it at the end.

    Args:
        connect_timeout_seconds: time limit for a host to accept a connection.
        idle_seconds: time that idle connections are kept; less than engines keep them.
        look_seconds: interval of the checks for time-outs, and so their largest delay.
    """

    def __init__(self, *, connect_timeout_seconds: float, idle_seconds: float = 4.0, look_seconds: float = 1.0) -> None:
        self.connect_timeout_seconds = connect_timeout_seconds
        self.calls: set[Call] = set()
        self._loop = asyncio.get_running_loop()
        self._idle_seconds = idle_seconds
        self._look_seconds = look_seconds
        self._origins: dict[tuple[str, EngineKeys], Origin] = {}
        self._due = self._loop.time() + look_seconds  # uvloop's handle of a delay below 1 ms has no `when`
        self._timer = self._loop.call_later(look_seconds, self._look_around)

    def call(
        self, url: str, *, patience_seconds: float, keys: EngineKeys = NO_KEYS, share: AnswerShare | None = None
    ) -> Call:
        """Returns a call to the replica at an address such as http://127.0.0.1:8001, without a path.

        `patience_seconds` is the time limit for the answer, or for the next piece of a stream. Bytes of the answer
        count in `share`, if given.
        """
        origin = self._origins.get((url, keys))
        if origin is None:
            origin = self._origins[url, keys] = Origin(url, self._loop, self._idle_seconds, keys)
        return Call(self, origin, patience_seconds, share or AnswerShare(BodyRoom()))

    def close(self) -> None:
        self._timer.cancel()
        for call in tuple(self.calls):
            call.lose()
        for origin in self._origins.values():
            origin.close_idle(math.inf)

    def _look_around(self) -> None:
        now = self._loop.time()
        stalled = max(0.0, now - self._due)
        for call in tuple(self.calls):
            call.look_at(now, stalled_seconds=stalled)
        in_use = {call.origin for call in self.calls}  # a call may still be connecting
        for where, origin in tuple(self._origins.items()):
            origin.close_idle(now)
            if not origin.connections and origin not in in_use:
                del self._origins[where]
        self._due = now + self._look_seconds
        self._timer = self._loop.call_later(self._look_seconds, self._look_around)
