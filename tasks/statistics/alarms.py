"""Alarms of a run's curves: scores that fell below what came before, by more than training and questions waver.

A local level with slope is learned from the checkpoints of each series, and predicts the next. A one-sided CUSUM (Page
1954) adds up by how much scores fall short of that, less an allowance; above a threshold it alarms, and the level
starts again. Comparing a checkpoint with its neighbour does the same with no memory, and calls jitter a regression.

- The level follows as fast as it predicted best so far: hardly, where a curve is flat, and fast, where it bends.
- While the sum is above zero nothing is learned: a drop that is suspected does not become the level. If the suspicion
  goes, what was held back is learned.
- The yardstick is how far earlier checkpoints lay from their predictions, in units of the questions' standard error,
  moderated by the other series of the run (Smyth 2004, empirical Bayes), and at least a quarter of that error. It comes
  from few checkpoints, so each shortfall goes through Student's t to the normal number of the same chance (Hawkins
  1987).
- A rise that ends is no drop: no more is expected than the level, nor than the best of the last three scores.
- Errors that go on from one checkpoint to the next are predicted too (AR(1), by a lag-1 correlation that the series of
  a run share), and the yardstick is that of the rest. It grows where the latest errors of the run are larger.
- One shortfall alone stays below the threshold unless it is larger than heavy tails give: an outlier is no level.
- The threshold follows from the mean number of checkpoints between two false alarms (Siegmund 1985). That of a run is
  shared by its series, so each of them gets as many times more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import mul
from typing import NamedTuple

from tasks.statistics.training_noise import clipped_spread

CHECKPOINTS_BETWEEN_FALSE_ALARMS = 1_000
"""Mean distance of two false alarms of a run, whatever number of series it has: 50 checkpoints have one in 5 % of runs.
"""
FEWEST_BEFORE = 10
"""Checkpoints of a series before the first that can alarm."""
_ALLOWANCE = 2.0  # standard deviations, half the shift looked for: 2 points where half a point is jitter
_SLOPES = (0.0001, 0.003, 0.1)  # variances of the slope's change per checkpoint, by that of the noise
_BETTER = 1.1  # error of a path by that of the next one that bends more, for which that is taken
_STEEP = 1e6  # variance of a slope of which nothing is known yet, by that of the noise
_OVERSHOOT = 1.166  # of a sum of normal numbers over a threshold (Siegmund 1985)
_CALIBRATION = 0.82  # of the threshold, by simulation: the approximation is of smaller steps, that may alarm alone
_ALONE = 0.9  # of the threshold: as far as one shortfall goes, unless Student's t with so few degrees of freedom
_HEAVY = 3.0  # takes it for a rare one
_MOST_ALIKE = 0.95  # lag-1 correlation
_REACH, _CARRIED = (
    2.5,
    4.0,
)  # spreads beyond which an error counts as this large: in the correlation, in what follows it
_COMMON = 30.0, 5.0  # pairs of errors that the correlation of all series is worth to each, and that 0 is to all
_LATEST = 5  # errors of each series by which its jitter is seen to grow
_WORTH = 0.5  # degrees of freedom of a prediction error, by simulation: a level is estimated with it
_SHORTEST = 0.25  # of the questions' standard error: neighbours that answer 97 % of questions alike waver by as much
_REMEMBERED = 40  # prediction errors: a training that calms down is judged by what it does now
_MOST_BORROWED = 200.0  # degrees of freedom that the other series of a run give, however alike they are
_FEWEST_ERRORS, _FEWEST_ALIKE = 5, 4  # of a series that lends its noise, and of such series
_UNKNOWN = 50.0  # variance of a prediction, by that of the noise, above which it says nothing


@dataclass(frozen=True)
class Score:
    """A value, turned so that higher is better, and the standard error of its questions; both on one scale."""

    value: float
    stderr: float
    breaks: bool = False
    """True if it does not go on from what came before."""
    unvaried: bool = False
    """True if all answers scored alike, so that the error comes from the interval, and nothing wavers by less."""


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
        states = [state for state, _, _ in here]
        by_path = [_correlations([state.paths[number] for state in states]) for number in range(len(_SLOPES))]
        for state, correlations in zip(states, zip(*by_path, strict=True), strict=True):
            state.follow(correlations)
        grown = _growth([[error / state.noise.spread for error in state.path.errors] for state in states])
        noises = _moderated([_Noise(state.noise.spread * grown, state.noise.freedom) for state in states])
        for (state, score, alarms), noise in zip(here, noises, strict=True):
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
    bends: float
    slope: float = 0.0
    of_level: float = 1.0
    both: float = 0.0
    of_slope: float = _STEEP

    def ahead(self, checkpoints: int = 1) -> _Trend:
        level = self.level + self.slope * checkpoints
        of_level = self.of_level + 2 * checkpoints * self.both + checkpoints**2 * self.of_slope
        of_slope = self.of_slope + self.bends * checkpoints
        return _Trend(level, self.bends, self.slope, of_level, self.both + checkpoints * self.of_slope, of_slope)

    @property
    def variance(self) -> float:
        return self.of_level + 1.0

    def met(self, value: float) -> _Trend:
        error, gain, turn = value - self.level, self.of_level / self.variance, self.both / self.variance
        level, slope, kept = self.level + gain * error, self.slope + turn * error, 1 - gain
        return _Trend(
            level, self.bends, slope, kept * self.of_level, kept * self.both, self.of_slope - turn * self.both
        )


@dataclass(frozen=True)
class _Path:
    """A trend that bends so much, and how far scores lay from its predictions, in units of their questions' error."""

    start: _Trend | None
    bends: float
    errors: tuple[float, ...] = ()
    latest: float = 0.0

    @property
    def trend(self) -> _Trend:
        assert self.start is not None
        return self.start

    @cached_property
    def spread(self) -> float:
        return max(_SHORTEST, clipped_spread(self.errors) if self.errors else 0.0)

    @cached_property
    def lagged(self) -> tuple[float, float]:
        sizes = [size / self.spread for size in _bounded(self.errors, _REACH * self.spread)]
        ends = (sizes[0] ** 2 + sizes[-1] ** 2) / 2 if sizes else 0.0
        return sum(map(mul, sizes, sizes[1:])), sum(map(mul, sizes, sizes)) - ends

    def carried(self, errors: Sequence[float], correlation: float) -> list[float]:
        return [correlation * error for error in _bounded(errors, _CARRIED * self.spread)]

    def noise(self, correlation: float) -> _Noise:
        own = [b - a for a, b in zip(self.carried(self.errors, correlation), self.errors[1:], strict=False)]
        return _Noise(max(_SHORTEST, clipped_spread(own)) if own else self.spread, _WORTH * len(self.errors))

    def error(self, spread: float) -> float:
        if self.start is None:
            return math.inf
        return spread * math.sqrt(self.start.ahead().variance) * _BETTER ** _SLOPES.index(self.bends)

    def met(self, value: float, *, unit: float) -> _Path:
        if self.start is None:
            return _Path(_Trend(value, self.bends), self.bends, self.errors)
        ahead, errors, latest = self.start.ahead(), self.errors, 0.0
        if ahead.variance < _UNKNOWN and unit > 0.0:
            latest = (value - ahead.level) / math.sqrt(ahead.variance) / unit
            errors = (*errors, latest)[-_REMEMBERED:]
        return _Path(ahead.met(value), self.bends, errors, latest)


