"""Simulations of checkpoints that are equal, or differ by a known amount, for `statistics.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from scipy import special

from tasks.verdicts.comparison import ComparedMetric, Pairing
from tasks.verdicts.judge import FALSE_ALARMS, judged_by_margin
from tasks.verdicts.statistics.intervals import Interval, Stratum, estimate, mean_interval, ratio_interval
from tasks.verdicts.statistics.paired import Finding, PairedStratum, compare_means, compare_pairs, paired_ratio, spent

Kind = Literal["binary", "normal", "lognormal"]
RelativeBaseline = Literal["previous", "mean of last 5", "best"]
RELATIVE: tuple[RelativeBaseline, ...] = ("previous", "mean of last 5", "best")
KINDS: tuple[Kind, ...] = ("binary", "normal", "lognormal")
QUESTIONS = (50, 100, 500, 2_000, 14_000)
CLUSTERS = (1, 2, 5, 10, 25, 50)
DOCUMENTS = (20, 62, 200, 1_000)
SHARES = (0.01, 0.1, 0.5)
_ALIKE = 0.4  # share of the variance of a checkpoint's scores that is common within clusters
_MANY = 2_000  # questions, above which a fourth of the trials is enough for minutes, not hours


def alarms(kind: Kind, questions: int, size: int, *, trials: int, seed: int, unequal: bool = False) -> float:
    """Returns the share of pairs of equal checkpoints that differ by p < 0.05, with clusters of a mean size."""
    random = np.random.default_rng([seed, questions, size, KINDS.index(kind), unequal])
    significant = 0
    for _ in range(trials):
        clusters = _clusters(random, questions, size, unequal=unequal)
        difficulty = random.normal(size=len(clusters))
        pair = [_scores(random, kind, difficulty, clusters, size).tolist() for _ in range(2)]
        p = compare_pairs([PairedStratum(pair[0], pair[1], clusters.tolist())]).p
        significant += p is not None and p < 0.05
    return significant / trials


def ratio_alarms(documents: int, *, trials: int, seed: int) -> tuple[float, float]:
    """Returns the share of equal perplexities that differ by p < 0.05, and of intervals that hold the true value."""
    random = np.random.default_rng([seed, documents, 7])
    alarmed = held = 0
    for _ in range(trials):
        words = np.ceil(random.lognormal(5.0, 1.0, documents))
        common = 2.5 + 0.4 * random.normal(size=documents)
        sides = [
            list(zip((-words * (common + 0.1 * random.normal(size=documents))).tolist(), words.tolist(), strict=True))
            for _ in range(2)
        ]
        p = paired_ratio(sides[0], sides[1], range(documents), form="exp").p
        alarmed += p is not None and p < 0.05
        held += _holds(ratio_interval(sides[0], range(documents), form="exp"), math.exp(2.5))
    return alarmed / trials, held / trials


def share_coverage(share: float, questions: int, size: int, *, trials: int, seed: int) -> float:
    """Returns the share of intervals of a share that hold it."""
    random = np.random.default_rng([seed, questions, size, round(1000 * share)])
    threshold = float(special.ndtri(share))
    held = 0
    for _ in range(trials):
        clusters = _clusters(random, questions, size)
        right = _latent(random, clusters, size) < threshold
        held += _holds(mean_interval([Stratum(right.astype(float), clusters.tolist())]), share)
    return held / trials


def mean_coverage(kind: Kind, questions: int, size: int, *, trials: int, seed: int, spread: float = 0.5) -> float:
    """Returns the share of intervals of a mean that hold it."""
    random = np.random.default_rng([seed, questions, size, KINDS.index(kind), 11])
    true = math.exp(spread**2 / 2) if kind == "lognormal" else 0.0
    held = 0
    for _ in range(trials):
        clusters = _clusters(random, questions, size)
        values = spread * _latent(random, clusters, size)
        values = np.exp(values) if kind == "lognormal" else values
        held += _holds(mean_interval([Stratum(values, clusters.tolist())]), true)
    return held / trials


def power(questions: int, *, points: float, alike: float, trials: int, seed: int) -> tuple[float, float]:
    """Returns the share of improvements of a group of 20 subjects that are detected: stratified and paired, and
    unpaired.

    `questions` is the number in all subjects, `alike` the correlation of question difficulty between 2 checkpoints.
    """
    random = np.random.default_rng([seed, questions, round(100 * alike)])
    subjects, each = 20, questions // 20
    significant = [0, 0]
    for _ in range(trials):
        paired: list[PairedStratum] = []
        for share in np.linspace(0.35, 0.85, subjects):
            common = math.sqrt(alike) * random.normal(size=each)
            noise = math.sqrt(1 - alike) * random.normal(size=(2, each))
            sides = [
                (common + own < float(special.ndtri(better))).astype(float).tolist()
                for own, better in zip(noise, (share, share + points), strict=True)
            ]
            paired.append(PairedStratum(sides[0], sides[1], range(each), 1 / subjects))
        whole = [
            estimate([Stratum(scores, stratum.clusters, stratum.weight) for scores, stratum in side])
            for side in ([(s.first, s) for s in paired], [(s.second, s) for s in paired])
        ]
        unpaired = compare_means(whole[0].value, whole[1].value, stderrs=(whole[0].stderr, whole[1].stderr))
        for place, finding in enumerate((compare_pairs(paired), unpaired)):
            significant[place] += finding.p is not None and finding.p < 0.05
    return significant[0] / trials, significant[1] / trials


def refused_runs(
    *, runs: int, seed: int, benchmarks: int = 20, checkpoints: int = 50, questions: int = 2_000, margin: float = 0.08
) -> float:
    """Returns the share of runs of equal checkpoints with any refusal by a gate with a rule for each benchmark."""
    random = np.random.default_rng([seed, benchmarks, checkpoints])
    refused = 0
    for _ in range(runs):
        baseline = [_answers(random, questions, 0.0) for _ in range(benchmarks)]
        refused += any(
            not _goes(random, common, first, margin=margin, false_alarms=FALSE_ALARMS * spent(number) / benchmarks)
            for number in range(1, checkpoints + 1)
            for common, first in baseline
        )
    return refused / runs


def passed_losses(*, trials: int, seed: int, questions: int = 2_000, margin: float = 0.08) -> float:
    """Returns the share of scores worse by the margin that a gate of a single rule lets pass."""
    random = np.random.default_rng([seed, questions])
    passed = 0
    for _ in range(trials):
        common, first = _answers(random, questions, 0.0)
        passed += _goes(random, common, first, margin=margin, false_alarms=FALSE_ALARMS, worse=margin)
    return passed / trials


def refused_by_relative(
    baseline: RelativeBaseline, *, trials: int, seed: int, earlier: int = 30, questions: int = 500, shared: bool = True
) -> float:
    """Returns the share of checkpoints that a gate refuses at its smallest margin, with all `earlier` equally good.

    `shared` divides the false alarms among the candidates for the best, as gates do.
    """
    random = np.random.default_rng([seed, earlier, questions, RELATIVE.index(baseline)])
    false_alarms = FALSE_ALARMS / (earlier if baseline == "best" and shared else 1)
    refused = 0
    for _ in range(trials):
        common = math.sqrt(0.6) * random.normal(size=questions)
        before = np.array([_answered(random, common, 0.0) for _ in range(earlier)])
        held_against = {
            "previous": before[-1],
            "mean of last 5": before[-5:].mean(axis=0),
            "best": before[before.sum(axis=1).argmax()],
        }[baseline]
        second = _answered(random, common, 0.0)
        finding = compare_pairs([PairedStratum(held_against.tolist(), second, range(questions))])
        margin = (finding.detectable(false_alarms) or 0.0) * (1 + 1e-9)
        refused += not judged_by_margin(_compared(finding, questions), margin=margin, false_alarms=false_alarms)[1]
    return refused / trials


def _answers(random: np.random.Generator, questions: int, worse: float) -> tuple[np.ndarray, list[float]]:
    common = math.sqrt(0.6) * random.normal(size=questions)
    return common, _answered(random, common, worse)


def _answered(random: np.random.Generator, common: np.ndarray, worse: float) -> list[float]:
    # 6 of 10 right, less a loss; the same questions are hard for all checkpoints
    own = math.sqrt(0.4) * random.normal(size=len(common))
    return (common + own < float(special.ndtri(0.6 - worse))).astype(float).tolist()


def _goes(
    random: np.random.Generator,
    common: np.ndarray,
    first: list[float],
    *,
    margin: float,
    false_alarms: float,
    worse: float = 0.0,
) -> bool:
    second = _answered(random, common, worse)
    finding = compare_pairs([PairedStratum(first, second, range(len(first)))])
    return judged_by_margin(_compared(finding, len(first)), margin=margin, false_alarms=false_alarms)[1]


def _compared(finding: Finding, questions: int) -> ComparedMetric:
    return ComparedMetric(
        evaluator="lm_evaluation_harness",
        benchmark="simulated",
        metric="acc",
        higher_is_better=True,
        first=0.6,
        second=0.6 + finding.difference,
        recorded=(0.6, 0.6),
        n=(questions, questions),
        pairing=Pairing(questions, 0, 0, 0),
        unpaired_because=None,
        finding=finding,
    )


def _clusters(random: np.random.Generator, questions: int, size: int, *, unequal: bool = False) -> np.ndarray:
    if not unequal:
        return np.arange(questions) // size
    sizes = random.geometric(1 / size, size=questions)
    return np.repeat(np.arange(questions), sizes)[:questions]


def _latent(random: np.random.Generator, clusters: np.ndarray, size: int) -> np.ndarray:
    # correlated within clusters
    own = random.normal(size=len(clusters))
    if size == 1:
        return own
    shared = random.normal(size=int(clusters.max()) + 1)[clusters]
    return math.sqrt(_ALIKE) * shared + math.sqrt(1 - _ALIKE) * own


def _scores(
    random: np.random.Generator, kind: Kind, difficulty: np.ndarray, clusters: np.ndarray, size: int
) -> np.ndarray:
    scores = 0.7 * difficulty + _latent(random, clusters, size)
    return {"binary": (scores > 0).astype(float), "normal": scores, "lognormal": np.exp(scores)}[kind]


def _holds(interval: Interval, true: float) -> bool:
    low, high = interval.low, interval.high
    return low is not None and high is not None and low <= true <= high


def everything(*, trials: int, seed: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    def figure(part: str, value: float, **facts: Any) -> dict[str, Any]:
        say(f"{part} {', '.join(f'{name} {fact}' for name, fact in facts.items())}: {value:.3f}")
        return {"part": part, **facts, "value": round(value, 4)}

    for kind in KINDS:
        for questions in QUESTIONS:
            for size in (size for size in CLUSTERS if questions >= 2 * size):
                for unequal in (False, True) if size > 1 and questions >= 10 * size else (False,):
                    drawn = trials if questions <= _MANY else trials // 4
                    value = alarms(kind, questions, size, trials=drawn, seed=seed, unequal=unequal)
                    yield figure("alarms", value, kind=kind, questions=questions, clusters_of=size, unequal=unequal)
    for documents in DOCUMENTS:
        alarmed, held = ratio_alarms(documents, trials=trials, seed=seed)
        yield figure("alarms", alarmed, kind="perplexity", questions=documents)
        yield figure("coverage", held, kind="perplexity", questions=documents)
    for questions in QUESTIONS:
        drawn = trials if questions <= _MANY else trials // 4
        for size in (1, 10):
            for share in SHARES:
                value = share_coverage(share, questions, size, trials=drawn, seed=seed)
                yield figure("coverage", value, kind=f"share of {share}", questions=questions, clusters_of=size)
            for kind in ("normal", "lognormal"):
                value = mean_coverage(kind, questions, size, trials=drawn, seed=seed)
                yield figure("coverage", value, kind=kind, questions=questions, clusters_of=size)
    for questions in (1_000, 2_000, 14_000):
        for alike in (0.5, 0.8, 0.95):
            paired, unpaired = power(questions, points=0.02, alike=alike, trials=trials // 8, seed=seed)
            facts = {"questions": questions, "alike": alike}
            yield figure("power", paired, test="stratified, paired", **facts)
            yield figure("power", unpaired, test="unpaired", **facts)
    value = refused_runs(runs=max(1, trials // 10), seed=seed)
    yield figure("gates", value, promise="equal runs refused, 20 benchmarks, 50 checkpoints", runs=max(1, trials // 10))
    yield figure("gates", passed_losses(trials=trials, seed=seed), promise="losses of the margin that pass")
    for baseline in RELATIVE:
        value = refused_by_relative(baseline, trials=2 * trials, seed=seed)
        yield figure("gates", value, promise="equal checkpoints refused, 30 before each", baseline=baseline)
    value = refused_by_relative("best", trials=2 * trials, seed=seed, shared=False)
    yield figure("gates", value, promise="none, were false alarms not shared among the 30", baseline="best")
