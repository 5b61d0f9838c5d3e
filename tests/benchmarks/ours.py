"""Assay as a user runs it: the command, with a cache of its own, so that nothing was answered before."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from side_by_side import BENCH, ROOT, environment_of_a_user, run_timed

from pools.pool.kept import KeptPool
from resources.settings import settings

ASSAY = ROOT / ".venv" / "bin" / "assay"
ENGINE_KWARGS: Mapping[str, Any] = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M"}
"""Of both sides."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""Of both sides: what a hub takes to answer is not to be measured."""
POOL_NAME = "bench"


@dataclass(frozen=True)
class Cache:
    """A cache folder with the environments of this machine and nothing else that was there before.

    `forget_answers` is for between two runs; engines' own caches, and the verdict on reloads, stay.
    """

    folder: Path

    @classmethod
    def fresh(cls, folder: Path) -> Cache:
        """An empty one."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "environments").symlink_to(settings().environments_dir)
        return cls(folder)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a command that uses it."""
        own = {"ASSAY_CACHE_DIR": str(self.folder), "PREFECT_HOME": str(BENCH / "prefect")}
        return environment_of_a_user({**OFFLINE, **own})

    def forget_answers(self) -> None:
        """Removes the journal; no pool may be up."""
        shutil.rmtree(self.folder / "journal", ignore_errors=True)


def engine_options(engine: Mapping[str, Any] = ENGINE_KWARGS) -> list[str]:
    """Engine arguments as options of the command."""
    return [part for key, value in engine.items() for part in ("--engine", f"{key}={value}")]


def assay(cache: Cache, *arguments: str | Path, log: Path) -> float:
    """Runs the command to its end; its wall seconds. What it prints lies beside `log`, with the suffix .out."""
    return run_timed([ASSAY, *arguments], log=log, env=cache.variables)


@dataclass(frozen=True)
class PoolThatIsUp:
    """A kept pool, and the wall seconds of the command that started it."""

    kept: KeptPool
    seconds: float


@contextmanager
def kept_pool(
    cache: Cache, run: Path, *, log: Path, engine: Mapping[str, Any] = ENGINE_KWARGS
) -> Iterator[PoolThatIsUp]:
    """A pool that is kept up for the block, for the checkpoints of a run; its engine starts at the first request."""
    up = ("pool", "up", "--model", run, "--name", POOL_NAME, *engine_options(engine))
    try:
        seconds = assay(cache, *up, log=log)
        file = cache.folder / "pools" / f"{POOL_NAME}.json"
        yield PoolThatIsUp(KeptPool.model_validate_json(file.read_bytes()), seconds)
    finally:
        command: Sequence[str | Path] = [ASSAY, "pool", "down", POOL_NAME]
        with log.with_suffix(".down").open("wb") as sink:
            subprocess.run(command, env=cache.variables, stdout=sink, stderr=sink, timeout=120, check=False)
