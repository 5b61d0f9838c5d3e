"""Listens for clients, and closes their connections in time."""

from __future__ import annotations

import asyncio
import socket

from pools.proxy.connections.messages import Application
from pools.proxy.connections.reading import Bounds
from pools.proxy.connections.wire import ClientConnection

BACKLOG = 4096
_CLOSING_POLL_SECONDS = 0.01


class Listener:
    """Accepts connections and passes their requests to an application. Use from a single loop."""

    def __init__(self, application: Application, *, bounds: Bounds) -> None:
        self._application = application
        self._bounds = bounds
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, listening: socket.socket | None = None) -> tuple[str, int]:
        """Accepts connections from now on, of `listening` or of a new socket; returns the bound address and port.

        Raises:
            OSError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        # A killed proxy leaves its port in TIME_WAIT; reuse_address takes it nevertheless.
        if listening is None:
            self._server = await loop.create_server(self._connection, host, port, backlog=BACKLOG, reuse_address=True)
        else:
            self._server = await loop.create_server(self._connection, sock=listening, backlog=BACKLOG)
        self._look_at_connections()
        bound, number, *_ = self._server.sockets[0].getsockname()
        return bound, number

    async def close(self, grace_seconds: float) -> None:
        """Stops accepting, and closes every connection; open answers have `grace_seconds` to end."""
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
