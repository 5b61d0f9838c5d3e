"""A real MLflow server on SQLite, with its artifacts in a folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

from fakes.polling import eventually

# 8 s alone, 45 s when first started beside other tests.
_START_SECONDS = 110.0


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Its address, while it lasts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    options = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *stores, *options],
            env={**os.environ, **quiet},
            stdout=log,
            stderr=log,
        )
        try:
            eventually(lambda: server.poll() is not None or _is_up(address), seconds=_START_SECONDS)
            assert server.poll() is None, (folder / "log").read_text()
            yield address
        finally:
            server.terminate()
            server.wait(20)


def _is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False
