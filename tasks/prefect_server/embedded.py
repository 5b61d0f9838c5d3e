"""The server that Prefect starts for a process which was pointed at none: started again if it dies; its end is ours."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextvars import copy_context
from pathlib import Path
from typing import Any

import httpx
from prefect.settings import PREFECT_API_URL, get_current_settings

from resources.settings import process_environment
from tasks.prefect_server.progress import report_event

_PROGRAM = Path(__file__).parent / "programs" / "run_with_parent.py"
_MODE = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
_MOST_DEATHS = 3
"""Deaths of one server that are followed by a start. Its database stays, and clients ask again for a minute."""
_ADDRESS_IN_USE = 3
"""Exit code after which Prefect takes another port."""
_STARTS_WITHIN_SECONDS = 60.0
_POLL_SECONDS = 0.2


def let_embedded_server_end_with_us() -> None:
    """Has the server that Prefect may start for this process end with it, and not before.

    Prefect's own outlives a process that was killed; if it dies itself, each of its clients waits minutes for it, in
    turn.
    """
    if PREFECT_API_URL.value():
        return
    import prefect
    from prefect.server.api.server import SubprocessASGIServer  # it takes seconds, and is needed now

    class _EndsWithUs(SubprocessASGIServer):
        def start(self, timeout: int | None = None) -> None:
            """Returns once it answers; clients that are made while it is started again wait as well."""
            if self.running:
                self._answers.wait(_STARTS_WITHIN_SECONDS)
                return
            self._answers, self._deaths = threading.Event(), 0
            super().start(timeout)
            self._answers.set()

        def stop(self) -> None:
            self.running = False  # first: this death is not followed by a start
            super().stop()

        def _watch(self, process: subprocess.Popen[Any]) -> None:
            code = process.wait()
            self._deaths += 1
            if not self.running or code == _ADDRESS_IN_USE or self._deaths > _MOST_DEATHS:
                return
            self._answers.clear()
            report_event(f"Prefect's embedded server died (exit code {code}): starting it again")
            self.server_process = process = self._run_uvicorn_command()
            while process.poll() is None and not self._is_healthy():
                time.sleep(_POLL_SECONDS)
            self._answers.set()

        def _is_healthy(self) -> bool:
            try:
                return httpx.get(f"{self.api_url}/health", trust_env=False).is_success
            except httpx.HTTPError:
                return False

        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            folder = str(prefect.__module_path__.parent)
            command = ["uvicorn", "--app-dir", folder, "--factory", "prefect.server.api.server:create_app"]
            command += ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "error", "--lifespan", "on"]
            chosen = get_current_settings().to_environment_variables(exclude_unset=True)
            process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), *command],
                env=process_environment({**_MODE, **chosen}),
                stdin=subprocess.PIPE,  # never written to: it closes with us
                start_new_session=True,  # Ctrl-C ends us, and what we then report still finds it
            )
            listener = copy_context()
            threading.Thread(target=listener.run, args=(self._watch, process), daemon=True).start()
            return process

    _EndsWithUs()  # the only instance from now on: Prefect keeps them by port
