"""The database of a new Prefect server: its migrations take longer than its start, so all servers copy one file."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

from resources.settings import process_environment, settings

_UPGRADE = """
import anyio
from anyio import to_thread
from prefect.server.database.alembic_commands import alembic_upgrade
anyio.run(to_thread.run_sync, alembic_upgrade)
"""


def write_prefect_database(file: Path) -> None:
    """Writes a database of SQLite without content; the first one of a run of tests carries the migrations out."""
    folder = settings().cache_dir / "prefect"  # of all workers of pytest, where it is in their shared folder
    folder.mkdir(exist_ok=True)
    made = folder / "prefect.db"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            home = folder / "home"
            subprocess.run(
                [sys.executable, "-c", _UPGRADE],
                env=process_environment({"PREFECT_HOME": str(home)}),
                check=True,
                timeout=300,
            )
            (home / "prefect.db").replace(made)
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made, file)
