"""Machines that share only a backend and a folder of pools; a machine starts a kept pool and dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resources.settings import process_environment

_TESTS = Path(__file__).parents[1]
_SCRIPT = """
import json, os, signal, sys
from pathlib import Path
name, folder, checkpoints, config, *paths = map(json.loads, sys.argv[1:])
sys.path[:0] = paths
import cloudpickle
from fakes import launcher, ray_variables
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.kept import keep_up

cloudpickle.register_pickle_by_value(launcher)
served = [Servable.from_uri(name, uri) for name, uri in checkpoints.items()]
config = InferencePoolConfig.model_validate(config)
keep_up(name, config, served, idle_seconds=3600, launcher=launcher.FakeLauncher(Path(folder)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def machine(folder: Path, session_cache: Path) -> dict[str, str]:
    """Returns the variables of a machine with its own home and cache."""
    (folder / "cache").mkdir(parents=True)
    for built in ("environments", "engines"):
        (folder / "cache" / built).symlink_to(session_cache / built)
    return {"HOME": str(folder), "ASSAY_CACHE_DIR": str(folder / "cache")}


def start_pool_and_die(
    name: str, checkpoints: Mapping[str, Path], *, variables: Mapping[str, str], folder: Path, **fields: Any
) -> None:
    """Starts a kept pool from a process of another machine, which is killed once the pool is up.

    Args:
        checkpoints: folders by name.
        variables: those of the machine, and the access to its backend.
        folder: where the fake engines log their launches.
        fields: of the pool's configuration, added to the defaults.
    """
    config = {"model": {"name": "run"}, "proxy_host": "127.0.0.1", **fields}
    folders = {model: str(path) for model, path in checkpoints.items()}
    given = [name, str(folder), folders, config, str(_TESTS), str(_TESTS.parent)]
    command = [sys.executable, "-c", _SCRIPT, *map(json.dumps, given)]
    died = subprocess.run(command, env=process_environment(dict(variables)), timeout=120, check=False)
    assert died.returncode == -signal.SIGKILL
