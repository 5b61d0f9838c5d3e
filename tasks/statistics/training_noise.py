"""Noise of training: how far a score wavers from checkpoint to checkpoint around its trend.

Two noises lie on every point of a curve. The one of questions says what another draw of as many questions would have
given. The same questions are asked at every checkpoint, so most of it is shared by them: it moves a curve as a whole,
and does not show in how the curve wavers. What it does not share, since neighbours get other questions right, shows
there, as does the jitter of the weights. Neighbours therefore measure the jitter together with the part of the
questions' noise that is not shared, and both together are what a curve on these questions wavers by.

The trend is taken out by second differences (Gasser, Sroka and Jennen-Steinmetz 1986), which no slope enters:
checkpoints are taken as equally far apart. Heineman et al. 2025 (arXiv 2508.13144) take the spread of the last
checkpoints, which a slope enters.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from operator import mul
from statistics import median
from typing import NamedTuple

FEWEST_CHECKPOINTS = 5
"""Finite values in a row from which a noise of training is told: three second differences."""
_NORMAL = 0.6745  # median of the absolute value of a standard normal number
_REACH = 3.0  # robust standard deviations beyond which a difference counts as this large: a step, or a lost checkpoint
_DEPENDENT = 35 / 18  # second differences overlap, so their mean square wavers as that of so many times fewer does


class TrainingNoise(NamedTuple):
    """Standard deviation of one checkpoint around the trend, and the degrees of freedom that it is known with."""

    stddev: float
    freedom: float


def training_noise(runs: Sequence[Sequence[float]]) -> TrainingNoise | None:
    """Returns the noise of training in the curves of a run, or of sibling runs together; None of too few checkpoints.

    Args:
        runs: values of neighbouring checkpoints; a curve that breaks is as many as it has pieces.
    """
    differences = [
        ((before + after) / 2 - value) / math.sqrt(1.5)
        for values in runs
        for before, value, after in zip(values, values[1:], values[2:], strict=False)
    ]
    if len(differences) < FEWEST_CHECKPOINTS - 2:
        return None
    spread = clipped_spread(differences)
    return TrainingNoise(spread, len(differences) / _DEPENDENT)


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
