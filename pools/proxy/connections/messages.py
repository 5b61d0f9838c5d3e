"""Messages between the proxy's connections and its routes, and its own replies in the OpenAI format. No sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pools.proxy.connections.room import AnswerShare

Header = tuple[bytes, bytes]
"""Name and value as received, or to be sent."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
    }
)
"""Headers of a single connection; the length is set again from the same bytes."""

OURS_TO_KEEP = HOP_BY_HOP | {b"host", b"authorization", b"expect", b"cookie"}
"""Request headers that end at the proxy: replicas must not receive the pool's key."""

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    431: "RequestHeadersTooLargeError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
_MODELS_NAMED_AT_MOST = 20


@dataclass(slots=True)
class Head:
    """Request line and headers, before the body has been read. `path` is as received, without the query."""

    method: str
    path: str
    target: bytes
    """Path and query as received."""
    headers: Sequence[Header]
    first: Mapping[bytes, bytes]
    """First value of each header, by lower-case name."""

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


class Refusal(Exception):
    """A request that the proxy answers itself, with an error.

    `message` must not contain parts of the client's request except a model name; `param` is the wrong field.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after_seconds: int | None = None
    ) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_seconds = retry_after_seconds

    def reply(self) -> Reply:
        headers: list[Header] = [(b"Content-Type", b"application/json")]
        if self.retry_after_seconds is not None:
            headers.append((b"Retry-After", str(self.retry_after_seconds).encode()))
        if self.status == 401:
            headers.append((b"WWW-Authenticate", b"Bearer"))
        return Reply(self.status, error_body(self.status, self.message, param=self.param), headers)


def no_room() -> Refusal:
    """Returns the refusal of a body for lack of memory."""
    message = "The bodies of other requests and answers take all the memory there is for them."
    return Refusal(429, message, retry_after_seconds=1)


def error_body(status: int, message: str, *, param: str | None = None) -> bytes:
    """Returns an error in the format of OpenAI and vLLM."""
    error = {"message": message, "type": _TYPES.get(status, "ServerError"), "param": param, "code": status}
    return json.dumps({"error": error}).encode()


def unknown_model(name: str, known: Iterable[str]) -> Refusal:
    """Returns the refusal of an unknown model name."""
    names = sorted(known)
    listed = ", ".join(f"`{name}`" for name in names[:_MODELS_NAMED_AT_MOST]) or "none"
    if len(names) > _MODELS_NAMED_AT_MOST:
        listed += f" and {len(names) - _MODELS_NAMED_AT_MOST} more"
    return Refusal(404, f"The model `{name}` does not exist. Known models: {listed}.", param="model")
