"""The `assay` command run in the process of the test, without the seconds that importing it takes."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import prefect.main  # noqa: F401 the log goes to what is standard error now, not to that of a command that is over

from flows.cli.app import main


@contextmanager
def _environment_kept() -> Iterator[None]:
    # Restores only the variables that a command sets: threads of Ray read the environment at the same time.
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def run_command(*arguments: str | Path) -> CompletedProcess[str]:
    """Runs a command line and captures its output, errors and exit code; Prefect's server is that of this process."""
    argv = ["assay", *map(str, arguments)]
    out, errors = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with patch("sys.argv", argv), _environment_kept(), redirect_stdout(out), redirect_stderr(errors):
            main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return CompletedProcess(argv, code, out.getvalue(), errors.getvalue())
