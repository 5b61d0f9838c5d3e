"""Files of evaluation jobs, in a repository with a remote."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

SEED = Path(__file__).parents[1] / "data" / "eval_jobs"
"""A job file and run entries of earlier evaluation jobs on GKE."""


def seed_content() -> dict[str, Any]:
    return yaml.safe_load((SEED / "eval_config.yml").read_text())


def write_job(folder: Path, **changes: Any) -> Path:
    """Writes the seed's job with some keys changed; leaves out keys that are None."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {name: value for name, value in {**seed_content(), **changes}.items() if value is not None}
    shutil.copyfile(SEED / "run_specs.conf", folder / "run_specs.conf")
    file = folder / "eval_config.yml"
    file.write_text(yaml.safe_dump(content))
    return file


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *author, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def new_repository(folder: Path) -> Path:
    """Makes a repository with an empty branch main and a remote."""
    folder.mkdir(parents=True)
    remote = folder.with_name(f"{folder.name}.git")
    git(folder.parent, "init", "-q", "--bare", str(remote))
    git(folder, "init", "-q", "-b", "main")
    git(folder, "remote", "add", "origin", str(remote))
    return folder


def push(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "job")
    git(folder, "push", "-q", "origin", "main")
    return git(folder, "rev-parse", "HEAD")
