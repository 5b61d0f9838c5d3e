"""Tests that need lm-eval share one process that has it imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakes.lm_eval import Harness, make_config
from resources.backends.local.client import LocalClient
from resources.environments.environments import ensure_environment
from tasks.evaluators.harness import warmed
from tasks.evaluators.lm_eval.environment import LM_EVAL
from tasks.evaluators.lm_eval.evaluator import LmEval


@pytest.fixture(scope="session")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """lm-eval kept imported, so that a run of it takes one second and not four."""
    python = ensure_environment(LM_EVAL).python
    client = LocalClient(tmp_path_factory.mktemp("lm-eval") / "jobs", grace_seconds=2.0)
    try:
        with warmed(LmEval(), [make_config("demo_facts")], python=python, client=client) as server:
            yield Harness(python, client, server)
    finally:
        client.shutdown()
