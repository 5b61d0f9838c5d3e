"""Passes a stream of server-sent events on to a client, so that the client can detect an incomplete answer."""

from __future__ import annotations

from collections.abc import Sequence

from pools.proxy.connections.messages import Header, Responder, error_event

KEPT_BYTES = 8 * 2**20
_DONE = b"[DONE]"
_LAST_EVENTS = frozenset({b"response.completed", b"response.incomplete", b"response.failed"})
_END_BYTES = 1024


class EventRelay:
    """A stream to a client. Passes bytes on as they arrive, except for an incomplete line and the end.

    So a stream that breaks in the middle of a line never shows the client half an event: the rest of the line is
    dropped and an error event follows. And a client that has received `data: [DONE]` has the complete answer: that line
    is held back until `finish`. Streams of `/v1/responses` (`of_response`) end with an event of a certain name instead.
    """

    def __init__(self, responder: Responder, *, of_response: bool = False) -> None:
        self._responder = responder
        self._of_response = of_response
        self._held = b""
        self._between_events = True
        self._kept: list[bytes] | None = []
        self._kept_bytes = 0
        self.is_done = False

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        """Sends the status and headers of the engine's answer; from now on no other replica can answer."""
        self._responder.begin(status, headers)

    async def send(self, chunk: bytes) -> None:
        self._keep(chunk)
        data = self._held + chunk if self._held else chunk
        ended = self.is_done and (self._of_response or b"\n" in self._held)  # by a complete line; the rest is ignored
        end = 0 if ended else _end_of_stream(data)
        whole = data.rfind(b"\n") + 1 if end is None else end
        if self._of_response:  # the event's name has its own line, and needs the line that follows to be an event
            whole = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        self.is_done = end is not None or (self._of_response and _has_the_end(data[:whole]))
        self._held = data[whole:]
        if whole:
            await self._write(data[:whole] if self._held else data)

    async def finish(self) -> None:
        if self._held:
            await self._write(self._held)
        self._responder.end()

    async def break_off(self, message: str) -> None:
        """Ends a broken stream: an error event, then a clean end for HTTP."""
        await self._write((b"" if self._between_events else b"\n") + error_event(502, message))
        self._responder.end()

    @property
    def relayed(self) -> bytes | None:
        """All bytes from the engine; None if they are too many to be kept."""
        return None if self._kept is None else b"".join(self._kept)

    def _keep(self, chunk: bytes) -> None:
        if self._kept is None:
            return
        self._kept_bytes += len(chunk)
        if self._kept_bytes > KEPT_BYTES:
            self._kept = None
        else:
            self._kept.append(chunk)

    async def _write(self, payload: bytes) -> None:
        self._between_events = payload.endswith((b"\n\n", b"\r\n\r\n"))
        await self._responder.write(payload)


def _end_of_stream(data: bytes) -> int | None:
    at = data.rfind(b"data:", max(0, len(data) - _END_BYTES))
    begins_line = at == 0 or (at > 0 and data[at - 1] in b"\r\n")
    return at if begins_line and data[at + len(b"data:") :].partition(b"\n")[0].strip() == _DONE else None


def _has_the_end(events: bytes) -> bool:
    names = (event.partition(b"\n")[0].partition(b":") for event in events.split(b"\n\n"))
    return any(name == b"event" and value.strip() in _LAST_EVENTS for name, _, value in names)
