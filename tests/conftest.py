"""Fixtures that every layer of tests shares."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resources.settings import settings


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that takes about a megabyte: a tmpfs where we may mount one, else a limit on the size of files."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Digests, staged copies and job folders of tests go into a folder of the session, not into the user's cache.

    Environments stay where they are: they take minutes to build, and are named after their content.
    """
    environments = settings().environments_dir
    folder = tmp_path_factory.getbasetemp() / "cache"
    folder.mkdir(exist_ok=True)
    if not (folder / "environments").exists():
        environments.mkdir(parents=True, exist_ok=True)
        (folder / "environments").symlink_to(environments)
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(folder))
    settings.cache_clear()
    yield
    settings.cache_clear()
