"""The mean of the last checkpoints: a score with less jitter of training than that of a single checkpoint.

All checkpoints have the same questions, so the noise of questions does not shrink. Jitter is √k times smaller for k
checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tasks.statistics.training_noise import Point, TrainingNoise, trends

LAST = 5
"""Default number of checkpoints."""


class LastCheckpoints(NamedTuple):
    """A mean over checkpoints, with standard errors over draws of questions and of checkpoints; None if unknown."""

    mean: float
    question_stderr: float | None
    training_stderr: float | None

    @property
    def stderr(self) -> float | None:
        if self.question_stderr is None or self.training_stderr is None:
            return None
        return math.hypot(self.question_stderr, self.training_stderr)


def mean_of_last(
    points: Sequence[Point], question_stderrs: Sequence[float | None], *, noise: TrainingNoise | None, last: int = LAST
) -> LastCheckpoints | None:
    """Returns the mean of the last checkpoints; None for fewer, or if they trend, as it would be an earlier score."""
    if len(points) < last or trends(points[-last:], noise):
        return None
    known = [stderr for stderr in question_stderrs[-last:] if stderr is not None]
    return LastCheckpoints(
        math.fsum(value for _, value in points[-last:]) / last,
        math.fsum(known) / last if len(known) == last else None,
        None if noise is None else noise.stddev / math.sqrt(last),
    )
