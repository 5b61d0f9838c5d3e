"""The database of a new Prefect server: migrations take as long as the server's start, so servers copy a file."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from resources.settings import process_environment, settings

_WRITE = """
import asyncio
from prefect.plugins import load_prefect_collections
from prefect.server.database import provide_database_interface
from prefect.server.models.block_registration import run_block_auto_registration

async def write():
    database = provide_database_interface()
    await database.create_db()
    load_prefect_collections()
    async with await database.session() as session:
        await run_block_auto_registration(session=session)
    await (await database.engine()).dispose()

asyncio.run(write())
"""


def new_databases() -> Path:
    """Folder of new SQLite databases, 1 per version of Prefect."""
    return settings().cache_dir / "prefect-databases"


def write_prefect_database(file: Path) -> None:
    """Writes a database with only the block types; migrations run only for the first database of a version."""
    folder = new_databases()
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"prefect-{version('prefect')}.db"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            with TemporaryDirectory(dir=folder) as home:
                address = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home}/prefect.db"}
                env = process_environment({"PREFECT_HOME": home, **address})
                subprocess.run([sys.executable, "-c", _WRITE], env=env, check=True, timeout=300)
                (Path(home) / "prefect.db").replace(made)
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made, file)
