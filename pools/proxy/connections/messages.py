"""Values that pass between the proxy's connections and its routes. No sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pools.proxy.connections.room import AnswerShare

Header = tuple[bytes, bytes]
"""Name and value as received, or to be sent."""


@dataclass(slots=True)
class Head:
    """Request line and headers, before the body has been read. `path` is as received, without the query."""

    method: str
    path: str
    target: bytes
    """Path and query as received."""
    headers: Sequence[Header]
    first: Mapping[bytes, bytes] = field(default_factory=dict)
    """First value of each header, by lower-case name; built from `headers` by default."""

    def __post_init__(self) -> None:
        if not self.first:
            self.first = {name.lower(): value for name, value in reversed(self.headers)}

    def header(self, name: bytes) -> bytes | None:
        """Returns the first header of that name (lower case), or None."""
        return self.first.get(name)


@dataclass(slots=True)
class Request:
    """A complete request. `gone` is done when its client has disconnected; `share` is its answer's part of the room."""

    head: Head
    body: bytes
    gone: asyncio.Future[None]
    share: AnswerShare


@dataclass(slots=True)
class Reply:
    """A complete answer. Length and connection headers are added when it is sent."""

    status: int
    body: bytes
    headers: Sequence[Header] = ((b"Content-Type", b"application/json"),)


class Responder(Protocol):
    """The client's end of a request: sends a complete reply, or a stream in pieces; nothing once the client is gone.

    `write` waits while the client is slow; `end` ends a stream cleanly for HTTP.
    """

    def send(self, reply: Reply) -> None: ...
    def begin(self, status: int, headers: Sequence[Header]) -> None: ...
    async def write(self, chunk: bytes) -> None: ...
    def end(self) -> None: ...


class Application(Protocol):
    """Answers requests; `refuse` gives answers that need no body to be read (wrong key, path or method), else None.

    `answer` is cancelled when the client disconnects.
    """

    def refuse(self, head: Head) -> Reply | None: ...
    async def answer(self, request: Request, responder: Responder) -> None: ...


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""
