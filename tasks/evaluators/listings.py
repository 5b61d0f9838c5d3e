"""Lists the benchmarks of a harness with a program in its environment."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from resources.errors import EnvironmentBuildFailed
from resources.jobs import inheritance
from resources.settings import process_environment, settings
from resources.storage import storage
from resources.storage.regular_files import read_cached
from tasks.errors import HarnessFailed

_Listing = TypeVar("_Listing", bound=BaseModel)
_LIST_SECONDS = 600  # lm-eval's fifteen thousand files take 13 s on 2 cores; a network disk takes longer


def remembered(python: Path, program: Path, *arguments: str, kind: type[_Listing]) -> _Listing:
    """Returns the listing that a program prints as JSON; cached per environment."""
    environment = python.absolute().parents[1].name
    cached = settings().environments_dir / f"{environment}.{program.stem}.json"
    try:
        return kind.model_validate_json(read_cached(cached))
    except (OSError, ValidationError):
        pass
    text = listed(python, program, *arguments)
    try:
        listing = kind.model_validate_json(text)
    except ValidationError as error:
        raise _failed([str(python), str(program), *arguments], str(error)) from error
    storage.write_bytes(str(cached), text.encode())
    return listing


def listed(python: Path, program: Path, *arguments: str) -> str:
    """Returns the last line that a program prints."""
    argv = [str(python), "-I", str(program), *arguments]
    variables = process_environment({"HF_HUB_OFFLINE": "1"}, inherited=inheritance.HARNESS)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_LIST_SECONDS, env=variables)
        return done.stdout.splitlines()[-1]
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stderr", None) or "")
        reason = "\n".join([str(error), *output.splitlines()[-10:]])
        if isinstance(error, OSError) or "ImportError" in output or "ModuleNotFoundError" in output:
            environment = python.absolute().parents[1]
            raise EnvironmentBuildFailed(
                expected=f"an environment with all that {program.name} imports in {environment}",
                found=reason,
                remedy=f"Delete the folder {environment} and run again: it is built again",
            ) from error
        raise _failed(argv, reason) from error


def _failed(argv: list[str], reason: str) -> HarnessFailed:
    return HarnessFailed(
        expected="a harness to list its benchmarks",
        found=reason,
        remedy=f"Run it by hand: {subprocess.list2cmdline(argv)}",
    )
