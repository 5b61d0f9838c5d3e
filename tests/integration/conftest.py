"""A shared process that keeps lm-eval imported, for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakes.lm_eval import Harness, kept_imported, make_config
from tasks.evaluators.lm_eval.evaluator import LmEval


@pytest.fixture(scope="session")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with kept_imported(tmp_path_factory.mktemp("lm-eval"), LmEval(), make_config("demo_facts")) as harness:
        yield harness
