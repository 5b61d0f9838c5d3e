"""Alarms of a run's curves: drops of a score that are larger than the noise of training and questions.

A local level with slope is fitted to the checkpoints of each series and predicts the next. A downward CUSUM (Page
1954) sums the shortfalls from the prediction, less an allowance; above a threshold it raises an alarm, and the level
restarts. Comparing a checkpoint only with its neighbor has no memory, and takes jitter for regressions.

- The level follows at the speed that has predicted best so far: slowly on a flat curve, fast at a bend.
- While the sum is above zero nothing is fitted: a suspected drop does not become the level. If the sum returns to zero,
  the scores held back are fitted.
- Shortfalls are measured in units of the spread of earlier prediction errors, relative to the standard error of the
  questions. The spread is moderated by the other series of the run (Smyth 2004, empirical Bayes), and is at least a
  quarter of that standard error. It comes from few checkpoints, so each shortfall is converted by Student's t to the
  normal quantile of the same probability (Hawkins 1987).
- The end of a rise is no drop: the expected score is at most the level, and at most the best of the last three scores.
- Autocorrelated errors are predicted too (AR(1), with a lag-1 correlation shared by the series of a run); the spread is
  that of the remainder. It grows if the latest errors of the run are larger.
- A single shortfall stays below the threshold unless it is larger than heavy tails explain: an outlier is no level.
- The threshold follows from the mean number of checkpoints between two false alarms (Siegmund 1985). That number is
  shared by the series of a run, so each series gets it multiplied by their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import mul
from typing import NamedTuple

from tasks.verdicts.statistics.training_noise import clipped_spread

CHECKPOINTS_BETWEEN_FALSE_ALARMS = 1_000
"""Mean distance of two false alarms of a run with any number of series: 5 % of runs with 50 checkpoints have any."""
FEWEST_BEFORE = 10
"""Checkpoints of a series before it can raise alarms."""
_ALLOWANCE = 2.0  # standard deviations, half of the shift to detect: 2 points where jitter is half a point
_SLOPES = (0.0001, 0.003, 0.1)  # variances of the slope's change per checkpoint, relative to the noise variance
_BETTER = 1.1  # a path that bends more is used if it reduces the error by more than this factor
_STEEP = 1e6  # variance of an unknown slope, relative to the noise variance
_OVERSHOOT = 1.166  # mean overshoot of a sum of normal numbers over a threshold (Siegmund 1985)
_CALIBRATION = 0.82  # of the threshold, by simulation: the approximation is for smaller steps, any of which may alarm
_ALONE = 0.9  # of the threshold: the most that a single shortfall adds, unless it adds more
_HEAVY = 3.0  # under a Student's t with at most this many degrees of freedom
_MOST_ALIKE = 0.95  # lag-1 correlation
_REACH, _CARRIED = (2.5, 4.0)  # clipping of errors, in spreads: in the correlation, and in the AR(1) prediction
_COMMON = 30.0, 5.0  # prior weights in pairs of errors: of the common correlation for each series, of 0 for the common
_LATEST = 5  # latest errors of each series, to detect growing jitter
_WORTH = 0.5  # degrees of freedom per prediction error, by simulation: the level is estimated from them too
_SHORTEST = 0.25  # of the questions' standard error: the spread if neighbors answer 97 % of questions alike
_REMEMBERED = 40  # prediction errors, so that a training that calms down is judged by its recent spread
_MOST_BORROWED = 200.0  # largest degrees of freedom from the other series of a run
_FEWEST_ERRORS, _FEWEST_ALIKE = 5, 4  # fewest prediction errors of a series for the moderation, and fewest such series
_UNKNOWN = 50.0  # relative to the noise variance: predictions of larger variance are not used


@dataclass(frozen=True)
class Score:
    """A score, turned so that higher is better, and the standard error from its questions, on the same scale."""

    value: float
    stderr: float
    breaks: bool = False
    """True if it does not continue the earlier scores."""
    unvaried: bool = False
    """True if all answers have equal scores: the error comes from the interval, and is a lower limit of noise."""


class Alarm(NamedTuple):
    """A drop detected at index `at` of a series, started at index `since`, below the score `expected`."""

    at: int
    since: int
    expected: float


def alarms(
    series: Sequence[Sequence[Score | None]], *, distance: int = CHECKPOINTS_BETWEEN_FALSE_ALARMS
) -> list[list[Alarm]]:
    """Returns the alarms of each series of a run; `distance` is the mean number of checkpoints between false alarms.

    `series` has scores at the same checkpoints for all series; None for a missing score.
    """
    watched = [_Series() for _ in series]
    limit = threshold(distance * len(series)) if series else 0.0
    raised: list[list[Alarm]] = [[] for _ in series]
    for at in range(max(map(len, series), default=0)):
        scored = [
            (state, score, alarms)
            for state, scores, alarms in zip(watched, series, raised, strict=True)
            if (score := scores[at] if at < len(scores) else None) is not None
        ]
        states = [state for state, _, _ in scored]
        by_path = [_correlations([state.paths[number] for state in states]) for number in range(len(_SLOPES))]
        for state, correlations in zip(states, zip(*by_path, strict=True), strict=True):
            state.follow(correlations)
        grown = _growth([[error / state.noise.spread for error in state.path.errors] for state in states])
        noises = _moderated([_Noise(state.noise.spread * grown, state.noise.freedom) for state in states])
        for (state, score, alarms), noise in zip(scored, noises, strict=True):
            if alarm := state.takes(at, score, noise=noise, limit=limit):
                alarms.append(alarm)
    return raised


def threshold(distance: float) -> float:
    """Returns the CUSUM threshold for a mean number of checkpoints between two false alarms."""
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        reach = 2 * _ALLOWANCE * (middle + _OVERSHOOT)
        low, high = (middle, high) if math.exp(reach) - reach - 1 < distance * 2 * _ALLOWANCE**2 else (low, middle)
    return high * _CALIBRATION


class _Noise(NamedTuple):
    spread: float
    freedom: float


class _Trend(NamedTuple):  # Kalman filter; variances are relative to the noise variance
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
    start: _Trend | None
    bends: float
    errors: tuple[float, ...] = ()  # of predictions, in standard errors of the questions
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
            if self.risen > limit:  # a jump upwards raises no alarm, but invalidates level and slope
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
    correlations = []
    for path in paths:
        own = (path.lagged[0] + weight * common) / (path.lagged[1] + weight)
        hidden = (1 + 3 * own) / len(path.errors) if path.errors else 0.0  # Kendall 1954
        correlations.append(max(0.0, min(_MOST_ALIKE, own + hidden)))
    return correlations


def _growth(series: Sequence[Sequence[float]]) -> float:
    long = [errors for errors in series if len(errors) >= 2 * _LATEST]
    latest = [error for errors in long for error in errors[-_LATEST:]]
    usual = clipped_spread([error for errors in long for error in errors]) if long else 0.0
    return max(1.0, clipped_spread(latest) / usual / (1 + 1 / math.sqrt(len(latest)))) if usual else 1.0


def _moderated(own: Sequence[_Noise]) -> list[_Noise]:
    known = [noise for noise in own if noise.freedom >= _WORTH * _FEWEST_ERRORS]
    if len(known) < _FEWEST_ALIKE:
        return list(own)
    centred = [2 * math.log(noise.spread) - _log_chi_square(noise.freedom)[0] for noise in known]
    mean = math.fsum(centred) / len(centred)
    chance = math.fsum(_log_chi_square(noise.freedom)[1] for noise in known) / len(known)
    more = math.fsum((value - mean) ** 2 for value in centred) / (len(centred) - 1) - chance
    borrowed = min(_MOST_BORROWED, (1 + math.sqrt(1 + 2 * more)) / more if more > 0 else math.inf)  # inverse trigamma
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
