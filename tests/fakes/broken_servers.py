"""Servers that are down: the port refuses connections, never answers, or answers every request with an error."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Way = Literal["refusing", "hanging", "500", "401"]


@contextmanager
def broken_server(way: Way) -> Iterator[str]:
    if way in ("500", "401"):
        with _answering(int(way)) as address:
            yield address
        return
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if way == "hanging":
            listening.listen(64)  # the kernel accepts connections, no process reads them
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def _answering(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b"it is broken"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_PATCH = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
