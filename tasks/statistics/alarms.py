"""Alarms of a run's curves: scores that fell below what came before, by more than training and questions waver.

A local level with slope is learned from the checkpoints of each series, and predicts the next. A one-sided CUSUM (Page
1954) adds up by how much scores fall short of that, less an allowance; above a threshold it alarms, and the level
starts again. Comparing a checkpoint with its neighbour does the same with no memory, and calls jitter a regression.

- While the sum is above zero nothing is learned: a drop that is suspected does not become the level. If the suspicion
  goes, what was held back is learned.
- The yardstick is how far earlier checkpoints lay from their predictions, in units of the questions' standard error,
  moderated by the other series of the run (Smyth 2004, empirical Bayes), and at least a quarter of that error. It comes
  from few checkpoints, so each shortfall goes through Student's t to the normal number of the same chance (Hawkins
  1987).
- A rise that ends is no drop: no more is expected than the level, nor than the best of the last three scores.
- The threshold follows from the mean number of checkpoints between two false alarms (Siegmund 1985). That of a run is
  shared by its series, so each of them gets as many times more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from tasks.statistics.training_noise import clipped_spread

CHECKPOINTS_BETWEEN_FALSE_ALARMS = 1_000
"""Mean distance of two false alarms of a run, whatever number of series it has: 50 checkpoints have one in 5 % of runs.
"""
FEWEST_BEFORE = 10
"""Checkpoints of a series before the first that can alarm."""
_ALLOWANCE = 2.0  # standard deviations, half the shift looked for: 2 points where half a point is jitter
_SLOPE = 0.0001  # variance of the slope's change per checkpoint, by that of the noise
_STEEP = 1e6  # variance of a slope of which nothing is known yet, by that of the noise
_OVERSHOOT = 1.166  # of a sum of normal numbers over a threshold (Siegmund 1985)
_CALIBRATION = 1.1  # of the threshold, by simulation: the approximation is of smaller steps, and of independent ones
_WORTH = 0.75  # degrees of freedom of a prediction error, by simulation: a level is estimated with it
_SHORTEST = 0.25  # of the questions' standard error: neighbours that answer 97 % of questions alike waver by as much
_REMEMBERED = 40  # prediction errors: a training that calms down is judged by what it does now
_MOST_BORROWED = 40.0  # degrees of freedom that the other series of a run give, however alike they are
_FEWEST_ERRORS, _FEWEST_ALIKE = 5, 4  # of a series that lends its noise, and of such series
_UNKNOWN = 50.0  # variance of a prediction, by that of the noise, above which it says nothing


@dataclass(frozen=True)
class Score:
    """A value, turned so that higher is better, and the standard error of its questions; both on one scale."""

    value: float
    stderr: float
    breaks: bool = False
    """True if it does not go on from what came before."""


class Alarm(NamedTuple):
    """A drop that was found at the place `at` of a series, began at `since`, and fell short of `expected`."""

    at: int
    since: int
    expected: float


def alarms(
    series: Sequence[Sequence[Score | None]], *, distance: int = CHECKPOINTS_BETWEEN_FALSE_ALARMS
) -> list[list[Alarm]]:
    """Returns the alarms of each series of a run.

    Args:
        series: scores at the checkpoints of the run, in their order, the same for all; None where there is none.
        distance: mean number of checkpoints between two false alarms of the run.
    """
    watched = [_Series() for _ in series]
    limit = threshold(distance * len(series)) if series else 0.0
    found: list[list[Alarm]] = [[] for _ in series]
    for at in range(max(map(len, series), default=0)):
        here = [
            (state, score, alarms)
            for state, scores, alarms in zip(watched, series, found, strict=True)
            if (score := scores[at] if at < len(scores) else None) is not None
        ]
        for (state, score, alarms), noise in zip(here, _moderated([state.noise for state, _, _ in here]), strict=True):
            if alarm := state.takes(at, score, noise=noise, limit=limit):
                alarms.append(alarm)
    return found


def threshold(distance: float) -> float:
    """The sum at which to alarm, so that there are so many checkpoints between two false alarms in the mean."""
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        reach = 2 * _ALLOWANCE * (middle + _OVERSHOOT)
        low, high = (middle, high) if math.exp(reach) - reach - 1 < distance * 2 * _ALLOWANCE**2 else (low, middle)
    return high * _CALIBRATION


class _Noise(NamedTuple):
    spread: float
    freedom: float


class _Trend(NamedTuple):
    """A level and a slope, with their variances by that of the noise (Kalman's filter)."""

    level: float
    slope: float = 0.0
    of_level: float = 1.0
    both: float = 0.0
    of_slope: float = _STEEP

    def ahead(self, checkpoints: int = 1) -> _Trend:
        level = self.level + self.slope * checkpoints
        of_level = self.of_level + 2 * checkpoints * self.both + checkpoints**2 * self.of_slope
        of_slope = self.of_slope + _SLOPE * checkpoints
        return _Trend(level, self.slope, of_level, self.both + checkpoints * self.of_slope, of_slope)

    @property
    def variance(self) -> float:
        """The variance of a score around this level."""
        return self.of_level + 1.0

    def met(self, value: float) -> _Trend:
        error, gain, turn = value - self.level, self.of_level / self.variance, self.both / self.variance
        return _Trend(self.level + gain * error, self.slope + turn * error, (1 - gain) * self.of_level,
                      (1 - gain) * self.both, self.of_slope - turn * self.both)  # fmt: skip


@dataclass
class _Series:
    """The state of one series: what was learned, what is held back, and both sums."""

    trend: _Trend | None = None
    errors: list[float] = field(default_factory=list)
    learned: int = 0
    last: list[float] = field(default_factory=list)
    held: list[tuple[int, Score]] = field(default_factory=list)
    rising: list[Score] = field(default_factory=list)
    fallen: float = 0.0
    risen: float = 0.0
    stderr: float = 0.0

    def unit(self, score: Score) -> float:
        """The larger of the questions' errors of a score and of the one before."""
        return max(score.stderr, self.stderr)

    @property
    def noise(self) -> _Noise:
        """The spread of its prediction errors, in units of the questions' error."""
        recent = self.errors[-_REMEMBERED:]
        return _Noise(max(_SHORTEST, clipped_spread(recent)) if recent else _SHORTEST, _WORTH * len(recent))

    def takes(self, at: int, score: Score, *, noise: _Noise, limit: float) -> Alarm | None:
        """Judges a score, then learns it or holds it back."""
        if score.breaks:
            self._begin([])
        alarm, unit = None, self.unit(score)
        if self.trend is not None:
            ahead = self.trend.ahead(1 + len(self.held))
            expected = min(ahead.level, self.trend.level, max(self.last))
            if self.learned >= FEWEST_BEFORE and ahead.variance < _UNKNOWN and unit > 0.0:
                sized = unit * math.sqrt(ahead.variance) * noise.spread
                self.fallen = max(0.0, self.fallen + _normal((expected - score.value) / sized, noise) - _ALLOWANCE)
                self.risen = max(0.0, self.risen + _normal((score.value - ahead.level) / sized, noise) - _ALLOWANCE)
            if self.fallen > limit:
                since = self.held[0][0] if self.held else at
                alarm = Alarm(at, since, expected)
        self.stderr = score.stderr
        if alarm is not None:
            self._begin([held for _, held in self.held] + [score])
        elif self.fallen > 0.0:
            self.held.append((at, score))
            self.risen, self.rising = 0.0, []
        else:
            for held in [held for _, held in self.held] + [score]:
                self._learn(held)
            self.held = []
            self.rising = [*self.rising, score] if self.risen > 0.0 else []
            if self.risen > limit:  # a jump upwards is no news, but the level and slope before it are past
                del self.errors[-len(self.rising) :]
                self._begin(self.rising)
        return alarm

    def _begin(self, scores: Sequence[Score]) -> None:
        """Starts again at a new level; what is known of the noise stays."""
        self.trend, self.last, self.held, self.rising, self.fallen, self.risen = None, [], [], [], 0.0, 0.0
        for score in scores:
            self._learn(score)

    def _learn(self, score: Score) -> None:
        self.learned += 1
        self.last = [*self.last[-2:], score.value]
        if self.trend is None:
            self.trend = _Trend(score.value, of_slope=_STEEP)
            return
        ahead = self.trend.ahead()
        if ahead.variance < _UNKNOWN and self.unit(score) > 0.0:
            self.errors.append((score.value - ahead.level) / math.sqrt(ahead.variance) / self.unit(score))
        self.trend = ahead.met(score.value)


def _normal(deviation: float, noise: _Noise) -> float:
    """The normal number with the chance that a deviation has by Student's t."""
    from scipy import special

    if noise.freedom <= 0:
        return 0.0
    return math.copysign(-float(special.ndtri(special.stdtr(noise.freedom, -abs(deviation)))), deviation)


def _moderated(own: Sequence[_Noise]) -> list[_Noise]:
    """The noise of each series, drawn to what those of the run have in common by as much as they are alike.

    Logarithms of variances are compared (Smyth 2004, section 6.2): by what they differ more than chance lets them
    follows the number of degrees of freedom that the common variance is worth.
    """
    known = [noise for noise in own if noise.freedom >= _FEWEST_ERRORS]
    if len(known) < _FEWEST_ALIKE:
        return list(own)
    centred = [2 * math.log(noise.spread) - _log_chi_square(noise.freedom)[0] for noise in known]
    mean = math.fsum(centred) / len(centred)
    chance = math.fsum(_log_chi_square(noise.freedom)[1] for noise in known) / len(known)
    more = math.fsum((value - mean) ** 2 for value in centred) / (len(centred) - 1) - chance
    borrowed = min(_MOST_BORROWED, (1 + math.sqrt(1 + 2 * more)) / more if more > 0 else math.inf)  # of trigamma
    common = math.exp(mean + _log_chi_square(borrowed)[0])
    return [
        _Noise(math.sqrt((noise.freedom * noise.spread**2 + borrowed * common) / freedom), freedom)
        for noise in own
        if (freedom := noise.freedom + borrowed)
    ]


@lru_cache(256)
def _log_chi_square(freedom: float) -> tuple[float, float]:
    """Mean and variance of the logarithm of a mean square with so many degrees of freedom."""
    from scipy import special

    half = freedom / 2
    return float(special.digamma(half)) - math.log(half), float(special.polygamma(1, half))
