"""Means over questions in clusters and strata, with errors that are valid for few clusters of unequal size.

Questions about the same passage are correlated, so a cluster counts as a unit (Miller 2024, arXiv 2411.00640).
Variances are those of Bell and McCaffrey (2002; CR2), which are not too small for few clusters. Degrees of freedom are
G − 1 for G clusters of equal size, and fewer for unequal sizes. Strata, such as the subjects of MMLU, are weighted and
never pooled.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the import takes 0.15 s, which most processes do not need
    import numpy as np


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
