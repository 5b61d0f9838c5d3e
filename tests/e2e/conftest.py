"""The demo, run once; its model and records serve every end-to-end test."""

from __future__ import annotations

import pytest

from fakes.demo import Demo


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """`assay demo` in a new folder."""
    folder = tmp_path_factory.mktemp("e2e") / "demo"
    first = Demo(folder, "")
    done = first.run("demo", "--folder", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return Demo(folder, done.stdout)
