"""Significance tests for the difference of two checkpoints evaluated on the same questions.

Paired differences are tested, which is more powerful than comparing two means over independent questions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from tasks.verdicts.statistics.intervals import (
    RatioForm,
    Stratum,
    estimate,
    quantile,
    ratio_slope,
    ratio_value,
    tail_beyond,
    unseen_reach,
)

if TYPE_CHECKING:  # the import takes 0.15 s, which most processes do not need
    import numpy as np

_HALVINGS = 50
TestName = Literal["McNemar, mid-p", "paired t", "paired ratio", "z, unpaired", "none"]


@dataclass(frozen=True)
class Finding:
    """A difference (second less first), its 95 % interval, and its p-value.

    Interval, `p` and standard error are None if they cannot be computed, without repetition or a given standard error.
    `clusters` is the number of independent units tested.
    """

    test: TestName
    difference: float
    low: float | None
    high: float | None
    p: float | None
    stderr: float | None = None
    freedom: float = math.inf
    clusters: int | None = None

    def scaled(self, scale: float) -> Finding:
        low, high, stderr = (
            None if number is None else number * scale for number in (self.low, self.high, self.stderr)
        )
        return replace(self, difference=self.difference * scale, low=low, high=high, stderr=stderr)

    def detectable(self, missed: float) -> float | None:
        """Returns the smallest loss that the interval of an equal checkpoint excludes with probability 1 − `missed`."""
        if self.stderr is None:
            return None
        return (quantile(self.freedom) + quantile(self.freedom, tail=missed)) * self.stderr


@dataclass(frozen=True)
class PairedStratum:
    """Scores of two checkpoints on the same questions of a benchmark, with clusters and weight as in `Stratum`."""

    first: Sequence[float]
    second: Sequence[float]
    clusters: Sequence[Hashable]
    weight: float = 1.0


def compare_pairs(strata: Sequence[PairedStratum]) -> Finding:
    """Chooses the test: McNemar's for independent questions with scores 0 or 1, else a t test over clusters."""
    import numpy as np

    pairs = [(np.asarray(stratum.first, dtype=float), np.asarray(stratum.second, dtype=float)) for stratum in strata]
    scores = np.concatenate([side for pair in pairs for side in pair])
    if len(strata) == 1 and len(set(strata[0].clusters)) == len(pairs[0][0]) and np.isin(scores, (0.0, 1.0)).all():
        return mcnemar(pairs[0][0].astype(bool), pairs[0][1].astype(bool))
    differences = [
        Stratum(after - before, stratum.clusters, stratum.weight)
        for stratum, (before, after) in zip(strata, pairs, strict=True)
    ]
    return _paired_t(differences, largest=float(max(1.0, scores.max()) - min(0.0, scores.min())))


class McNemarP(NamedTuple):
    """Two-sided p-values of McNemar's test: exact, and mid-p."""

    exact: float
    mid: float


def mcnemar_p(won: int, lost: int) -> McNemarP:
    """Returns McNemar's p-values, by the binomial distribution, from the numbers of questions won and lost."""
    from scipy import special

    if won == lost:
        return McNemarP(1.0, 1.0)
    fewer, differing = min(won, lost), won + lost
    at_most = float(special.bdtr(fewer, differing, 0.5))
    fewer_still = float(special.bdtr(fewer - 1, differing, 0.5)) if fewer else 0.0
    return McNemarP(min(1.0, 2 * at_most), at_most + fewer_still)


def mcnemar(first: np.ndarray, second: np.ndarray) -> Finding:
    """Runs McNemar's test on the questions that only a single checkpoint answered correctly.

    Uses the mid-p (Fagerland, Lydersen and Laake 2013), since the exact p is too conservative. The interval is the
    score interval (Tango 1998); its lower end is above a true loss in 3.2 % of cases at most (10 to 200 questions);
    that of Bonett and Price in up to 6.9 %. The standard error is that of an equal checkpoint.
    """
    questions = len(first)
    lost, won = int((first & ~second).sum()), int((~first & second).sum())
    difference = (won - lost) / questions if questions else math.nan
    if questions < 2:
        return Finding("none", difference, None, None, None)
    p = mcnemar_p(won, lost).mid
    low, high, alike = score_bound(won, lost, questions), -score_bound(lost, won, questions), (won + lost) / 2
    stderr = -score_bound(alike, alike, questions) / quantile(math.inf)
    return Finding("McNemar, mid-p", difference, low, high, p, stderr, clusters=questions)


