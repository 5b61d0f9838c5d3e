"""What needs a Prefect server, or lm-eval, shares one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_API_URL
from prefect.testing.utilities import prefect_test_harness

from fakes.lm_eval import Harness, make_config
from resources.backends.local.client import LocalClient
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from tasks.evaluators.harness import warmed
from tasks.evaluators.lm_eval.evaluator import LmEval


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[str]:
    """Address of a Prefect server for these tests; flows called in this process use it by themselves."""
    # 22 s at its very first start on two cores.
    with prefect_test_harness(server_startup_timeout=180):
        yield str(PREFECT_API_URL.value())


@pytest.fixture(scope="session")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """lm-eval kept imported, so that a run of it takes one second and not four."""
    python = ensure_environment(ENVIRONMENTS["lm-eval"]).python
    client = LocalClient(tmp_path_factory.mktemp("lm-eval") / "jobs", grace_seconds=2.0)
    try:
        with warmed(LmEval(), [make_config("demo_facts")], python=python, client=client) as server:
            yield Harness(python, client, server)
    finally:
        client.shutdown()
