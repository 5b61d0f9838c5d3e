"""The HTTP proxy of a network; tests check that it gets no connections."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@dataclass(frozen=True)
class WebProxy:
    """A proxy that takes connections and never answers."""

    listening: socket.socket

    @property
    def variables(self) -> dict[str, str]:
        """Variables that route all requests of clients to it."""
        return dict.fromkeys(VARIABLES, "http://{}:{}".format(*self.listening.getsockname()))

    @property
    def was_asked(self) -> bool:
        return bool(select.select([self.listening], [], [], 0)[0])


@contextmanager
def web_proxy() -> Iterator[WebProxy]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield WebProxy(listening)