@dataclass
class _Series:
    """The state of one series: what was learned, what is held back, and both sums."""

    paths: list[_Path] = field(default_factory=lambda: [_Path(None, bends) for bends in _SLOPES])
    path: _Path = field(init=False)
    correlation: float = field(init=False)
    noise: _Noise = field(init=False)
    learned: int = 0
    stderr: float = 0.0
    least: float = 0.0
    latest: float = 0.0
    last: list[float] = field(default_factory=list)
    held: list[tuple[int, Score]] = field(default_factory=list)
    rising: list[Score] = field(default_factory=list)
    fallen: float = 0.0
    risen: float = 0.0

    def follow(self, correlations: Sequence[float]) -> None:
        noises = [path.noise(alike) for path, alike in zip(self.paths, correlations, strict=True)]
        known = list(zip(self.paths, correlations, noises, strict=True))
        self.path, self.correlation, self.noise = min(known, key=lambda each: each[0].error(each[2].spread))

    def takes(self, at: int, score: Score, *, noise: _Noise, limit: float) -> Alarm | None:
        if score.breaks:
            self._begin([])
        alarm, unit, path, latest = None, max(score.stderr, self.stderr), self.path, 0.0
        self.least = score.stderr if score.unvaried else self.least
        if self.last:
            ahead = path.trend.ahead(1 + len(self.held))
            expected = min(ahead.level, path.trend.level, max(self.last))
            if self.learned >= FEWEST_BEFORE and ahead.variance < _UNKNOWN and unit > 0.0:
                scale = unit * math.sqrt(ahead.variance)
                latest, sized = (score.value - expected) / scale, max(self.least, scale * noise.spread)
                [before] = path.carried([self.latest if self.held else path.latest], self.correlation)
                short = expected + min(0.0, before) * scale - score.value
                above = score.value - ahead.level - before * scale
                self.fallen = max(0.0, self.fallen + _excess(short / sized, noise, limit=limit))
                self.risen = max(0.0, self.risen + _normal(above / sized, noise) - _ALLOWANCE)
            if self.fallen > limit:
                alarm = Alarm(at, self.held[0][0] if self.held else at, expected)
        self.latest = latest
        self.held.append((at, score))
        held = [earlier for _, earlier in self.held]
        if alarm is not None:
            self._begin(held)
        elif self.fallen > 0.0:
            self.risen, self.rising = 0.0, []
        else:
            for earlier in held:
                self._learn(earlier)
            self.held = []
            self.rising = [*self.rising, score] if self.risen > 0.0 else []
            if self.risen > limit:  # a jump upwards is no news, but the level and slope before it are past
                self._begin(self.rising, unlearned=len(self.rising))
        self.stderr = score.stderr
        return alarm

    def _begin(self, scores: Sequence[Score], *, unlearned: int = 0) -> None:
        self.paths = [_Path(None, path.bends, path.errors[: len(path.errors) - unlearned]) for path in self.paths]
        self.last, self.held, self.rising, self.fallen, self.risen = [], [], [], 0.0, 0.0
        for score in scores:
            self._learn(score)

    def _learn(self, score: Score) -> None:
        unit = max(score.stderr, self.stderr)
        self.paths = [path.met(score.value, unit=unit) for path in self.paths]
        self.learned, self.last = self.learned + 1, [*self.last[-2:], score.value]


