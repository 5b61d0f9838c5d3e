"""The Prefect server of a process that was pointed at none: started ahead, again if it dies, and ended with it.

Prefect would start one by itself, but imports the whole server to do so, two seconds of a processor, and only once it
asks for something. Its own also outlives a process that was killed.
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

from resources.errors import PrefectUnavailable
from resources.settings import process_environment, variable_set
from tasks.prefect_server.progress import report_event

_PROGRAM = Path(__file__).parent / "programs" / "run_with_parent.py"
_MODE = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
_MOST_DEATHS = 3
"""Deaths of one server that are followed by a start. Its database stays, and clients ask again for a minute."""
_STARTS_WITHIN_SECONDS = 180.0
"""22 s at its very first start on two cores."""
_ENDS_WITHIN_SECONDS = 5.0
_POLL_SECONDS = 0.05


@cache
def embedded_server() -> EmbeddedServer:
    """The server of this process; the first call starts it, without waiting for it."""
    return EmbeddedServer()


def embedded_address() -> str | None:
    """Returns the address of the server of this process, if it has started one."""
    return embedded_server().address if embedded_server.cache_info().currsize else None


class EmbeddedServer:
    """A Prefect server for this process alone, and what keeps it up."""

    def __init__(self) -> None:
        self.address = ""
        self._deaths, self._ending, self._used = 0, False, False
        self._start()
        # Registered before Prefect is imported, so called after what Prefect still has to say at the end.
        atexit.register(self._end)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Waits until it answers, and makes it the one that Prefect asks in this process; flows run in the block.

        Their runs send no heartbeats: nobody looks for those at a server that ends with us, and the thread that sends
        them sleeps for up to a second before a run can end.
        """
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

            with variable_set("PREFECT_API_URL", self.address):  # jobs of ours do not inherit it
                refresh_global_settings_context()
            self._used = True
        from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
            yield

    def _start(self) -> None:
        if not self._used:  # Prefect was told of no port yet
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            self.address = f"http://127.0.0.1:{port}/api"
        spec = find_spec("prefect")
        assert spec is not None and spec.origin is not None, "Prefect is installed with Assay"
        command = ["uvicorn", "--app-dir", str(Path(spec.origin).parent), "--factory"]
        command += ["prefect.server.api.server:create_app", "--host", "127.0.0.1", "--port", _port_of(self.address)]
        self._process: subprocess.Popen[Any] = subprocess.Popen(
            [sys.executable, str(_PROGRAM), *command, "--log-level", "error", "--lifespan", "on"],
            env=process_environment(_MODE),
            stdin=subprocess.PIPE,  # never written to: it closes with us
            start_new_session=True,  # Ctrl-C ends us, and what we then report still finds it
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
        self._ending = True  # first: this death is not followed by a start
        self._process.terminate()
        try:
            self._process.wait(_ENDS_WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _port_of(address: str) -> str:
    return str(httpx.URL(address).port)
