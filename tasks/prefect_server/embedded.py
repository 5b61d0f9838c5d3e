"""The Prefect server of a process without a configured server: started early, restarted if it dies.

Prefect's own embedded server starts only on its first request, imports the whole server, which takes two seconds of CPU
time, and outlives a killed process.
"""

from __future__ import annotations

import atexit
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from resources.settings import process_environment, variable_set
from tasks.errors import PrefectUnavailable
from tasks.prefect_server.progress import report_event

_PROGRAM = Path(__file__).parent / "programs" / "run_with_parent.py"
_MODE = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
_MOST_DEATHS = 3
"""Restarts after a crash. The database stays, and clients retry for a minute."""
_STARTS_WITHIN_SECONDS = 180.0
"""The very first start took 22 s on two cores."""
_ENDS_WITHIN_SECONDS = 5.0
_POLL_SECONDS = 0.05


@cache
def embedded_server() -> EmbeddedServer:
    """Returns the server of this process; the first call starts it without waiting for it."""
    return EmbeddedServer()


def embedded_address() -> str | None:
    """Returns the address of this process's server if it was started."""
    return embedded_server().address if embedded_server.cache_info().currsize else None


class EmbeddedServer:
    """A Prefect server for this process alone; restarted if it dies."""

    def __init__(self) -> None:
        self.address = ""
        self._deaths, self._ending, self._used = 0, False, False
        self._start()
        # Registered before Prefect is imported, so called after Prefect's own exit handlers.
        atexit.register(self._end)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Waits until the server answers, and makes Prefect use it in this process; flows run in the block. Flow runs
        send no heartbeats: no automation reads them on this server, and their thread sleeps for up to a second before a
        run can end."""
        deadline = time.monotonic() + _STARTS_WITHIN_SECONDS
        client = httpx.Client(trust_env=False)
        while not self._answers(client):
            if self._deaths > _MOST_DEATHS or time.monotonic() >= deadline:
                raise PrefectUnavailable(
                    expected=f"Prefect's embedded server to answer within {_STARTS_WITHIN_SECONDS:g} s",
                    found="it does not" if self._deaths <= _MOST_DEATHS else "it died again and again",
                    remedy="run the command again; prefect server start shows what is wrong",
                )
            time.sleep(_POLL_SECONDS)
        if not self._used:
            from prefect.context import refresh_global_settings_context

            with variable_set("PREFECT_API_URL", self.address):  # jobs do not inherit it
                refresh_global_settings_context()
            self._used = True
        from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            yield

    def _start(self) -> None:
        if not self._used:  # Prefect has no port yet
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.address = f"http://127.0.0.1:{free.getsockname()[1]}/api"
        port = httpx.URL(self.address).port
        spec = find_spec("prefect")
        assert spec is not None and spec.origin is not None, "Prefect is installed with Assay"
        command = ["uvicorn", "--app-dir", str(Path(spec.origin).parent), "--factory"]
        command += ["prefect.server.api.server:create_app", "--host", "127.0.0.1", "--port", str(port)]
        self._process: subprocess.Popen[Any] = subprocess.Popen(
            [sys.executable, str(_PROGRAM), *command, "--log-level", "error", "--lifespan", "on"],
            env=process_environment(_MODE),
            stdin=subprocess.PIPE,  # never written to: it closes when this process dies
            start_new_session=True,  # Ctrl-C ends only this process: its final reports need the server
        )
        listener = copy_context()
        threading.Thread(target=listener.run, args=(self._watch, self._process), daemon=True).start()

    def _watch(self, process: subprocess.Popen[Any]) -> None:
        code = process.wait()
        self._deaths += 1
        if not self._ending and self._deaths <= _MOST_DEATHS:
            report_event(f"Prefect's embedded server died (exit code {code}): starting it again")
            self._start()

    def _answers(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.address}/health").is_success
        except httpx.HTTPError:
            return False

    def _end(self) -> None:
        self._ending = True  # first: prevents a restart
        self._process.terminate()
        try:
            self._process.wait(_ENDS_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
