"""95 % intervals of shares, means and ratios."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

from tasks.statistics.clusters import Estimate, Stratum, estimate

CONFIDENCE = 0.95
"""Coverage of the intervals."""
_FEW_QUESTIONS = 200
_FEW_RIGHT = 5

RatioForm = Literal["exp", "bits", "nats"]
"""Transformations of a log-likelihood per unit: perplexity, bits, or nats."""


class Interval(NamedTuple):
    """A standard error and the ends of a 95 % interval, None if unknown; and the name of the method."""

    stderr: float | None
    low: float | None
    high: float | None
    method: str = ""

    def scaled(self, scale: float) -> Interval:
        stderr, low, high = (None if number is None else number * scale for number in self[:3])
        return Interval(stderr, low, high, self.method)


def mean_interval(strata: Sequence[Stratum]) -> Interval:
    """Returns the interval of a weighted mean: of a share if all values are 0 or 1, else of a t distribution.

    Strata with equal values in all clusters hide their error, so their own intervals are combined with the rest
    (MOVER).
    """
    import numpy as np

    mean = estimate(strata)
    values = np.concatenate([np.asarray(stratum.values, dtype=float) for stratum in strata])
    if np.isin(values, (0.0, 1.0)).all():
        alone = len(strata) == 1 and mean.clusters == len(values)
        ends = _share(int(values.sum()), len(values)) if alone else _clustered_share(mean, len(values))
    elif not mean.stderr:
        return Interval(mean.stderr, None, None)
    else:
        ends = _mean(mean, mean.stderr)
    if len(strata) > 1 and mean.constant:
        ends = _with_constant(mean, ends, least=min(0.0, values.min()), most=max(1.0, values.max()))
    return Interval(mean.stderr, *ends)


def unseen_reach(parts: Sequence[tuple[float, int]]) -> float:
    """Returns the largest plausible change of a value by unseen clusters, for parts with equal values in all clusters.

    `parts` has the change of the value if all clusters of a part differed, and the number of clusters seen.
    """
    tail, parts = (1 - CONFIDENCE) / 2, [(most, number) for most, number in parts if most > 0.0]
    if not parts:
        return 0.0
    each = math.hypot(*(most * (1 - tail ** (1 / number)) for most, number in parts))
    # Jointly: under Π (1 − q)^n ≥ tail the change is largest if each part is as little known as the least known part.
    whole = math.fsum(most for most, _ in parts)
    return min(each, whole * (1 - tail ** (1 / (whole * min(number / most for most, number in parts)))))


def ratio_interval(sums: Sequence[tuple[float, float]], clusters: Sequence[Hashable], *, form: RatioForm) -> Interval:
    """Returns the interval of a ratio of log-likelihoods to units, such as a perplexity, computed in nats."""
    mean = estimate([Stratum([pair[0] for pair in sums], clusters, sizes=[pair[1] for pair in sums])])
    value = ratio_value(mean.value, form)
    if mean.stderr is None:
        return Interval(None, None, None)
    reach = quantile(mean.freedom) * mean.stderr
    ends = (ratio_value(mean.value + reach, form), ratio_value(mean.value - reach, form))
    return Interval(mean.stderr * abs(ratio_slope(value, form)), *ends, "t interval of a ratio of sums, taken in nats")


def normal_interval(value: float, stderr: float | None) -> Interval:
    """Returns the normal interval for a standard error."""
    if stderr is None or not math.isfinite(stderr):
        return Interval(stderr, None, None)
    reach = quantile(math.inf) * stderr
    return Interval(stderr, value - reach, value + reach, "normal, from the standard error")


def ratio_value(log_likelihood_per_unit: float, form: RatioForm) -> float:
    """Converts a log-likelihood per unit to a value; infinite on overflow."""
    if form == "exp":
        try:
            return math.exp(-log_likelihood_per_unit)
        except OverflowError:
            return math.inf
    return -log_likelihood_per_unit / (math.log(2) if form == "bits" else 1.0)


def ratio_slope(value: float, form: RatioForm) -> float:
    """Returns the derivative of a value with respect to its log-likelihood per unit."""
    return {"exp": -value, "bits": -1 / math.log(2), "nats": -1.0}[form]


def quantile(freedom: float, *, tail: float = (1 - CONFIDENCE) / 2) -> float:
    """Returns the upper quantile of a t distribution with probability `tail` above it, in standard errors."""
    from scipy import special  # imports in a third of the time of scipy.stats

    return float(-special.stdtrit(freedom, tail) if math.isfinite(freedom) else -special.ndtri(tail))


def tail_beyond(errors: float, freedom: float) -> float:
    """Returns the probability of a t distribution above `errors` standard errors."""
    from scipy import special

    return float(special.stdtr(freedom, -errors) if math.isfinite(freedom) else special.ndtr(-errors))


def _share(right: int, questions: int) -> tuple[float, float, str]:
    from scipy import special

    wrong = questions - right
    if questions < _FEW_QUESTIONS or min(right, wrong) < _FEW_RIGHT:
        tail = (1 - CONFIDENCE) / 2
        low = float(special.betaincinv(right, wrong + 1, tail)) if right else 0.0
        return low, float(special.betaincinv(right + 1, wrong, 1 - tail)) if wrong else 1.0, "Clopper-Pearson"
    reach = quantile(math.inf)
    whole = 2 * (questions + reach**2)
    middle = (2 * right + reach**2) / whole
    half = reach / whole * math.sqrt(4 * right * wrong / questions + reach**2)
    return middle - half, middle + half, "Wilson"


def _clustered_share(mean: Estimate, questions: int) -> tuple[float | None, float | None, str]:
    share, variance = min(1.0, max(0.0, mean.value)), (mean.stderr or 0.0) ** 2
    if mean.stderr is None and mean.clusters < 2:
        return None, None, ""
    effective = min(questions, share * (1 - share) / variance) if variance else mean.clusters
    reach = quantile(mean.freedom if variance else mean.clusters - 1)
    spread = reach**2 / effective
    middle = (share + spread / 2) / (1 + spread)
    half = reach / (1 + spread) * math.sqrt(share * (1 - share) / effective + spread / (4 * effective))
    return max(0.0, middle - half), min(1.0, middle + half), "Wilson, on the effective number of questions"


def _with_constant(
    whole: Estimate, ends: tuple[float | None, float | None, str], *, least: float, most: float
) -> tuple[float | None, float | None, str]:
    low, high, method = ends
    if low is None or high is None:
        return ends
    if not whole.stderr:
        low = high = whole.value
    down = unseen_reach([(weight * (mean - least), number) for weight, mean, number in whole.constant])
    up = unseen_reach([(weight * (most - mean), number) for weight, mean, number in whole.constant])
    reached = whole.value - math.hypot(whole.value - low, down), whole.value + math.hypot(high - whole.value, up)
    return max(least, reached[0]), min(most, reached[1]), f"MOVER: {method}; parts that are all the same by clusters"


def _mean(mean: Estimate, stderr: float) -> tuple[float, float, str]:
    reach, third = quantile(mean.freedom), mean.skewness / 3

    def end(reach: float) -> float:
        bent = (math.cbrt(1 + 3 * third * (reach - mean.skewness / 6)) - 1) / third if abs(third) > 1e-6 else reach
        return mean.value - bent * stderr

    return end(reach), end(-reach), "t interval, corrected for skewness"
