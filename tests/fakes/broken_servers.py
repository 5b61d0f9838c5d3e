"""Servers that are down: the port refuses connections, never answers, or answers every request with an error."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from fakes.http_server import http_server

Way = Literal["refusing", "hanging", "500", "401"]


@contextmanager
def broken_server(way: Way) -> Iterator[str]:
    if way in ("500", "401"):
        with http_server(lambda request: (int(way), {}, b"it is broken")) as address:
            yield address
        return
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if way == "hanging":
            listening.listen(64)  # the kernel accepts connections, no process reads them
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
