"""A webhook receiver that keeps the posted contents."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """Port of the receiver, and the received JSON by path."""

    port: int
    posted: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def got(self, path: str, number: int) -> list[dict[str, Any]]:
        """Returns the contents posted to a path once there are `number` of them, else an empty list."""
        came = list(self.posted.get(path, ()))
        return came if len(came) == number else []


@contextmanager
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            started.posted.setdefault(self.path, []).append(content)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    started = Receiver(server.server_port)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield started
    finally:
        server.shutdown()
        server.server_close()
