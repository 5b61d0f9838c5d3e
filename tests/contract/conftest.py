"""Fixtures of the contracts' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def small_workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A working directory with 1 file: each job packs and unpacks it, and this repository has 700 files."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "greeting.txt").write_text("hello")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield
