"""Values that pass between the proxy's connections and its routes: no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pools.proxy.connections.room import AnswerShare

Header = tuple[bytes, bytes]
"""Name and value as they came, or as they are to be sent."""


@dataclass(slots=True)
class Head:
    """Request line and headers, before the body has been read. `path` is as it came, without the query."""

    method: str
    path: str
    target: bytes
    """Path and query as they came."""
    headers: Sequence[Header]
    first: Mapping[bytes, bytes] = field(default_factory=dict)
    """The first value of each header, by lower-case name; made from `headers` where it is not given."""

    def __post_init__(self) -> None:
        if not self.first:
            self.first = {name.lower(): value for name, value in reversed(self.headers)}

    def header(self, name: bytes) -> bytes | None:
        """The first header of that name (lower case), None if there is none."""
        return self.first.get(name)


@dataclass(slots=True)
class Request:
    """A request, whole. `gone` is done as soon as its client has left; `share` is what its answer takes of the room."""

    head: Head
    body: bytes
    gone: asyncio.Future[None]
    share: AnswerShare


@dataclass(slots=True)
class Reply:
    """A whole answer. Length and connection headers are added where it is sent."""

    status: int
    body: bytes
    headers: Sequence[Header] = ((b"Content-Type", b"application/json"),)


class Responder(Protocol):
    """The client's end of one request: takes one whole reply, or a stream."""

    def send(self, reply: Reply) -> None:
        """Sends a whole answer; nothing happens where the client has left."""
        ...

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        """Starts a stream in chunks; nothing happens where the client has left."""
        ...

    async def write(self, chunk: bytes) -> None:
        """Sends a piece of a stream; waits while the client is slow to take it."""
        ...

    def end(self) -> None:
        """Ends a stream, cleanly for HTTP."""
        ...


class Application(Protocol):
    """Answers requests."""

    def refuse(self, head: Head) -> Reply | None:
        """An answer that needs no body to be read (wrong key, no such path, wrong method); None to go on."""
        ...

    async def answer(self, request: Request, responder: Responder) -> None:
        """Answers one request, through the responder. Cancelled when the client leaves."""
        ...


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""
