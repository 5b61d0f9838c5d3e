"""Makes unseeded shuffles the same in every process. Must be imported before Inspect, which takes `Random`."""

from __future__ import annotations

import random
import tempfile  # noqa: F401 - takes the generator that differs, for names of its files
from typing import Any

import numpy


class Repeatable(random.Random):
    """A generator that starts with 0 unless it is given a seed."""

    unseeded = False

    def seed(self, a: Any = None, version: int = 2) -> None:
        self.unseeded = a is None
        super().seed(0 if a is None else a, version)


random.Random = Repeatable


def repeat() -> None:
    """Restarts everything that is shuffled without a seed in this process."""
    from inspect_ai.solver._task_state import Choices

    random.seed(0)
    numpy.random.seed(0)  # data sets' shuffles begin with its state
    as_it_is, no_seed = Choices.shuffle, Repeatable()

    def shuffle(self: Choices, rand: random.Random = no_seed) -> None:
        # Questions begin in a random order, so a seed for each comes from its own texts.
        texts = "\n".join(choice.value for choice in self)
        as_it_is(self, Repeatable(texts) if isinstance(rand, Repeatable) and rand.unseeded else rand)

    Choices.shuffle = shuffle
