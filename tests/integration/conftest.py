"""What needs a Prefect server shares one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[str]:
    """Address of a Prefect server for these tests; flows called in this process use it by themselves."""
    # 22 s at its very first start on two cores.
    with prefect_test_harness(server_startup_timeout=180):
        yield str(PREFECT_API_URL.value())
