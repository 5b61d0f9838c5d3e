"""Passing a stream of server-sent events on to a client, with an end that can be told from a whole answer."""

from __future__ import annotations

import aiohttp
from aiohttp import web

from pools.proxy.replies import HOP_BY_HOP, error_event, passed_on

EVENT_STREAM = "text/event-stream"


class ClientGone(Exception):
    """The client closed its connection while a stream was being sent to it."""


class EventRelay:
    """One stream to one client. Bytes go on as they come, less a line that is not whole yet.

    So a stream that breaks in the middle of a line never shows the client half an event: the rest of the line is
    dropped and an error event follows.

    Args:
        request: the client's request.
    """

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._partial_line = b""
        self._between_events = True
        self.response: web.StreamResponse | None = None

    async def begin(self, upstream: aiohttp.ClientResponse) -> None:
        """Sends the status and headers of the engine's answer; from here on no other replica can answer.

        Raises:
            ClientGone: nobody is there to take them.
        """
        headers = passed_on(upstream.headers, dropped=HOP_BY_HOP)
        self.response = web.StreamResponse(status=upstream.status, headers=headers)
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def send(self, chunk: bytes) -> None:
        """Passes on what came from the engine.

        Raises:
            ClientGone: nobody is there to take it.
        """
        whole = chunk.rfind(b"\n") + 1
        if whole == 0:
            self._partial_line += chunk
            return
        await self._write(self._partial_line + chunk[:whole] if self._partial_line else chunk[:whole])
        self._partial_line = chunk[whole:]

    async def finish(self) -> None:
        """Ends a stream that came whole.

        Raises:
            ClientGone: nobody is there to take the end.
        """
        if self._partial_line:
            await self._write(self._partial_line)
        await self._end()

    async def break_off(self, message: str) -> None:
        """Ends a stream that broke: an error event, then an end that is clean for HTTP.

        Args:
            message: for the client.

        Raises:
            ClientGone: nobody is there to take it.
        """
        await self._write((b"" if self._between_events else b"\n") + error_event(502, message))
        await self._end()

    async def _write(self, payload: bytes) -> None:
        assert self.response is not None
        self._between_events = payload.endswith((b"\n\n", b"\r\n\r\n"))
        try:
            await self.response.write(payload)
        except ConnectionError as error:
            raise ClientGone from error

    async def _end(self) -> None:
        assert self.response is not None
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error
