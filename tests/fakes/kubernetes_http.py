"""HTTP of the fake Kubernetes API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any


class Refused(Exception):
    def __init__(self, code: int, message: str, *, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.retry_after = code, message, retry_after
        self.reason = reason


def handler_of(server: Any) -> type[BaseHTTPRequestHandler]:
    """Returns a handler that sends the answers of `server.handle`, objects or streams of bytes."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            try:
                reply = server.handle(self.command, self.path, self.headers.get("Authorization", ""), body)
                if isinstance(reply, dict):
                    with server.lock:
                        content = json.dumps(reply).encode()
                    self._send(201 if self.command == "POST" else 200, content)
                else:
                    self._stream(reply)
            except Refused as refused:
                status = {"kind": "Status", "status": "Failure", "message": refused.message, "code": refused.code}
                status |= {"reason": refused.reason} if refused.reason else {}
                self._send(refused.code, json.dumps(status).encode(), retry_after=refused.retry_after)

        do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = _answer

        def _send(self, code: int, content: bytes, *, retry_after: float | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if retry_after is not None:
                self.send_header("Retry-After", f"{retry_after:g}")
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, chunks: Iterator[bytes]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in chunks:
                if chunk:
                    self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                    self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            return

    return Handler
