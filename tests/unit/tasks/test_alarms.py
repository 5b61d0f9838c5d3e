"""Alarms: drops of a score that raise an alarm, and drops that do not, on made curves and on records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from fakes.records import make_metric, make_qualification, make_record
from tasks.records.builds import build_of
from tasks.records.record import Metric, Record
from tasks.verdicts.alerts import alerts_in
from tasks.verdicts.statistics.alarms import FEWEST_BEFORE, Score, alarms, threshold
from tasks.verdicts.statistics.intervals import Stratum, mean_interval
from tasks.verdicts.statistics.training_noise import Point, TrainingNoise, mean_of_last, training_noise, trends

ERROR = 0.011
"""Standard error of a score of 0.5 on 2,000 questions."""


def curve(values: Sequence[float] | np.ndarray) -> list[Score | None]:
    return [Score(float(value), ERROR) for value in values]


def wavering(checkpoints: int, *, seed: int = 0, by: float = 0.005) -> np.ndarray:
    return 0.6 + by * np.random.default_rng(seed).normal(size=checkpoints)


def points(values: Sequence[float] | np.ndarray, *, steps: Sequence[int] | None = None) -> list[Point]:
    """Returns a point for each value, at multiples of 100 or at `steps`."""
    return [(steps[at] if steps else 100 * at, float(value)) for at, value in enumerate(values)]


def at(values: Sequence[float] | np.ndarray) -> list[int]:
    return [alarm.at for alarm in alarms([curve(values)])[0]]


def test_identical_checkpoints_never_alarm():
    assert at([0.6] * 500) == []


@pytest.mark.parametrize("checkpoints", [FEWEST_BEFORE, 30])
def test_drop_alarms_at_once_and_its_level_becomes_the_new_level(checkpoints: int):
    values = wavering(checkpoints + 30)
    values[checkpoints:] -= 0.06

    [alarm] = alarms([curve(values)])[0]

    assert alarm.at == alarm.since == checkpoints
    assert alarm.expected == pytest.approx(0.6, abs=0.005)


def test_fewer_checkpoints_than_a_noise_is_known_from_never_alarm():
    assert at([*wavering(FEWEST_BEFORE - 1), 0.1]) == []


def test_first_checkpoints_that_can_alarm_are_judged_by_the_noise_of_all_curves():
    curves = [wavering(FEWEST_BEFORE + 2, seed=seed) for seed in range(20)]
    curves[0][FEWEST_BEFORE:] -= 0.025  # five jitters: missed by the spread of the curve's own eight prediction errors

    [alarm, *others] = [alarm for raised in alarms([curve(each) for each in curves]) for alarm in raised]

    assert (alarm.since, alarm.at) == (FEWEST_BEFORE, FEWEST_BEFORE + 1)
    assert not others


def test_suspected_drop_is_not_learned_until_it_is_certain():
    values = wavering(34)
    values[30:] = 0.6 - 0.0155  # three times a checkpoint's noise: a single checkpoint is not enough

    [alarm] = alarms([curve(values)])[0]

    assert (alarm.since, alarm.at) == (30, 31)
    assert alarm.expected == pytest.approx(0.6, abs=0.005)


def test_level_after_a_drop_can_drop_again():
    values = wavering(60)
    values[25:] -= 0.04
    values[45:] -= 0.04

    assert at(values) == [25, 45]


@pytest.mark.parametrize(
    "trend",
    [
        lambda t: 0.3 * (1 - np.exp(-t / 15)),
        lambda t: 0.3 / (1 + np.exp(-(t - 20) / 3)),
        lambda t: 0.1 * (t > 25),
        lambda t: 0.07 * np.log1p(t),
    ],
    ids=["saturates", "emerges", "jumps up", "logarithm"],
)
def test_rise_that_ends_is_no_drop(trend: Callable[[np.ndarray], np.ndarray]):
    curves = [curve(wavering(50, seed=seed) + trend(np.arange(50))) for seed in range(40)]

    assert sum(map(len, alarms(curves))) <= 1


def test_noise_of_a_training_that_wavers_more_is_learned():
    values = wavering(60, by=0.03)
    values[40:] -= 0.02

    assert at(values) == []


def test_missing_checkpoint_hides_no_drop():
    scores = curve([*wavering(20), *[0.5] * 3])
    scores[20] = None

    [alarm] = alarms([scores])[0]

    assert alarm.at == 21


def test_threshold_rises_with_the_distance_of_false_alarms():
    assert threshold(200) < threshold(1_000) < threshold(20_000)


def test_lone_outlier_is_no_drop_and_the_next_like_it_is():
    values = np.tile(wavering(40, seed=1), (20, 1)) + 0.001 * np.random.default_rng(2).normal(size=(20, 40))
    values[0, 20] -= 0.04  # eight times a checkpoint's noise
    values[1, 20:22] -= 0.04

    assert [[alarm.at for alarm in curve_alarms] for curve_alarms in alarms([curve(each) for each in values])[:2]] == [
        [],
        [21],
    ]


@pytest.mark.parametrize("correlation", [0.5, 0.9])
def test_jitter_that_goes_on_is_no_drop(correlation: float):
    fresh = np.random.default_rng(3).normal(size=(20, 200))
    for number in range(1, 200):
        fresh[:, number] = correlation * fresh[:, number - 1] + math.sqrt(1 - correlation**2) * fresh[:, number]

    assert sum(map(len, alarms([curve(0.6 + 0.005 * each) for each in fresh]))) <= 1


def test_jitter_that_grows_in_all_curves_alarms_in_few_runs():
    random, sizes = np.random.default_rng(4), np.linspace(0.005, 0.015, 50)
    runs = [alarms([curve(0.6 + each) for each in sizes * random.normal(size=(20, 50))]) for _ in range(4)]

    assert (
        sum(map(len, (curve_alarms for run in runs for curve_alarms in run))) <= 3
    )  # 9 without a check of the latest errors


# Noise of training


def test_noise_of_training_is_that_of_checkpoints_around_any_slope():
    values = wavering(400) + np.linspace(0, 5, 400)

    noise = training_noise([points(values)])

    assert noise is not None and noise.stddev == pytest.approx(0.005, rel=0.15)


def test_noise_of_training_is_not_that_of_a_step():
    values = wavering(40)
    values[20:] -= 0.3

    noise = training_noise([points(values)])

    assert noise is not None and noise.stddev == pytest.approx(0.005, rel=0.5)


def test_noise_of_training_is_not_told_from_four_checkpoints_but_from_those_of_siblings():
    values = wavering(8)

    assert training_noise([points(values[:4])]) is None
    assert training_noise([points(values[:4]), points(values[4:])]) is not None


DOUBLING = [100, 200, 400, 800, 1600, 3200, 6400, 12800]


@pytest.mark.parametrize(
    "values",
    [1 - 0.8 * 0.5 ** np.arange(8), [0.27, 0.25, 0.39, 0.57, 0.95, 1.0], [0.9, 0.7, 0.4, 0.3, 0.25, 0.24, 0.24]],
    ids=["saturates", "emerges", "falls"],
)
def test_monotonic_curve_has_no_noise(values: Sequence[float]):
    assert training_noise([points(values)]) is None


def test_slope_over_unequal_steps_is_no_noise():
    jitter = 0.001 * np.array([0, 1, -1, 1, -1, 0, 1, -1])
    noise = training_noise([points(np.array(DOUBLING) / 1e6 + jitter, steps=DOUBLING)])

    assert noise is not None and noise.stddev < 0.0015  # 0.0018 where steps are taken as equal


@pytest.mark.parametrize(
    ("slope", "trending"),
    [(0.0, False), (0.004, False), (0.02, True), (-0.02, True)],
    ids=["flat", "slow", "up", "down"],
)
def test_mean_of_the_last_is_left_out_while_the_curve_trends(slope: float, trending: bool):
    curve = points(0.5 + slope * np.arange(5) + 0.005 * np.array([1, -1, 0, -1, 1]))

    assert trends(curve, noise := TrainingNoise(0.01, 10.0)) is trending
    assert (mean_of_last(curve, [0.02] * 5, noise=noise) is None) is trending


def test_noise_of_a_coarse_mostly_constant_curve_is_not_zero():
    noise = training_noise([points([0.25] * 6 + [0.30] + [0.25] * 3)])
    assert noise is not None and noise.stddev > 0.01


def test_wavering_is_jitter_and_the_noise_of_questions_that_neighbours_do_not_share():
    random = np.random.default_rng(0)
    questions, checkpoints, jitter, alike = 2_000, 400, 0.02, 0.7
    common = math.sqrt(alike) * random.normal(size=questions)
    levels = jitter * random.normal(size=checkpoints)
    latent = common + math.sqrt(1 - alike) * random.normal(size=(checkpoints, questions)) - levels[:, None]
    answers = (latent < 0).astype(float)
    correlation = float(np.mean([np.corrcoef(*answers[i : i + 2])[0, 1] for i in range(checkpoints - 1)]))

    noise = training_noise([points(answers.mean(axis=1))])

    assert noise is not None
    alone = math.sqrt(noise.stddev**2 - (1 - correlation) * 0.25 / questions)
    expected = float(np.std([np.mean(0.5 * (1 + math.erf(level / math.sqrt(2)))) for level in levels]))
    assert alone == pytest.approx(expected, rel=0.15)
    assert noise.stddev > 1.2 * expected


# Records


def run_of(values: Sequence[float], *, run: str = "run-a") -> list[Record]:
    return [
        make_record(step=100 * (number + 1), metrics=(make_metric(value=value, stderr=ERROR, n=2_000),), run=run)
        for number, value in enumerate(values)
    ]


def dropping(checkpoints: int = 20) -> list[float]:
    return [*wavering(checkpoints), 0.5, 0.5]


def test_alert_of_records_says_what_was_expected_and_found_and_both_noises():
    [alert] = alerts_in(run_of(dropping()))

    assert (alert.step, alert.since, alert.before) == (2_100, 2_100, 2_000)
    assert alert.expected == pytest.approx(0.6, abs=0.005) and alert.found == 0.5
    assert alert.lost == pytest.approx(0.1, abs=0.005)
    assert alert.question_noise == ERROR
    assert alert.training_noise == pytest.approx(0.005, rel=0.5)
    assert alert.run == "run-a" and alert.benchmark == "demo_facts"


def test_alert_has_the_same_id_among_any_other_alerts():
    records = run_of(dropping())

    [alone] = alerts_in(records)
    among = alerts_in([*reversed(records), *run_of(dropping(), run="run-b")])

    assert alone.id in [alert.id for alert in among]
    assert len({alert.id for alert in among}) == 2


@pytest.mark.parametrize(("higher_is_better", "alerted"), [(True, 1), (False, 0), (None, 0)])
def test_drop_alerts_only_in_the_direction_that_is_worse(higher_is_better: bool | None, alerted: int):
    metrics = [make_metric(value=value, stderr=ERROR, higher_is_better=higher_is_better) for value in dropping()]

    alerts = alerts_in([make_record(step=step, metrics=(metric,)) for step, metric in enumerate(metrics)])

    assert len(alerts) == alerted


def test_rise_of_a_perplexity_is_alarmed_on_its_own_scale():
    values = [12.0, 11.9, 11.95] * 8 + [13.0]
    metrics = [make_metric(name="word_perplexity", value=v, stderr=0.2, higher_is_better=False) for v in values]

    [alert] = alerts_in([make_record(step=step, metrics=(metric,)) for step, metric in enumerate(metrics)])

    assert alert.expected == pytest.approx(11.95, abs=0.1) and alert.found == 13.0


@pytest.mark.parametrize("qualified", [False, True])
def test_change_of_versions_that_nothing_qualifies_is_no_drop(qualified: bool):
    records = run_of(dropping())
    served = {**records[0].served, "engine": {**records[0].served["engine"], "version": "0.99"}}
    records = [r.model_copy(update={"served": served}) if r.checkpoint.step > 2_000 else r for r in records]
    qualifications = (make_qualification(build_of(records[0]), build_of(records[-1])),) if qualified else ()

    assert len(alerts_in(records, qualifications=qualifications)) == qualified


def test_group_alerts_once_and_its_parts_do_not():
    def group(value: float) -> tuple[Metric, ...]:
        parts = tuple(make_metric(f"quiz_{name}", value, stderr=ERROR) for name in ("art", "law"))
        return (make_metric("quiz", value, stderr=ERROR), *parts)

    whole = [make_record(step=s, metrics=group(v), benchmarks=("quiz",)) for s, v in enumerate(dropping())]
    alone = [
        make_record(step=s, metrics=group(v)[1:], benchmarks=("quiz",), run="run-b") for s, v in enumerate(dropping())
    ]

    assert [alert.benchmark for alert in alerts_in(whole)] == ["quiz"]
    assert {alert.benchmark for alert in alerts_in(alone)} == {"quiz_art", "quiz_law"}


def nearly_right(wrong: Sequence[int], *, intervals: bool = True, questions: int = 500) -> list[Record]:
    """Returns checkpoints with these numbers of wrong answers; without `intervals` as from some harnesses."""
    shares = [1 - count / questions for count in wrong]
    ends = [mean_interval([Stratum([0.0] * w + [1.0] * (questions - w), range(questions))]) for w in wrong]
    metrics = [
        make_metric(value=share, stderr=math.sqrt(share * (1 - share) / questions), n=questions).model_copy(
            update={"low": end.low, "high": end.high} if intervals else {}
        )
        for share, end in zip(shares, ends, strict=True)
    ]
    return [make_record(step=step, metrics=(metric,)) for step, metric in enumerate(metrics)]


@pytest.mark.parametrize("intervals", [True, False])
@pytest.mark.parametrize("mean", [0.1, 1.0])
def test_curve_that_is_nearly_always_right_raises_no_alert(mean: float, intervals: bool):
    wrong = np.random.default_rng(5).poisson(mean, size=(20, 50)).tolist()

    assert [alert for counts in wrong for alert in alerts_in(nearly_right(counts, intervals=intervals))] == []


@pytest.mark.parametrize("intervals", [True, False])
def test_drop_from_a_curve_that_was_always_right_is_alarmed(intervals: bool):
    [alert] = alerts_in(nearly_right([0] * 20 + [10, 10], intervals=intervals))

    assert alert.since == 20 and alert.expected == pytest.approx(1.0)


# Last checkpoints


def test_mean_of_the_last_checkpoints_loses_jitter_and_keeps_the_noise_of_their_questions():
    noise = TrainingNoise(0.01, 10.0)

    last_mean = mean_of_last(points([0.1, 0.59, 0.6, 0.62, 0.6, 0.59]), [0.02] * 6, noise=noise)

    assert last_mean is not None and last_mean.mean == pytest.approx(0.6)
    assert last_mean.question_stderr == pytest.approx(0.02)
    assert last_mean.training_stderr == pytest.approx(0.01 / math.sqrt(5))
    assert last_mean.stderr == pytest.approx(math.hypot(0.02, 0.01 / math.sqrt(5)))
    assert mean_of_last(points([0.5] * 4), [0.02] * 4, noise=noise) is None


def test_mean_of_last_checkpoints_without_an_error_claims_none():
    last_mean = mean_of_last(points([0.5] * 5), [0.02, None, 0.02, 0.02, 0.02], noise=TrainingNoise(0.01, 10.0))

    assert last_mean is not None and last_mean.stderr is None


def test_error_of_a_mean_of_the_last_is_that_of_other_questions_and_other_checkpoints():
    random = np.random.default_rng(0)
    means = [
        (0.6 + 0.02 * random.normal() + 0.01 * random.normal(size=5)).mean()  # questions are shared, jitter is not
        for _ in range(2_000)
    ]

    last_mean = mean_of_last(points([0.6] * 5), [0.02] * 5, noise=TrainingNoise(0.01, 10.0))

    assert last_mean is not None and last_mean.stderr == pytest.approx(float(np.std(means)), rel=0.05)
