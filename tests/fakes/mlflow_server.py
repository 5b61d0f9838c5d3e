"""A real MLflow server on SQLite, with its artifacts in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

from fakes.polling import eventually
from fakes.processes import free_port

_APPLICATION = "mlflow.server.fastapi_app:app"


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            # As `mlflow server` starts it; that command imports all of MLflow again.
            [sys.executable, "-m", "uvicorn", "--host", "127.0.0.1", "--port", str(port), _APPLICATION],
            env={**os.environ, **_variables(folder)},
            stdout=log,
            stderr=log,
        )
        try:
            eventually(lambda: server.poll() is not None or _is_up(address))
            assert server.poll() is None, (folder / "log").read_text()
            yield address
        finally:
            server.terminate()
            server.wait(20)


def _variables(folder: Path) -> dict[str, str]:
    return {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder}/mlflow.db",
        "_MLFLOW_SERVER_REGISTRY_STORE": f"sqlite:///{folder}/mlflow.db",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(folder / "files"),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }


def _is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except (URLError, OSError):
        return False
