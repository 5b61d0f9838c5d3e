"""Is a difference more than chance? Tests for two lists of scores, and for several tests at once.

Two checkpoints are asked the same questions, so their scores come in pairs, and what differs within pairs is tested:
much finer than comparing two means as if they had been taken over different questions. Everything here is a function of
its arguments; a bootstrap draws from the seed it is given.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # it takes 0.15 s, which is for nothing in most processes
    import numpy as np

RESAMPLES = 9_999
"""Samples that a bootstrap draws; with them no p is below 0.0001."""
CONFIDENCE = 0.95
"""Share of intervals that hold the true difference."""
_DRAWN_AT_ONCE = 4_000_000  # numbers, which is 32 MB

TestName = Literal["McNemar, exact", "paired bootstrap", "z, unpaired", "none"]
Adjustment = Literal["bh", "holm", "none"]


@dataclass(frozen=True)
class Finding:
    """A difference (second less first), its 95 % interval, and how likely one as large is by chance alone.

    Interval and `p` are None where they cannot be known: nothing was repeated, and no standard error was given.
    """

    test: TestName
    difference: float
    low: float | None
    high: float | None
    p: float | None

    def scaled(self, scale: float) -> Finding:
        """Returns the difference on a scale on which scores are so many times as large."""
        low, high = (None if end is None else end * scale for end in (self.low, self.high))
        return replace(self, difference=self.difference * scale, low=low, high=high)


def compare_pairs(first: Sequence[float], second: Sequence[float], *, seed: Sequence[int]) -> Finding:
    """The test that fits: McNemar's where every score is 0 or 1, else a bootstrap of the differences.

    Args:
        first: scores of the one checkpoint.
        second: scores of the other one to the same questions, in the same order.
        seed: what the bootstrap draws from.
    """
    import numpy as np

    before, after = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if np.isin(before, (0.0, 1.0)).all() and np.isin(after, (0.0, 1.0)).all():
        return mcnemar(before.astype(bool), after.astype(bool))
    return paired_bootstrap(after - before, seed=seed)


def mcnemar(first: np.ndarray, second: np.ndarray) -> Finding:
    """McNemar's exact test: of the questions that only one of two got right, are as many on either side?

    The interval is that of Bonett and Price (2012), which holds for few questions and for none that differ.
    """
    questions = len(first)
    lost, won = int((first & ~second).sum()), int((~first & second).sum())
    difference = (won - lost) / questions if questions else math.nan
    if questions < 2:
        return Finding("none", difference, None, None, None)
    p = float(_stats().binomtest(won, won + lost, 0.5).pvalue) if won + lost else 1.0
    share_won, share_lost = (won + 1) / (questions + 2), (lost + 1) / (questions + 2)
    middle = share_won - share_lost
    reach = _z() * math.sqrt((share_won + share_lost - middle**2) / (questions + 2))
    return Finding("McNemar, exact", difference, max(-1.0, middle - reach), min(1.0, middle + reach), p)


def paired_bootstrap(differences: np.ndarray, *, seed: Sequence[int], resamples: int = RESAMPLES) -> Finding:
    """Draws the questions anew, again and again: a percentile interval of their mean difference, and its p.

    `p` is the share of draws that lie as far from the mean found as that lies from zero, after both were widened by
    √(n / (n − 1)), since drawn means vary that much too little. It is never below 2^(1 − n): with n questions no test
    that only asks which side is larger could say more.
    """
    import numpy as np

    questions = len(differences)
    mean = float(differences.mean()) if questions else math.nan
    if questions < 2:
        return Finding("none", mean, None, None, None)
    if np.ptp(differences) == 0.0:
        p = 1.0 if mean == 0.0 else max(1 / (resamples + 1), 2.0 ** (1 - questions))
        return Finding("paired bootstrap", mean, mean, mean, p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", _stats().DegenerateDataWarning)
        drawn = _stats().bootstrap(
            (differences,),
            np.mean,
            n_resamples=resamples,
            batch=max(1, _DRAWN_AT_ONCE // questions),
            vectorized=True,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(list(seed)),
        )
    away = np.abs(drawn.bootstrap_distribution - mean) * math.sqrt(questions / (questions - 1))
    p = (1 + int((away >= abs(mean)).sum())) / (resamples + 1)
    interval = drawn.confidence_interval
    return Finding("paired bootstrap", mean, float(interval.low), float(interval.high), max(p, 2.0 ** (1 - questions)))


def compare_means(first: float, second: float, *, stderrs: tuple[float | None, float | None]) -> Finding:
    """A z test of two means from their standard errors, as if they were taken over different questions."""
    difference = second - first
    known = [stderr for stderr in stderrs if stderr is not None]
    stderr = math.hypot(*known)
    if len(known) < 2 or stderr == 0.0:
        return Finding("none", difference, None, None, None)
    p = float(2 * _stats().norm.sf(abs(difference) / stderr))
    return Finding("z, unpaired", difference, difference - _z() * stderr, difference + _z() * stderr, p)


def adjusted(p_values: Sequence[float | None], *, by: Adjustment) -> list[float | None]:
    """Returns what each p is worth among so many; those that are None are not among them.

    Args:
        p_values: one for each test.
        by: `bh` (Benjamini and Hochberg) bounds the share of false differences among those called so, `holm` the
            chance of even one; `none` leaves them as they are.
    """
    known = [p for p in p_values if p is not None]
    if not known or by == "none":
        return list(p_values)
    found = iter(_stats().false_discovery_control(known, method="bh") if by == "bh" else _holm(known))
    return [None if p is None else float(next(found)) for p in p_values]


def _holm(p_values: Sequence[float]) -> np.ndarray:
    import numpy as np

    order = np.argsort(p_values, kind="stable")
    stepped = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1))
    result = np.empty_like(stepped)
    result[order] = np.minimum(stepped, 1.0)
    return result


def _z() -> float:
    return float(_stats().norm.ppf(0.5 + CONFIDENCE / 2))


def _stats() -> Any:
    from scipy import stats  # 1 to 2.6 s, which a flow that compares nothing need not spend

    return stats
