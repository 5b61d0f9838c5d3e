"""Processes that keep harnesses imported, for all tests that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from fakes.lm_eval import Harness, kept_imported, make_config
from faults.truth.trial import ASKED
from tasks.evaluators.evaluator import evaluator_named


@pytest.fixture(scope="session")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Harness]]:
    """Returns a harness by its evaluator's name; it is imported once, as for all cells of a run."""
    with ExitStack() as stack:

        @cache
        def harness_of(name: str) -> Harness:
            benchmarks, settings = ASKED[name]
            config = make_config(*benchmarks, **settings)
            return stack.enter_context(kept_imported(tmp_path_factory.mktemp(name), evaluator_named(name), config))

        yield harness_of


@pytest.fixture
def lm_eval(imported: Callable[[str], Harness]) -> Harness:
    return imported("lm_evaluation_harness")
