"""Simulates early decisions with a known whole, for `early.py`, and counts how often the whole contradicts them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from tasks.verdicts.statistics.early import EarlyDecision

ALPHA = 0.05
Clusters = Literal["none", "of 5", "unequal"]
_ALIKE = 0.7
"""Share of the variance of flips that questions of a cluster have in common."""
_BATCHES = 16
"""Number of batches of a decision's questions; none is requested after its verdict."""


class Setting(NamedTuple):
    """A kind of checkpoint: `worse` is its loss against the baseline, `flipped` its answers that differ from it."""

    questions: int
    flipped: float
    margin: float
    worse: float
    clusters: Clusters = "none"


@dataclass(frozen=True)
class Outcome:
    setting: Setting
    shares: np.ndarray
    """Share of the questions that each decision used."""
    contradicted: int

    @property
    def unlikely(self) -> bool:
        """True if so many contradictions have a chance below 1 in 100,000 with alpha kept."""
        return float(stats.binom.sf(self.contradicted - 1, len(self.shares), ALPHA)) < 1e-5


TABLE = {
    "unchanged": Setting(14_042, 0.1, 0.02, 0.0),
    "5 points worse": Setting(14_042, 0.1, 0.02, 0.05),
    "2 points better": Setting(14_042, 0.1, 0.02, -0.02),
    "unchanged, margin of 1 point": Setting(14_042, 0.1, 0.01, 0.0),
    "a hundredth of a point on the good side": Setting(14_042, 0.1, 0.02, 0.0199),
    "a hundredth of a point on the bad side": Setting(14_042, 0.1, 0.02, 0.0201),
}
"""Checkpoints against a baseline on as many questions as MMLU has."""


def hardest() -> Iterator[Setting]:
    """Yields checkpoints a question from the margin, on either side of it: the most wrong verdicts."""
    clusters: tuple[Clusters, ...] = ("none", "of 5", "unequal")
    for questions, flipped, margin, kind in itertools.product(
        (200, 1_000, 5_000), (0.05, 0.1, 0.3), (0.01, 0.02, 0.05), clusters
    ):
        lost = round(margin * questions)
        for worse in (lost, lost + 1):
            if lost + 1 <= flipped * questions:
                yield Setting(questions, flipped, margin, worse / questions, kind)


def simulated(setting: Setting, *, decisions: int, seed: int) -> Outcome:
    """Makes decisions, each on new answers, and compares them with the whole."""
    random = np.random.default_rng([seed, *(round(1e6 * abs(number)) for number in setting[:4]), len(setting.clusters)])
    shares, contradicted = np.empty(decisions), 0
    for number in range(decisions):
        clusters, before, after = _answers(random, setting)
        order = random.permutation(int(clusters.max()) + 1)[clusters]
        asked = np.lexsort((order,))
        threshold = float(before.mean()) - setting.margin
        decision = EarlyDecision(
            draws=order[asked].tolist(),
            shares=np.full(setting.questions, 1 / setting.questions).tolist(),
            predictions=before[asked].tolist(),
            threshold=threshold,
            alpha=ALPHA,
        )
        ends = np.flatnonzero(np.diff(order[asked], append=-1)) + 1
        begin = 0
        for end in ends[np.unique(np.linspace(0, len(ends) - 1, _BATCHES + 1, dtype=int)[1:])]:
            if decision.word is None:
                decision.add(after[asked][begin:end].tolist())
            begin = end
        shares[number] = decision.asked / setting.questions
        whole = "not worse" if after.mean() >= threshold - 1e-9 else "worse"
        contradicted += decision.word != whole
    return Outcome(setting, shares, contradicted)


def _answers(random: np.random.Generator, setting: Setting) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # losses and gains are clustered
    number = setting.questions
    sizes = {
        "none": np.ones(number, dtype=int),
        "of 5": np.full(number, 5),
        "unequal": random.geometric(0.2, size=number),
    }[setting.clusters]
    clusters = np.repeat(np.arange(number), sizes)[:number]
    before = (random.random(number) < 0.6).astype(float)
    flips, net = round(setting.flipped * number), round(setting.worse * number)
    lost = (flips + net) // 2
    latent = np.sqrt(_ALIKE) * random.normal(size=number)[clusters] + np.sqrt(1 - _ALIKE) * random.normal(size=number)
    ranked = np.argsort(latent)
    after = before.copy()
    after[ranked[before[ranked] == 1][:lost]] = 0.0
    after[ranked[::-1][before[ranked[::-1]] == 0][: lost - net]] = 1.0
    return clusters, before, after
