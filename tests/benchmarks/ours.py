"""Assay as a user runs it: the command, with a cache of its own, without earlier answers."""

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
"""Engine arguments of both sides."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""Variables of both sides: excludes response times of a hub."""
POOL_NAME = "bench"


def is_added(metric: str) -> bool:
    """Returns True for a score that Assay adds to lm-eval's: a smooth score, or its standard error."""
    return metric.removesuffix("_stderr") in ("bpb", "choice_prob_norm")


@dataclass(frozen=True)
class Cache:
    """A cache folder with the environments of this machine, otherwise empty.

    `forget_answers` is for between 2 runs; engines' own caches, and the verdict on reloads, stay.
    """

    folder: Path

    @classmethod
    def fresh(cls, folder: Path) -> Cache:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "environments").symlink_to(settings().environments_dir)
        return cls(folder)

    @property
    def variables(self) -> dict[str, str]:
        own = {"ASSAY_CACHE_DIR": str(self.folder), "PREFECT_HOME": str(BENCH / "prefect")}
        return environment_of_a_user({**OFFLINE, **own})

    def forget_answers(self) -> None:
        """Removes the journal; no pool may be up."""
        shutil.rmtree(self.folder / "journal", ignore_errors=True)


def engine_options(engine: Mapping[str, Any] = ENGINE_KWARGS) -> list[str]:
    return [part for key, value in engine.items() for part in ("--engine", f"{key}={value}")]


def assay(cache: Cache, *arguments: str | Path, log: Path) -> float:
    """Runs the command to its end; returns its wall seconds. Its output goes to `log` with the suffix .out."""
    return run_timed([ASSAY, *arguments], log=log, env=cache.variables)


@dataclass(frozen=True)
class PoolThatIsUp:
    kept: KeptPool
    seconds: float


@contextmanager
def kept_pool(
    cache: Cache, run: Path, *, log: Path, engine: Mapping[str, Any] = ENGINE_KWARGS
) -> Iterator[PoolThatIsUp]:
    """Keeps a pool for the checkpoints of a run up for the block; its engine starts at the first request."""
    up = ("pool", "up", "--model", run, "--name", POOL_NAME, *engine_options(engine))
    try:
        seconds = assay(cache, *up, log=log)
        file = cache.folder / "pools" / f"{POOL_NAME}.json"
        yield PoolThatIsUp(KeptPool.model_validate_json(file.read_bytes()), seconds)
    finally:
        command: Sequence[str | Path] = [ASSAY, "pool", "down", POOL_NAME]
        with log.with_suffix(".down").open("wb") as sink:
            subprocess.run(command, env=cache.variables, stdout=sink, stderr=sink, timeout=120, check=False)
