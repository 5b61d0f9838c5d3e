"""Noise of training: the spread of a score from checkpoint to checkpoint around its trend.

Every point of a curve has two kinds of noise. Sampling noise of the questions is the difference that another draw of as
many questions would make. All checkpoints have the same questions, so they share most of it: it shifts the whole curve
and is not visible in its wavering. The part that is not shared, as neighbors answer different questions correctly, is
visible, and so is the jitter of the weights. Differences of neighbors therefore measure the jitter plus the unshared
part of the questions' noise, which together are the spread of a curve on these questions.

The trend is removed by second differences with steps as distances (Gasser, Sroka and Jennen-Steinmetz 1986), which are
free of any slope. A bend is not removed: where a curve moves in the same direction over four checkpoints, its
differences include the trend, so they count only if they reduce the estimate. With too few other differences, the noise
cannot be separated from the trend. Heineman et al. 2025 (arXiv 2508.13144) use the spread of the last checkpoints,
which includes the slope.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from operator import mul
from statistics import median
from typing import NamedTuple

FEWEST_CHECKPOINTS = 5
"""Fewest consecutive finite values for an estimate: three second differences."""
_CLEARLY, _ROUNDING = 2.0, 1e-12  # in standard errors of a slope; relative to its sums
_NORMAL = 0.6745  # median absolute value of a standard normal number
_REACH = 3.0  # clipping of a difference in robust standard deviations, against steps and lost checkpoints
_DEPENDENT = 35 / 18  # second differences overlap, so they count as this many times fewer independent values


Point = tuple[float, float]
"""Training step and value of a checkpoint."""


class TrainingNoise(NamedTuple):
    """Standard deviation of a checkpoint around the trend, and the degrees of freedom of the estimate."""

    stddev: float
    freedom: float


def training_noise(runs: Sequence[Sequence[Point]]) -> TrainingNoise | None:
    """Returns the noise of training in the curves of a run, or of sibling runs together.

    None for too few checkpoints, or if the curves move in the same direction throughout, which is a trend. `runs` has
    the consecutive checkpoints of each curve; a broken curve is split into its pieces.
    """
    every, wavering = [], []
    for points in runs:
        ways = [(after > before) - (after < before) for (_, before), (_, after) in pairwise(points)]
        for at, (step, value) in enumerate(points[1:-1]):
            (first, before), (last, after) = points[at], points[at + 2]
            part = (step - first) / (last - first) if last > first else 0.5
            difference = (before + part * (after - before) - value) / math.sqrt(1 + part**2 + (1 - part) ** 2)
            every.append(difference)
            near = [ways[max(0, start) : start + 3] for start in (at - 1, at)]
            if not any(len(three) == 3 and abs(sum(three)) == 3 for three in near):
                wavering.append(difference)
    if len(wavering) < FEWEST_CHECKPOINTS - 2:
        return None
    spread = min(clipped_spread(every), clipped_spread(wavering))
    return TrainingNoise(spread, len(wavering) / _DEPENDENT)


def trends(points: Sequence[Point], noise: TrainingNoise | None) -> bool:
    """Returns True if the slope over all points is above twice its standard error, or the noise is unknown."""
    if noise is None:
        return True
    middle = math.fsum(step for step, _ in points) / len(points)
    squares = math.fsum((step - middle) ** 2 for step, _ in points)
    slope = math.fsum((step - middle) * value for step, value in points)
    return abs(slope) > _CLEARLY * noise.stddev * math.sqrt(squares) + _ROUNDING * squares**0.5


def clipped_spread(deviations: Sequence[float]) -> float:
    """Returns the root mean square, clipped to the range of normal numbers; more widely for few deviations."""
    sizes = sorted(map(abs, deviations))
    most = _REACH * (1 + 4 / len(sizes)) * median(sizes) / _NORMAL or math.inf  # infinite if most deviations are 0
    usual = sizes[: bisect(sizes, most)]
    clipped = len(sizes) - len(usual)
    return math.sqrt((sum(map(mul, usual, usual)) + (clipped * most**2 if clipped else 0.0)) / len(sizes))


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
