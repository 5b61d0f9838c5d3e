"""Noise of training: how far a score wavers from checkpoint to checkpoint around its trend.

Two noises lie on every point of a curve. The one of questions says what another draw of as many questions would have
given. The same questions are asked at every checkpoint, so most of it is shared by them: it moves a curve as a whole,
and does not show in how the curve wavers. What it does not share, since neighbours get other questions right, shows
there, as does the jitter of the weights. Neighbours therefore measure the jitter together with the part of the
questions' noise that is not shared, and both together are what a curve on these questions wavers by.

The trend is taken out by second differences over steps as distances (Gasser, Sroka and Jennen-Steinmetz 1986), which no
slope enters. A bend does: where a curve goes one way over four checkpoints, its differences show the trend, so they
count only where they show less than the others. A curve that has too few others has no noise that could be told from
its trend. Heineman et al. 2025 (arXiv 2508.13144) take the spread of the last
checkpoints, which a slope enters.
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
"""Finite values in a row from which a noise of training is told: three second differences."""
_CLEARLY, _ROUNDING = 2.0, 1e-12  # standard errors of a slope; of the sums behind it
_NORMAL = 0.6745  # median of the absolute value of a standard normal number
_REACH = 3.0  # robust standard deviations beyond which a difference counts as this large: a step, or a lost checkpoint
_DEPENDENT = 35 / 18  # second differences overlap, so their mean square wavers as that of so many times fewer does


Point = tuple[float, float]
"""Training step and value of a checkpoint."""


class TrainingNoise(NamedTuple):
    """Standard deviation of one checkpoint around the trend, and the degrees of freedom that it is known with."""

    stddev: float
    freedom: float


def training_noise(runs: Sequence[Sequence[Point]]) -> TrainingNoise | None:
    """Returns the noise of training in the curves of a run, or of sibling runs together.

    None of too few checkpoints, and where curves go one way: that is a trend.

    Args:
        runs: neighbouring checkpoints; a curve that breaks is as many as it has pieces.
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
    """True if the slope over all points is above twice its standard error, or its noise cannot be estimated."""
    if noise is None:
        return True
    middle = math.fsum(step for step, _ in points) / len(points)
    squares = math.fsum((step - middle) ** 2 for step, _ in points)
    slope = math.fsum((step - middle) * value for step, value in points)
    return abs(slope) > _CLEARLY * noise.stddev * math.sqrt(squares) + _ROUNDING * squares**0.5


def clipped_spread(deviations: Sequence[float]) -> float:
    """The root of the mean square, for which no deviation counts more than those of a normal number could.

    Of few deviations the middle one is itself uncertain, so they are left more room.
    """
    sizes = sorted(map(abs, deviations))
    most = _REACH * (1 + 4 / len(sizes)) * median(sizes) / _NORMAL or math.inf  # most are 0: nothing to clip by
    usual = sizes[: bisect(sizes, most)]
    clipped = len(sizes) - len(usual)
    return math.sqrt((sum(map(mul, usual, usual)) + (clipped * most**2 if clipped else 0.0)) / len(sizes))


def together(question_stderr: float | None, noise: TrainingNoise | None) -> float | None:
    """Standard error of one value over draws of questions and of checkpoints; None where either is unknown.

    What questions add to the wavering is in both, so it is too large by that, and never too small.
    """
    return None if question_stderr is None or noise is None else math.hypot(question_stderr, noise.stddev)
