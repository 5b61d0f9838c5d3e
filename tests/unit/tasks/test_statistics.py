"""Intervals and tests against known values and against their guarantees."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import optimize, special, stats

from fakes.records import make_metric
from tasks.records.record import Metric
from tasks.records.samples import Questions, Sample, question_of
from tasks.verdicts.statistics.composition import compare_compositions, composition_of, with_interval
from tasks.verdicts.statistics.intervals import Interval, Stratum, estimate, mean_interval, ratio_interval
from tasks.verdicts.statistics.paired import (
    Adjustment,
    PairedStratum,
    adjusted,
    compare_means,
    compare_pairs,
    mcnemar,
    paired_ratio,
    spent,
)

SLEEP = np.array([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
"""Student (1908): additional hours of sleep by a drug over another drug; t = 4.06, p = 0.0028."""


def alone(values: Sequence[float] | np.ndarray) -> Stratum:
    return Stratum(values, range(len(values)))


def pairs(first: Sequence[float], second: Sequence[float], clusters: Sequence[int] | None = None) -> PairedStratum:
    return PairedStratum(first, second, clusters if clusters is not None else range(len(first)))


# Paired tests


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(1, 9, 22 / 1024), (0, 5, 2 / 32), (3, 3, 1.0), (0, 0, 1.0), (86, 150, float(stats.binomtest(86, 236).pvalue))],
)
def test_mcnemar_of_known_tables_gives_the_binomial_p_less_half_of_its_last_step(lost: int, won: int, p: float):
    first = np.array([True] * lost + [False] * won + [True] * 40)
    second = np.array([False] * lost + [True] * won + [True] * 40)

    compared = mcnemar(first, second)

    step = float(stats.binom.pmf(lost, lost + won, 0.5)) if lost != won else 0.0
    assert compared.p == pytest.approx(p - step, rel=1e-14)
    assert compared.difference == pytest.approx((won - lost) / len(first))
    assert compared.low is not None and compared.high is not None and compared.low < compared.difference < compared.high


@pytest.mark.parametrize(
    ("lost", "won", "questions"), [(2, 10, 100), (2, 12, 50), (0, 0, 54), (0, 3, 20), (7, 7, 7_000)]
)
def test_mcnemar_interval_is_the_score_interval(lost: int, won: int, questions: int):
    # Tango (1998), by maximising the likelihood numerically in place of his formula.
    def score(difference: float) -> float:
        def unlikely(share_lost: float) -> float:
            shares = [share_lost + difference, share_lost, 1 - 2 * share_lost - difference]
            return -float(special.xlogy([won, lost, questions - won - lost], np.clip(shares, 0, 1)).sum())

        bounds = max(0.0, -difference), (1 - difference) / 2
        share: float = optimize.minimize_scalar(unlikely, bounds=bounds, options={"xatol": 1e-12})["x"]  # pyright: ignore[reportIndexIssue]
        error = math.sqrt((2 * share + difference - difference**2) / questions)
        return ((won - lost) / questions - difference) / error

    compared = mcnemar(*(np.array(side) for side in answers(lost, won, questions)))

    assert compared.low is not None and compared.high is not None
    assert (score(compared.low), score(compared.high)) == (
        pytest.approx(1.96, abs=1e-3),
        pytest.approx(-1.96, abs=1e-3),
    )


def answers(lost: int, won: int, questions: int) -> tuple[list[bool], list[bool]]:
    same = [True] * (questions - lost - won)
    return [True] * lost + [False] * won + same, [False] * lost + [True] * won + same


def test_scores_of_single_questions_are_tested_as_student_did():
    compared = compare_pairs([pairs(np.zeros(10).tolist(), SLEEP.tolist())])

    known = stats.ttest_1samp(SLEEP, 0.0)
    interval = known.confidence_interval()
    assert (compared.test, compared.difference) == ("paired t", pytest.approx(1.58))
    assert compared.p == pytest.approx(known[1], rel=1e-12)
    assert (compared.low, compared.high) == (pytest.approx(float(interval.low)), pytest.approx(float(interval.high)))


def test_clusters_of_equal_size_are_tested_by_their_means():
    random = np.random.default_rng(2)
    differences = random.normal(0.2, 1.0, 20).repeat(5) + random.normal(size=100)
    clusters = np.arange(20).repeat(5).tolist()

    compared = compare_pairs([pairs([0.0] * 100, differences.tolist(), clusters)])

    known = stats.ttest_1samp(differences.reshape(20, 5).mean(axis=1), 0.0)
    assert (compared.p, compared.freedom, compared.clusters) == (pytest.approx(known[1]), pytest.approx(19), 20)


def test_strata_are_weighed_and_never_mixed():
    easy, hard = [1.0, 1.0, 1.0, 0.9], [0.1, 0.0, 0.0, 0.1]
    strata = [Stratum(easy, range(4), 0.25), Stratum(hard, range(4), 0.75)]

    estimated = estimate(strata)

    variances = [float(np.var(values, ddof=1)) / 4 for values in (easy, hard)]
    assert estimated.value == pytest.approx(0.25 * np.mean(easy) + 0.75 * np.mean(hard))
    assert estimated.stderr == pytest.approx(math.sqrt(0.25**2 * variances[0] + 0.75**2 * variances[1]))


def test_strata_of_a_single_question_each_are_pooled():
    estimated = estimate([Stratum([value], [0], 0.1) for value in SLEEP])

    assert (estimated.value, estimated.stderr) == (pytest.approx(1.58), pytest.approx(float(stats.sem(SLEEP))))
    assert estimate([Stratum(SLEEP, [0] * 10)]).stderr is None, "a single passage says nothing of other passages"


def test_weighted_group_is_tested_paired_where_means_of_its_parts_would_hide_the_change():
    # Two points over MMLU's shape: the paired test detects a change that the unpaired test cannot.
    random = np.random.default_rng(3)
    strata: list[PairedStratum] = []
    for _ in range(20):
        able = random.random(100) < random.uniform(0.3, 0.9)
        improved = np.where(random.random(100) < 0.08, random.random(100) < 0.9, able)
        strata.append(PairedStratum(able.astype(float).tolist(), improved.astype(float).tolist(), range(100), 0.05))

    compared = compare_pairs(strata)

    errors = [estimate([Stratum(side(s), s.clusters, s.weight) for s in strata]).stderr
              for side in (lambda s: s.first, lambda s: s.second)]  # fmt: skip
    unpaired = compare_means(0.0, compared.difference, stderrs=(errors[0], errors[1]))
    assert compared.p is not None and unpaired.p is not None
    assert compared.p < 0.05 < unpaired.p


def test_perplexities_are_tested_by_what_documents_add_to_both():
    random = np.random.default_rng(4)
    words = random.integers(50, 900, 62)
    first = -words * (2.5 + 0.3 * random.normal(size=62))
    second = first + words * 0.02 * (1 + random.normal(size=62))

    compared = paired_ratio(
        list(zip(first, words, strict=True)), list(zip(second, words, strict=True)), range(62), form="exp"
    )

    values = [math.exp(-side.sum() / words.sum()) for side in (first, second)]
    assert compared.difference == pytest.approx(values[1] - values[0])
    assert compared.p is not None and compared.p < 0.001
    assert (
        compared.low is not None
        and compared.high is not None
        and compared.low < compared.difference < compared.high < 0
    )


def test_difference_that_is_the_same_for_all_claims_no_more_than_so_few_can():
    same = compare_pairs([pairs([0.5] * 30, [0.5] * 30)])
    fourth = compare_pairs([pairs([0.0] * 4, [0.5] * 4)])

    assert (same.p, fourth.p) == (1.0, 0.125)
    assert fourth.low is not None and fourth.low < 0.0, "a fifth question may differ from all four"
    assert compare_pairs([pairs([0.5], [0.2])]).test == compare_pairs([pairs([1.0], [0.0])]).test == "none"


def test_z_test_without_pairs_needs_both_standard_errors():
    compared = compare_means(0.5, 0.6, stderrs=(0.03, 0.04))

    assert compared.p == pytest.approx(0.0455, abs=1e-4)  # two standard errors
    assert (compared.low, compared.high) == (pytest.approx(0.002, abs=1e-3), pytest.approx(0.198, abs=1e-3))
    assert compare_means(0.5, 0.6, stderrs=(0.03, None)).test == "none"


# Intervals


@pytest.mark.parametrize(
    ("right", "questions", "method"), [(0, 100, "exact"), (99, 100, "exact"), (300, 400, "wilson")]
)
def test_interval_of_a_share_is_never_empty_and_stays_between_nothing_and_all(right: int, questions: int, method: str):
    interval = mean_interval([alone([1.0] * right + [0.0] * (questions - right))])

    known = stats.binomtest(right, questions).proportion_ci(0.95, method=method)  # pyright: ignore[reportArgumentType]
    assert (interval.low, interval.high) == (pytest.approx(float(known.low)), pytest.approx(float(known.high)))
    assert interval.low is not None and interval.high is not None and 0.0 <= interval.low < interval.high <= 1.0


def test_interval_of_a_share_is_as_wide_as_its_clusters_ask_for():
    right = ([1.0] * 10 + [0.0] * 10) * 5
    single, clustered = (
        mean_interval([alone(right)]),
        mean_interval([Stratum(right, np.arange(10).repeat(10).tolist())]),
    )
    none = mean_interval([Stratum([0.0] * 100, np.arange(10).repeat(10).tolist())])

    assert clustered.stderr == pytest.approx(float(stats.sem([1.0, 0.0] * 5)))
    assert _width(clustered) > 2 * _width(single)
    assert none.low == 0.0 and none.high is not None and 0.25 < none.high < 0.45, "as of 0 out of 10"


def _width(interval: Interval) -> float:
    low, high = interval.low, interval.high
    assert low is not None and high is not None
    return high - low


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ([500, 500, 5], [0.5, 0.5, 0.9]),  # coverage 0.63 as a single normal mean, 0.35 with the small part all right
        ([1_000, 3], [0.8, 0.9]),  # 0.28, 0.00
        ([1_000, 1_000, 5], [1.0, 1.0, 0.9]),  # 0.42
        ([2_000, 20], [0.6, 0.97]),  # 0.85
        ([20] * 57, [0.9] * 57),
        ([2] * 10 + [400], [0.9] * 11),
    ],
)
def test_interval_of_parts_that_weigh_alike_holds(sizes: list[int], shares: list[float]):
    random, held, trials = np.random.default_rng(8), 0, 250
    for _ in range(trials):
        right = [(random.random(size) < share).astype(float) for size, share in zip(sizes, shares, strict=True)]
        interval = mean_interval([Stratum(part, range(len(part)), 1 / len(sizes)) for part in right])
        held += (
            interval.low is not None and interval.high is not None and interval.low <= np.mean(shares) <= interval.high
        )
    assert held / trials >= 0.92


def test_difference_of_parts_is_known_as_their_smallest():
    right, small = [1.0] * 1_000, PairedStratum([1.0] * 3, [1.0] * 3, range(3), 0.5)
    compared, unchanged = (
        compare_pairs([PairedStratum(right, after, range(1_000), 0.5), small])
        for after in ([0.0] * 10 + right[10:], right)
    )

    unseen = 0.5 * (1 - 0.025 ** (1 / 3))  # of the whole may differ in the small part, although none of its three did
    assert compared.low == pytest.approx(-0.005 - unseen, abs=1e-3)
    assert compared.p is not None and compared.p > 0.9, (
        "ten of a thousand are lost, but half of the whole is hardly known"
    )
    assert (unchanged.p, unchanged.high) == (1.0, pytest.approx(unseen, abs=1e-3))


def test_interval_of_a_mean_that_leans_is_bent_to_its_long_side():
    symmetric, leaning = mean_interval([alone([-1.0, 0.0, 1.0] * 10)]), mean_interval([alone([0.0, 0.0, 3.0] * 10)])

    assert symmetric.low is not None and symmetric.high is not None and leaning.low is not None
    assert symmetric.low == pytest.approx(-symmetric.high)
    assert leaning.high is not None and leaning.high - 1.0 > 1.0 - leaning.low
    assert mean_interval([alone([0.5] * 30)])[:3] == (0.0, None, None), "constant scores say nothing of their error"


def test_interval_of_a_perplexity_comes_from_its_documents():
    random = np.random.default_rng(5)
    words = random.integers(50, 900, 200).astype(float)
    sums = list(zip(-words * (2.5 + 0.3 * random.normal(size=200)), words, strict=True))

    interval, bits = ratio_interval(sums, range(200), form="exp"), ratio_interval(sums, range(200), form="bits")

    drawn = stats.bootstrap(
        tuple(np.array(sums).T),
        lambda likelihood, words, axis=-1: np.exp(-likelihood.sum(axis=axis) / words.sum(axis=axis)),
        paired=True,
        vectorized=True,
        rng=np.random.default_rng(6),
    )
    assert interval.stderr == pytest.approx(float(drawn.standard_error), rel=0.05)
    assert interval.low == pytest.approx(float(drawn.confidence_interval.low), rel=0.01)
    assert interval.high == pytest.approx(float(drawn.confidence_interval.high), rel=0.01)
    assert bits.high == pytest.approx(math.log2(interval.high or math.nan))


# Values and their questions


def sample(number: int, *, benchmark: str = "demo", cluster: str | None = None, **fields: object) -> Sample:
    given = {"id": str(number), "prompt": f"{number}?", "output": "", "target": None, "scores": {}} | fields
    return Sample.model_validate({"benchmark": benchmark, "cluster": cluster, **given})


def by_benchmark(samples: Sequence[Sample]) -> Questions:
    return {name: [question_of(s) for s in samples if s.benchmark == name] for name in {s.benchmark for s in samples}}


def measured(metric: Metric, samples: Sequence[Sample], *others: Metric) -> Metric:
    return with_interval(metric, by_benchmark(samples), (metric, *others))


def test_metric_of_clustered_questions_has_the_error_of_its_clusters():
    scores = [1.0] * 20 + [0.0] * 20
    metric = make_metric("demo", 0.5, stderr=0.08, n=40)
    single = measured(metric, [sample(i, scores={"acc": score}) for i, score in enumerate(scores)])
    passages = measured(metric, [sample(i, scores={"acc": s}, cluster=str(i // 10)) for i, s in enumerate(scores)])
    repeats = measured(metric, [sample(i // 10, scores={"acc": score}) for i, score in enumerate(scores)])

    assert single.stderr == 0.08, "the harness's own, for questions without clusters"
    assert passages.stderr == pytest.approx(repeats.stderr) == pytest.approx(float(stats.sem([1, 1, 0, 0])))
    assert single.low is not None and passages.low is not None and passages.low < single.low


def test_metric_without_a_mean_uses_its_harness_error_or_no_interval():
    samples = [sample(number, scores={"f1": 0.5}) for number in range(9)]

    known = measured(make_metric("demo", 0.7, name="f1", stderr=0.1), samples)
    unknown = measured(make_metric("demo", 0.7, name="f1", stderr=0.0), samples)

    assert (known.low, known.high) == (pytest.approx(0.504, abs=1e-3), pytest.approx(0.896, abs=1e-3))
    assert (unknown.low, unknown.high) == (None, None), "an error of zero counts as unknown"


@pytest.mark.parametrize(
    "parts", [{"demo_a": 0.2, "demo_b": 0.8}, {}], ids=["weights in the record", "weights by size"]
)
def test_group_is_made_of_its_parts_by_its_own_weights(parts: dict[str, float]):
    def group(right: float) -> tuple[Metric, list[Sample]]:
        samples = [sample(n, benchmark="demo_a", scores={"acc": float(n < 5)}) for n in range(10)]
        samples += [sample(n, benchmark="demo_b", scores={"acc": float(n < right)}) for n in range(40)]
        metric = make_metric("demo", 0.2 * 0.5 + 0.8 * right / 40, stderr=0.5, n=50)
        return metric.model_copy(update={"parts": parts}), samples

    compositions = [composition_of(m, by_benchmark(samples), [m]) for m, samples in (group(20), group(30))]
    assert not isinstance(compositions[0], str) and not isinstance(compositions[1], str)
    paired = compare_compositions(compositions[0], compositions[1])
    assert not isinstance(paired, str)

    assert compositions[0].weights == {"demo_a": pytest.approx(0.2), "demo_b": pytest.approx(0.8)}
    assert paired.values == (pytest.approx(0.5), pytest.approx(0.7)) and paired.finding.test == "paired t"
    error = measured(*group(20)).stderr
    assert error == pytest.approx(math.sqrt((0.2**2) * 0.25 / 9 + (0.8**2) * 0.25 / 39))


def test_perplexity_of_a_record_has_an_error_and_an_interval():
    random = np.random.default_rng(7)
    ratios = [(float(-words * random.normal(2.5, 0.3)), float(words)) for words in random.integers(50, 900, 60)]
    value = math.exp(-sum(r[0] for r in ratios) / sum(r[1] for r in ratios))
    samples = [sample(n, ratios={"word_perplexity": pair}) for n, pair in enumerate(ratios)]

    score = measured(make_metric("demo", value, name="word_perplexity", stderr=None, n=60), samples)

    assert score.stderr is not None and 0.1 < score.stderr < 1.0
    assert score.low is not None and score.high is not None and score.low < value < score.high


# Several tests


def test_adjusted_p_values_are_those_of_the_textbook():
    p_values = [0.01, 0.04, 0.03, None, 0.005]

    assert adjusted(p_values, by="bh") == [pytest.approx(x) if x else None for x in (0.02, 0.04, 0.04, None, 0.02)]
    assert adjusted(p_values, by="holm") == [pytest.approx(x) if x else None for x in (0.03, 0.06, 0.06, None, 0.02)]
    assert adjusted(p_values, by="none") == p_values
    assert adjusted([None], by="bh") == [None]


@pytest.mark.parametrize("by", ["bh", "holm"])
def test_adjustment_keeps_families_without_a_difference_clean(by: Adjustment):
    families = np.random.default_rng(21).random((600, 20))

    unadjusted = np.mean([family.min() < 0.05 for family in families])
    share = np.mean([min(p for p in adjusted(list(family), by=by) if p is not None) < 0.05 for family in families])

    assert unadjusted > 0.5
    assert 0.02 <= share <= 0.08


def test_decisions_of_a_series_never_overspend_and_seldom_get_smaller():
    shares = [spent(number) for number in range(1, 20_000)]

    assert sum(shares[:64]) == pytest.approx(0.5) and sum(shares[64:192]) == pytest.approx(0.25)
    assert 0.98 < sum(shares) < 1.0
    assert len(set(shares)) == 9
