"""A server of the page over made files, with the headers and rules of the real server."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tasks.reports.viewer.page import CONTENT_TYPES, page_files
from tasks.reports.viewer.server import HEADERS


@dataclass
class ViewServer:
    """Files by name, each site below a folder of its own; queued `answers` by name replace a file once each."""

    url: str
    sites: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    answers: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def answer(self, target: str) -> tuple[int, str, bytes]:
        _, site, name = target.partition("?")[0].split("/", 2)
        self.asked.append(target)
        if queued := self.answers.get(name):
            status, content = queued.pop(0)
            return status, "application/json", content
        content = {**page_files(), **self.sites.get(site, {})}.get(name or "index.html")
        kind = CONTENT_TYPES.get((name or "index.html").rpartition(".")[2], "application/octet-stream")
        return (404, "text/plain", b"") if content is None else (200, kind, content)


@contextmanager
def view_server() -> Iterator[ViewServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, kind, content = server.answer(self.path)
            body = gzip.compress(content, compresslevel=1)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            for name, value in HEADERS.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server = ViewServer(f"http://127.0.0.1:{listening.server_port}")
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()