def score_bound(won: float, lost: float, questions: int) -> float:
    """Returns the lower end of the score interval of a difference between two paired shares (Tango 1998).

    It is the largest difference below the observed difference that is rejected at 2.5 %. Of all `questions`, only the
    second checkpoint answered `won` correctly, and only the first `lost`.
    """
    low, high, reach = -1.0, (won - lost) / questions, quantile(math.inf)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        linear = (2 * questions - won + lost) * middle - won - lost
        root = linear**2 + 8 * questions * lost * middle * (1 - middle)
        share_lost = (math.sqrt(max(0.0, root)) - linear) / (4 * questions)
        variance = questions * (2 * share_lost + middle * (1 - middle))
        contradicted = (won - lost - questions * middle) ** 2 > reach**2 * variance
        low, high = (middle, high) if contradicted else (low, middle)
    return low


def paired_ratio(
    first: Sequence[tuple[float, float]],
    second: Sequence[tuple[float, float]],
    clusters: Sequence[Hashable],
    *,
    form: RatioForm,
) -> Finding:
    """Compares two ratios of log-likelihoods to units over the same documents, by each document's influence on both."""
    import numpy as np

    before, after = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    ratios = [float(side[:, 0].sum() / side[:, 1].sum()) for side in (before, after)]
    values = [ratio_value(ratio, form) for ratio in ratios]
    slopes = [ratio_slope(value, form) for value in values]
    units = before[:, 1] + after[:, 1]
    added = [
        slope * (side[:, 0] - ratio * side[:, 1]) / side[:, 1].sum()
        for side, ratio, slope in zip((before, after), ratios, slopes, strict=True)
    ]
    difference = values[1] - values[0]
    influence = (added[1] - added[0]) * units.sum() + difference * units
    finding = _paired_t([Stratum(influence, clusters, sizes=units)], largest=math.nan)
    return replace(finding, test="paired ratio" if finding.p is not None else "none", difference=difference)


def compare_means(first: float, second: float, *, stderrs: tuple[float | None, float | None]) -> Finding:
    """Runs a z test of two means by their standard errors, as if over independent questions."""
    difference = second - first
    known = [stderr for stderr in stderrs if stderr is not None]
    stderr = math.hypot(*known)
    if len(known) < 2 or stderr == 0.0:
        return Finding("none", difference, None, None, None)
    p = 2 * tail_beyond(abs(difference) / stderr, math.inf)
    reach = quantile(math.inf) * stderr
    return Finding("z, unpaired", difference, difference - reach, difference + reach, p, stderr)


def _paired_t(differences: Sequence[Stratum], *, largest: float) -> Finding:
    change = estimate(differences)
    if change.stderr is None:
        return Finding("none", change.value, None, None, None)
    if math.isnan(largest) and change.stderr == 0.0:  # equal likelihoods, as only the same weights give
        p = 1.0 if change.value == 0.0 else None
        return Finding("paired t", change.value, change.value, change.value, p, 0.0, clusters=change.clusters)
    # Limits the share of unseen clusters with other values: with more of them, some would have been seen.
    hidden = change.constant if change.stderr == 0.0 or len(differences) > 1 else ()
    unseen = unseen_reach([(weight * (largest + abs(mean)), number) for weight, mean, number in hidden])
    errors = quantile(change.freedom)
    stderr = math.hypot(change.stderr, unseen / errors)
    if change.stderr > 0.0:
        p = 2 * tail_beyond(abs(change.value) / stderr, change.freedom)
    else:
        p = 2.0 ** (1 - min((number for _, mean, number in hidden if mean != 0.0 != change.value), default=1))
    ends = change.value - errors * stderr, change.value + errors * stderr
    return Finding("paired t", change.value, *ends, p, stderr, change.freedom, change.clusters)


Adjustment = Literal["bh", "holm", "none"]
FIRST_BLOCK = 64
"""Number of decisions in a series that share the first half of the error probability."""


def adjusted(p_values: Sequence[float | None], *, by: Adjustment) -> list[float | None]:
    """Returns p-values adjusted for their number; None entries are not counted.

    `bh` (Benjamini and Hochberg) bounds the false discovery rate, `holm` the probability of any false difference;
    `none` returns the p-values unchanged.
    """
    from scipy import stats

    known = [p for p in p_values if p is not None]
    if not known or by == "none":
        return list(p_values)
    adjusted_values = iter(stats.false_discovery_control(known, method="bh") if by == "bh" else _holm(known))
    return [None if p is None else float(next(adjusted_values)) for p in p_values]


def spent(number: int) -> float:
    """Returns the share of the error probability for decision `number`, counted from 1; the shares of all sum to 1.

    The first 64 share a half, the next 128 a quarter, the next 256 an eighth. Shares change rarely, so that a rule that
    could be decided before can be decided again.
    """
    block = ((number - 1) // FIRST_BLOCK + 1).bit_length() - 1
    return 0.5 ** (block + 1) / (FIRST_BLOCK * 2**block)


def _holm(p_values: Sequence[float]) -> np.ndarray:
    import numpy as np

    order = np.argsort(p_values, kind="stable")
    stepped = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1))
    result = np.empty_like(stepped)
    result[order] = np.minimum(stepped, 1.0)
    return result
