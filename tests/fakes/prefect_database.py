"""The database of a new Prefect server: its migrations take as long as its start, so all servers copy one file."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from resources.settings import process_environment, settings

_UPGRADE = """
import anyio
from anyio import to_thread
from prefect.server.database.alembic_commands import alembic_upgrade
anyio.run(to_thread.run_sync, alembic_upgrade)
"""


def new_databases() -> Path:
    """Folder of databases of SQLite that migrations have made, one per version of Prefect."""
    return settings().cache_dir / "prefect-databases"


def write_prefect_database(file: Path) -> None:
    """Writes a database without content; only the first one of a version is made by its migrations."""
    folder = new_databases()
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{version('prefect')}.db"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            with TemporaryDirectory(dir=folder) as home:
                address = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home}/prefect.db"}
                env = process_environment({"PREFECT_HOME": home, **address})
                subprocess.run([sys.executable, "-c", _UPGRADE], env=env, check=True, timeout=300)
                (Path(home) / "prefect.db").replace(made)
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made, file)
