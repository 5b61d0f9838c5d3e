"""A private PostgreSQL for Prefect servers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from fakes.polling import eventually
from fakes.processes import free_port

_UNPRIVILEGED_ID = 65534


def postgresql_programs() -> Path | None:
    """Returns the folder of PostgreSQL's programs, or None without PostgreSQL.

    The programs must be called in their own folder: Debian puts only links on the path, or none.
    """
    folders = [Path(path).resolve().parent for path in [shutil.which("postgres")] if path]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").is_file()), None)


def require_postgresql() -> None:
    """Skips a test that relies on events: on SQLite the server loses an event now and then, as the how-to says."""
    if postgresql_programs() is None:
        pytest.skip("no PostgreSQL (apt-get install postgresql): on SQLite the server loses an event now and then")


def postgresql_or_sqlite() -> AbstractContextManager[str | None]:
    """Yields a database URL as `postgresql` does; without PostgreSQL None, which means SQLite for a server."""
    return postgresql() if postgresql_programs() else nullcontext()


@contextmanager
def postgresql() -> Iterator[str]:
    """Yields the URL of an empty database for SQLAlchemy; it starts in 3 s.

    PostgreSQL refuses to run as root, and runs as an unprivileged user then.
    """
    programs = postgresql_programs()
    assert programs is not None
    with tempfile.TemporaryDirectory(prefix="assay-postgresql-") as name:
        folder = Path(name)
        own: dict[str, Any] = {"cwd": folder, "stderr": subprocess.STDOUT}
        if os.geteuid() == 0:
            own |= {"user": _UNPRIVILEGED_ID, "group": _UNPRIVILEGED_ID, "extra_groups": []}
            os.chown(folder, _UNPRIVILEGED_ID, _UNPRIVILEGED_ID)
        data, port = folder / "data", free_port()
        make = [programs / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--no-sync", "--encoding=UTF8"]
        made = subprocess.run([*make, "--no-locale"], check=False, text=True, stdout=subprocess.PIPE, **own)
        assert made.returncode == 0, made.stdout
        settings = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": folder, "fsync": "off"}
        serve = [programs / "postgres", "-D", data]
        serve += [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
        with (folder / "postgresql.log").open("wb") as log:
            process = subprocess.Popen(serve, stdout=log, **own)
        try:
            eventually(lambda: process.poll() is not None or subprocess.run(ready, check=False).returncode == 0)
            assert process.poll() is None, (folder / "postgresql.log").read_text()
            yield f"postgresql+asyncpg://postgres@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # also disconnects clients
            process.wait(30)
