"""The server that Prefect starts for a process which was pointed at none, and its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_API_URL, get_current_settings

from resources.settings import process_environment

_PROGRAM = Path(__file__).parent / "programs" / "run_with_parent.py"
_MODE = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}


def let_embedded_server_end_with_us() -> None:
    """Has the server that Prefect may start for this process end with it, as Prefect's own does not after a SIGKILL."""
    if PREFECT_API_URL.value():
        return
    import prefect
    from prefect.server.api.server import SubprocessASGIServer  # it takes seconds, and is needed now

    class _EndsWithUs(SubprocessASGIServer):
        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            folder = str(prefect.__module_path__.parent)
            command = ["uvicorn", "--app-dir", folder, "--factory", "prefect.server.api.server:create_app"]
            command += ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "error", "--lifespan", "on"]
            chosen = get_current_settings().to_environment_variables(exclude_unset=True)
            return subprocess.Popen(
                [sys.executable, str(_PROGRAM), *command],
                env=process_environment({**_MODE, **chosen}),
                stdin=subprocess.PIPE,  # never written to: it closes with us
            )

    _EndsWithUs()  # the only instance from now on: Prefect keeps them by port
