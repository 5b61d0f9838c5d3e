"""Prefect servers as processes of their own, which start in half the time of `prefect server start`."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fakes import prefect_program
from fakes.polling import eventually
from fakes.prefect_database import write_prefect_database
from resources.settings import process_environment

NO_UI = {"PREFECT_UI_ENABLED": "false"}
FEW_SERVICES = {"PREFECT__SERVER_EPHEMERAL": "1"}
"""Settings of Prefect's own test server: no scheduler, no service that ends runs."""
NO_SERVICES = {"PREFECT__SERVER_WEBSERVER_ONLY": "1"}

_WRITTEN_ALREADY = {
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
    "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",  # it imports all of Prefect's collections
    "PREFECT_API_DATABASE_MIGRATE_ON_START": "false",
}


def start_prefect_server(
    home: Path, port: int, *, variables: Mapping[str, str], log: Any = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Starts a server and waits until it answers.

    Args:
        home: holds its SQLite database, created if missing.
        variables: settings of the server. If they name another database, they also state if it is migrated.
    """
    if not (home / "prefect.db").exists():
        write_prefect_database(home / "prefect.db")
    own = {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    private = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", port))  # else another process could take the port before the server has it
        process = subprocess.Popen(
            [sys.executable, "-P", str(prefect_program.__file__), str(reserved.fileno())],
            env=process_environment({**own, **private, **_WRITTEN_ALREADY, **variables}),
            cwd=home,
            stdout=log,
            stderr=log,
            pass_fds=[reserved.fileno()],
        )
    eventually(lambda: _listens(port) or process.poll() is not None)
    assert process.poll() is None, f"the Prefect server has ended with {process.returncode}"
    return process


@contextmanager
def used_here(address: str) -> Iterator[None]:
    """Makes a server the one of this process for the block, for requests and for events.

    The thread that sends events keeps the address with which it began: it would send the events of this block to an
    earlier server, and those of later tests to this server.
    """
    from prefect.events.worker import EventsWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

    EventsWorker.drain_all(timeout=30, at_exit=False)
    with temporary_settings({PREFECT_API_URL: address}):
        try:
            yield
        finally:
            EventsWorker.drain_all(timeout=30, at_exit=False)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
