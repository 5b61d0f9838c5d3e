"""Provenance of a number: code, versions, machine."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from resources.settings import settings
from tasks.spec.evaluation import EvaluationConfig

METHOD = "2"
"""Version of how requests are built and counted; incremented when the same settings give other scores."""


@cache
def git_state() -> tuple[str | None, bool | None]:
    """Returns commit and dirty flag of this code's repository; outside of it, the commit in the settings and None."""
    folder = Path(__file__).parent
    if git_output(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return settings().commit or None, None  # perhaps installed inside an unrelated repository
    commit = git_output(folder, "rev-parse", "HEAD")
    changes = git_output(folder, "status", "--porcelain")
    return commit, (bool(changes) if changes is not None else None)


def place_in_git(file: Path) -> tuple[str, str] | None:
    """Returns a file's path in its repository and the commit, with suffix -dirty if the file differs; None outside."""
    folder, commit = file.resolve().parent, git_output(file.resolve().parent, "rev-parse", "HEAD")
    name = git_output(folder, "ls-files", "--full-name", "--error-unmatch", file.resolve().name)
    if not name or not commit:
        return None
    return name, commit + ("-dirty" if git_output(folder, "status", "--porcelain", "--", file.resolve().name) else "")


def git_output(folder: Path, *arguments: str, timeout_seconds: float = 10) -> str | None:
    """Returns the output of a git command without its last line break; None on failure or timeout."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip("\n")


@cache
def versions() -> dict[str, str]:
    """Returns the versions of Assay, its method, Python and Prefect."""
    return {
        "assay": metadata.version("assay-evals"),
        "method": METHOD,
        "python": platform.python_version(),
        "prefect": metadata.version("prefect"),
    }


def hardware(config: EvaluationConfig) -> dict[str, Any]:
    """Returns the requested device, the number of replicas, and the machine of the flow."""
    machine = {"system": platform.platform(), "machine": platform.machine()}
    if config.native:
        resources = config.resources
        return {"device": resources.device.model_dump(), "replicas": 1, "cpu": resources.cpu, **machine}
    pool = config.pool_config
    if pool is None:
        return {"device": "unknown: a foreign endpoint", **machine}
    resources = pool.resource_config
    hosts = {"hosts": resources.hosts} if resources.hosts > 1 else {}
    described = {"device": resources.device.model_dump(), "replicas": resources.replicas, "cpu": resources.cpu}
    return {**described, **hosts, **machine}
