"""Listens for clients, and closes their connections in time, on a socket that survives restarts of the proxy.

The process that supervises the proxy holds that socket and accepts nothing: connections wait in it meanwhile. It lends
the socket to each start of the proxy, over a Unix socket in a folder that only this user can enter and that exists for
the time of the start.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pools.proxy.connections.messages import Application
from pools.proxy.connections.reading import Bounds
from pools.proxy.connections.wire import ClientConnection
from resources.jobs.addresses import folder_for_a_socket

BACKLOG = 4096
_BORROWING_SECONDS = 30.0
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


def standing_socket(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 takes a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


@contextmanager
def lent(listening: socket.socket) -> Iterator[Path]:
    """Lends a socket to the first process that connects to this path, for as long as the block lasts."""
    path = folder_for_a_socket() / "socket"
    try:
        with socket.socket(socket.AF_UNIX) as counter:
            counter.bind(str(path))
            counter.listen()
            threading.Thread(target=_lend, args=(listening, counter), name="proxy-socket", daemon=True).start()
            try:
                yield path
            finally:
                with suppress(OSError):  # wakes a lender without a connection
                    counter.shutdown(socket.SHUT_RDWR)
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


def _lend(listening: socket.socket, counter: socket.socket) -> None:
    with suppress(OSError):  # the start has failed
        borrower, _ = counter.accept()
        with borrower:
            socket.send_fds(borrower, [b"."], [listening.fileno()])


def borrowed(path: Path) -> socket.socket:
    """Returns the socket that is lent at a path."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_BORROWING_SECONDS)
        asking.connect(str(path))
        _, descriptors, _, _ = socket.recv_fds(asking, 1, 1)
    if not descriptors:
        raise ConnectionError("the lender left")
    return socket.socket(fileno=descriptors[0])
