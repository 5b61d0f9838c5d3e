"""Listening for clients, and closing their connections in time."""

from __future__ import annotations

import asyncio
import socket

from pools.proxy.connections.messages import Application
from pools.proxy.connections.reading import Bounds
from pools.proxy.connections.wire import ClientConnection

BACKLOG = 4096
_CLOSING_POLL_SECONDS = 0.01


class Listener:
    """Takes connections and lets an application answer them. Use from one loop.

    Args:
        application: answers the requests.
        bounds: sizes and times of each connection.
    """

    def __init__(self, application: Application, *, bounds: Bounds) -> None:
        self._application = application
        self._bounds = bounds
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, listening: socket.socket | None = None) -> tuple[str, int]:
        """Accepts connections from now on.

        Args:
            host: address to listen on.
            port: port to listen on; 0 takes a free one.
            listening: the socket to take connections from, in place of one of its own.

        Returns:
            the bound address and port.

        Raises:
            OSError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        # A proxy that was killed leaves its port in TIME_WAIT: the next one takes it nevertheless.
        if listening is None:
            self._server = await loop.create_server(self._connection, host, port, backlog=BACKLOG, reuse_address=True)
        else:
            self._server = await loop.create_server(self._connection, sock=listening, backlog=BACKLOG)
        self._look_at_connections()
        bound, number, *_ = self._server.sockets[0].getsockname()
        return bound, number

    async def close(self, grace_seconds: float) -> None:
        """Accepts no more, and closes every connection.

        Args:
            grace_seconds: how long answers that are under way may take; then they are cancelled.
        """
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
