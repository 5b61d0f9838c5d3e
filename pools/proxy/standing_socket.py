"""A listening socket that survives restarts of the proxy: connections wait in it meanwhile.

The process that supervises the proxy holds the socket and accepts nothing. It lends the socket to each start of the
proxy, over a Unix socket in a folder that only this user can enter and that exists for the time of the start.
"""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pools.proxy.connections.listener import BACKLOG
from resources.jobs.addresses import folder_for_a_socket

_BORROWING_SECONDS = 30.0


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
