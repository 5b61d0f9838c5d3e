"""Replies of the proxy itself, in the OpenAI format, and the headers that it passes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from pools.proxy.connections.messages import Header, Reply

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


def error_event(status: int, message: str) -> bytes:
    """Returns an error as the last event of a stream."""
    return b"data: " + error_body(status, message) + b"\n\n"


def unknown_model(name: str, known: Iterable[str]) -> Refusal:
    """Returns the refusal of an unknown model name."""
    names = sorted(known)
    listed = ", ".join(f"`{name}`" for name in names[:_MODELS_NAMED_AT_MOST]) or "none"
    if len(names) > _MODELS_NAMED_AT_MOST:
        listed += f" and {len(names) - _MODELS_NAMED_AT_MOST} more"
    return Refusal(404, f"The model `{name}` does not exist. Known models: {listed}.", param="model")


def passed_on(headers: Sequence[Header], *, dropped: frozenset[bytes]) -> list[Header]:
    """Returns the headers without those dropped (lower-case names), in their order, repeated headers included."""
    return [header for header in headers if header[0].lower() not in dropped]
