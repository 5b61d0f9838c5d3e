"""Pools on the deterministic engine for faults; the scenarios of a module share a pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.fault_target import running_target
from faults.scenarios.outcome import Scale
from faults.scenarios.target import Target
from resources.settings import settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-faults", action="store_true", help="faults for as long, and as many, as in the field")


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Scale:
    """Returns a small scale, or the full scale with `--long-faults`."""
    if request.config.getoption("--long-faults", default=False):
        return Scale(requests=2000, away_seconds=20.0, fuzzed=100_000)
    return Scale(requests=600, away_seconds=3.0, large_prompts=8, fuzzed=2000)


@pytest.fixture(scope="module")
def cache(session_cache: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASSAY_CACHE_DIR", str(session_cache))
        settings.cache_clear()
        yield session_cache
    settings.cache_clear()


@pytest.fixture(scope="module")
def pair(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running_target(tmp_path_factory.mktemp("pair"), replicas=2) as target:
        yield target


@pytest.fixture(scope="module")
def events() -> list[str]:
    """Log lines of the pool of 1 replica."""
    return []


@pytest.fixture(scope="module")
def single(cache: Path, tmp_path_factory: pytest.TempPathFactory, events: list[str]) -> Iterator[Target]:
    with running_target(tmp_path_factory.mktemp("single"), replicas=1, on_event=events.append) as target:
        yield target
