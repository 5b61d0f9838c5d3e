"""95 % intervals of shares, means and ratios."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # the import takes 0.15 s, which most processes do not need
    import numpy as np

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


def difference_interval(first: tuple[float, float, float], second: tuple[float, float, float]) -> tuple[float, float]:
    """Returns the interval of the first less the second of two independent values, given with the ends of theirs.

    MOVER (Newcombe 1998, Zou and Donner 2008): valid for few questions and for clusters, as far as both intervals are.
    """
    (value, low, high), (other, other_low, other_high) = first, second
    down, up = math.hypot(value - low, other_high - other), math.hypot(high - value, other - other_low)
    return value - other - down, value - other + up


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


@dataclass(frozen=True)
class Stratum:
    """Values of a benchmark's questions, with the cluster of each, and the weight of the stratum.

    `sizes` are the divisors of the sums of values, such as numbers of words; by default 1 per question.
    """

    values: Sequence[float] | np.ndarray
    clusters: Sequence[Hashable]
    weight: float = 1.0
    sizes: Sequence[float] | np.ndarray | None = None


class Estimate(NamedTuple):
    """A weighted mean with the numbers for its interval; `stderr` is None for a single cluster.

    `skewness` is that of the mean. `constant` has weight, mean and number of clusters of each stratum with equal values
    in all clusters, which adds nothing to the error.
    """

    value: float
    stderr: float | None
    freedom: float
    skewness: float
    clusters: int
    constant: tuple[tuple[float, float, int], ...] = ()


class _Moments(NamedTuple):
    variance: float
    third: float
    freedom: float


def estimate(strata: Sequence[Stratum]) -> Estimate:
    """Returns the weighted mean of strata means; strata with a single cluster are pooled into a common stratum."""
    import numpy as np

    value, clusters = 0.0, 0
    moments: list[_Moments] = []
    constant: list[tuple[float, float, int]] = []
    alone: list[tuple[float, float]] = []
    for stratum in strata:
        values = np.asarray(stratum.values, dtype=float)
        sizes = np.ones(len(values)) if stratum.sizes is None else np.asarray(stratum.sizes, dtype=float)
        mean = float(values.sum() / sizes.sum())
        codes = _codes(stratum.clusters)
        number = int(codes.max()) + 1
        value += stratum.weight * mean
        clusters += number
        if number == 1:
            alone.append((mean, stratum.weight))
        else:
            moments.append(_moments(np.bincount(codes, values), np.bincount(codes, sizes), stratum.weight))
            if moments[-1].variance == 0.0:
                constant.append((stratum.weight, mean, number))
    if len(alone) > 1:
        means, weights = np.array(alone).T
        moments.append(_moments(means * weights, weights, float(weights.sum())))
        if moments[-1].variance == 0.0:
            constant.append((float(weights.sum()), alone[0][0], len(alone)))
    elif alone:
        return Estimate(value, None, 0.0, 0.0, clusters)
    variance = math.fsum(part.variance for part in moments)
    if variance == 0.0:
        return Estimate(value, 0.0, math.inf, 0.0, clusters, tuple(constant))
    freedom = variance**2 / math.fsum(part.variance**2 / part.freedom for part in moments)
    third = math.fsum(part.third for part in moments)
    return Estimate(value, math.sqrt(variance), freedom, third / variance**1.5, clusters, tuple(constant))


def _codes(clusters: Sequence[Hashable]) -> np.ndarray:
    import numpy as np

    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters])


def _moments(sums: np.ndarray, sizes: np.ndarray, weight: float) -> _Moments:
    import numpy as np

    shares = sizes / sizes.sum()
    residuals = sums - shares * sums.sum()
    residuals[np.abs(residuals) <= 1e-12 * np.abs(sums).max(initial=0.0)] = 0.0  # equal values
    parts = weight * residuals / sizes.sum()
    freedom = _freedom(shares)
    return _Moments(float((parts**2 / (1 - shares)).sum()), float((parts**3).sum()), freedom)


def _freedom(shares: np.ndarray) -> float:
    weights, spread = 1 / (1 - shares), shares**1.5
    pulled = weights * shares
    common = float((pulled * shares).sum())
    sums = [float((spread * pulled**power).sum()) for power in range(3)]
    trace = float((spread * (weights + common - 2 * pulled)).sum())
    cross_terms = common**2 * sums[0] ** 2 + 2 * sums[0] * sums[2] - 4 * common * sums[0] * sums[1] + 2 * sums[1] ** 2
    return trace**2 / (float((spread**2 * weights * (weights + 2 * common - 4 * pulled)).sum()) + cross_terms)