def _bounded(errors: Sequence[float], reach: float) -> list[float]:
    return [error if -reach < error < reach else math.copysign(reach, error) for error in errors]


def _excess(shortfall: float, noise: _Noise, *, limit: float) -> float:
    excess, alone = _normal(shortfall, noise) - _ALLOWANCE, _ALONE * limit
    if excess <= alone:
        return excess
    return max(alone, _normal(shortfall, _Noise(noise.spread, min(_HEAVY, noise.freedom))) - _ALLOWANCE)


def _normal(deviation: float, noise: _Noise) -> float:
    from scipy import special

    if noise.freedom <= 0:
        return 0.0
    return math.copysign(-float(special.ndtri(special.stdtr(noise.freedom, -abs(deviation)))), deviation)


def _correlations(paths: Sequence[_Path]) -> list[float]:
    weight, none = _COMMON
    common = max(0.0, sum(path.lagged[0] for path in paths) / (none + sum(path.lagged[1] for path in paths)))
    found = []
    for path in paths:
        own = (path.lagged[0] + weight * common) / (path.lagged[1] + weight)
        hidden = (1 + 3 * own) / len(path.errors) if path.errors else 0.0  # Kendall 1954
        found.append(max(0.0, min(_MOST_ALIKE, own + hidden)))
    return found


def _growth(series: Sequence[Sequence[float]]) -> float:
    long = [errors for errors in series if len(errors) >= 2 * _LATEST]
    latest = [error for errors in long for error in errors[-_LATEST:]]
    usual = clipped_spread([error for errors in long for error in errors]) if long else 0.0
    return max(1.0, clipped_spread(latest) / usual / (1 + 1 / math.sqrt(len(latest)))) if usual else 1.0


def _moderated(own: Sequence[_Noise]) -> list[_Noise]:
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
    from scipy import special

    half = freedom / 2
    return float(special.digamma(half)) - math.log(half), float(special.polygamma(1, half))
