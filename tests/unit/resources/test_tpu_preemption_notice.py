"""Preemption notices of Google Cloud's metadata server, and their absence on other machines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from resources.jobs.preemption_notice import preemption_announced


@contextmanager
def metadata_server(content: bytes, *, status: int = 200) -> Iterator[str]:
    """Starts a metadata server that requires the Metadata-Flavor header; yields its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.headers["Metadata-Flavor"] == "Google" else 403)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/computeMetadata/v1/instance/preempted"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("content", "status", "announced"),
    [(b"TRUE", 200, True), (b"FALSE", 200, False), (b"no such page", 404, False), (b"<html>TRUE", 200, False)],
)
def test_preemption_is_announced_only_where_the_metadata_server_says_so(
    content: bytes, status: int, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the metadata server is never behind a proxy
    with metadata_server(content, status=status) as url:
        assert preemption_announced(url=url) is announced


def test_machine_without_a_metadata_server_was_not_preempted() -> None:
    assert not preemption_announced(url="http://127.0.0.1:9/", timeout_seconds=1)
