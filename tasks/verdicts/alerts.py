"""Alerts: checkpoints at which a metric of a run fell below its earlier level, computed from records alone."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tasks.records.builds import Qualification, build_changes
from tasks.records.current import current_records, merged_by, sharing_no_input, told_apart
from tasks.records.details import CheckpointReference
from tasks.records.record import Metric, Record
from tasks.records.search import found_below
from tasks.verdicts.statistics.alarms import CHECKPOINTS_BETWEEN_FALSE_ALARMS, FEWEST_BEFORE, Score, alarms
from tasks.verdicts.statistics.composition import QuestionScores
from tasks.verdicts.statistics.intervals import quantile
from tasks.verdicts.statistics.training_noise import Point, training_noise

_ID_CHARACTERS = 16


class _Series(NamedTuple):
    run: str
    evaluator: str
    benchmark: str
    metric: str
    evaluation_hash: str


@dataclass(frozen=True)
class Alert:
    """A drop in a metric of a run: the checkpoint at which it became certain, and the value expected there."""

    id: str
    """Digest over series and checkpoint."""
    run: str
    checkpoint: str
    """Name of the checkpoint at which the sum of shortfalls exceeded its threshold."""
    step: int
    evaluator: str
    benchmark: str
    """Name that the benchmark is published under."""
    metric: str
    evaluation_hash: str
    """Hash of the settings of the curve."""
    since: int
    """Step of the first checkpoint that fell short; at most `step`."""
    before: int
    """Step of the last checkpoint at the level before."""
    expected: float
    """Value expected from the checkpoints before."""
    found: float
    """Measured value."""
    question_noise: float | None
    """Standard error of the measured value over draws of questions; empty if unknown."""
    training_noise: float | None
    """Standard deviation of the curve between checkpoints until the drop; empty if unknown."""
    checkpoints_between_false_alarms: int
    """Mean distance of two false alarms over all curves of the run together."""
    higher_is_better: bool
    merged_by: str = ""
    """Kind of merge, if the curve is of merged checkpoints."""

    @property
    def lost(self) -> float:
        """Size of the drop, always positive."""
        return self.expected - self.found if self.higher_is_better else self.found - self.expected


class Drop(NamedTuple):
    """An alert, with the records of its checkpoint and of the last checkpoint at the level before."""

    alert: Alert
    record: Record
    before: Record


class _Value(NamedTuple):
    record: Record
    metric: Metric


def alerts_in(records: Sequence[Record], *, qualifications: Sequence[Qualification] = ()) -> list[Alert]:
    """Returns the alerts of records, as `drops_in`."""
    return [drop.alert for drop in drops_in(records, qualifications=qualifications)]


def drops_in(records: Sequence[Record], *, qualifications: Sequence[Qualification] = ()) -> list[Drop]:
    """Returns the alerts of records with these, by run and step; a deterministic function of the records.

    Each metric with a direction has a series per run and evaluation hash; parts of a group have none if the group has.
    Checkpoints with a label are in none. A change of versions without a qualification ends a series and starts the
    next. Merged checkpoints have series of their own, restricted to checkpoints that share no input, since the scores
    of overlapping averages move together. Of several records for the same cell, the newest counts.
    """
    apart = told_apart([record.checkpoint for record in records])
    runs: dict[str, dict[tuple[int, str], CheckpointReference]] = defaultdict(dict)
    values_by_run: dict[str, dict[_Series, dict[tuple[int, str], _Value]]] = defaultdict(lambda: defaultdict(dict))
    steps = [record for record in current_records(records) if record.checkpoint.label is None]
    for record in sorted(steps, key=lambda record: record.created):
        checkpoint = apart(record.checkpoint)
        place = checkpoint.step, checkpoint.name
        for metric in record.metrics if record.succeeded else ():
            if metric.higher_is_better is None or not math.isfinite(metric.value) or _is_part_of_group(metric, record):
                continue
            series = _Series(checkpoint.run, record.evaluator, metric.benchmark, metric.name, record.evaluation_hash)
            values_by_run[checkpoint.run][series][place] = _Value(record, metric)
            runs[checkpoint.run][place] = checkpoint
    drops: list[Drop] = []
    for run, checkpoints in runs.items():
        in_order = dict(sorted(checkpoints.items()))
        of_run = {series: _sharing_no_input(in_order, values) for series, values in values_by_run[run].items()}
        drops += _of_run(in_order, of_run, qualifications)
    return drops


def _sharing_no_input(
    checkpoints: Mapping[tuple[int, str], CheckpointReference], values: Mapping[tuple[int, str], _Value]
) -> dict[tuple[int, str], _Value]:
    places = [place for place in checkpoints if place in values]
    if not any(checkpoints[place].merge for place in places[:1]):
        return dict(values)
    apart = sharing_no_input(checkpoints[place] for place in places)
    return {place: values[place] for place in places if checkpoints[place] in apart}


def _is_part_of_group(metric: Metric, record: Record) -> bool:
    if metric.benchmark in record.benchmarks:
        return False
    return any(
        metric.benchmark in other.parts
        or (other.benchmark in record.benchmarks and metric.benchmark.startswith(other.benchmark))
        for other in record.metrics
        if other.benchmark != metric.benchmark
    )


def _of_run(
    checkpoints: dict[tuple[int, str], CheckpointReference],
    values_by_series: dict[_Series, dict[tuple[int, str], _Value]],
    qualifications: Sequence[Qualification],
) -> list[Drop]:
    long = {series: values for series, values in values_by_series.items() if len(values) > FEWEST_BEFORE}
    scores = [_scores(checkpoints, series, values, qualifications) for series, values in long.items()]
    drops: list[tuple[int, Drop]] = []
    places = list(checkpoints)
    for (series, values), turned, ringing in zip(long.items(), scores, alarms(scores), strict=True):
        for alarm in ringing:
            record, metric = values[places[alarm.at]]
            sign = _sign(metric)
            before = next(place for place in places[alarm.since - 1 :: -1] if place in values)
            noise = training_noise(_pieces(places, turned[: alarm.since]))
            alert = Alert(
                id=hashlib.sha256("\0".join((*series, record.checkpoint.digest)).encode()).hexdigest()[:_ID_CHARACTERS],
                **series._asdict(),
                checkpoint=places[alarm.at][1],
                step=places[alarm.at][0],
                since=places[alarm.since][0],
                before=before[0],
                expected=sign * alarm.expected,
                found=metric.value,
                question_noise=metric.stderr,
                training_noise=noise.stddev if noise else None,
                checkpoints_between_false_alarms=CHECKPOINTS_BETWEEN_FALSE_ALARMS,
                higher_is_better=sign > 0,
                merged_by=merged_by(record.checkpoint),
            )
            drops.append((alarm.at, Drop(alert, record, values[before].record)))
    return [drop for _, drop in sorted(drops, key=lambda item: item[0])]


def _scores(
    checkpoints: dict[tuple[int, str], CheckpointReference],
    series: _Series,
    values: dict[tuple[int, str], _Value],
    qualifications: Sequence[Qualification],
) -> list[Score | None]:
    numbers = ((checkpoint, values[place].record) for place, checkpoint in checkpoints.items() if place in values)
    named = {"evaluator": series.evaluator, "benchmark": series.benchmark, "metric": series.metric}
    changes = build_changes(numbers, **named, qualifications=qualifications)
    broken = {change.step for change in changes if not change.qualified}
    return [
        Score(
            _sign(values[place].metric) * values[place].metric.value,
            _error(values[place].metric),
            breaks=place[0] in broken,
            unvaried=values[place].metric.stderr == 0.0,
        )
        if place in values
        else None
        for place in checkpoints
    ]


def _pieces(places: Sequence[tuple[int, str]], scores: Sequence[Score | None]) -> list[list[Point]]:
    pieces: list[list[Point]] = [[]]
    for (step, _), score in zip(places, scores, strict=False):
        if score is not None:
            pieces += [[]] if score.breaks else []
            pieces[-1].append((step, score.value))
    return pieces


def _sign(metric: Metric) -> float:
    return 1.0 if metric.higher_is_better else -1.0


def _error(metric: Metric) -> float:
    if metric.stderr is None:
        return abs(metric.value) / (2 * math.sqrt(max(1, metric.n)))
    if metric.stderr == 0.0 and metric.low is not None and metric.high is not None:
        return (metric.high - metric.low) / (2 * quantile(math.inf))
    return metric.stderr or abs(metric.value) / max(1, metric.n)


QuestionName = tuple[str, str]
"""A benchmark that has questions of its own, and the id of a question."""


def improvements(drop: Drop, *, evaluation_path: str, scores: QuestionScores) -> dict[QuestionName, float] | str:
    """Returns the score changes of the questions that both records below `evaluation_path` share, negative if worse; or
    the reason why unknown. Raises StorageError if samples are damaged or unreadable."""
    alert, asked = drop.alert, []
    for record in (drop.before, drop.record):
        metric = next(m for m in record.metrics if (m.benchmark, m.name) == (alert.benchmark, alert.metric))
        composition = scores.of(found_below(evaluation_path, record), metric)
        if isinstance(composition, str):
            return composition
        if composition.form is not None:
            return "its value is a ratio over documents, not a mean of questions"
        asked.append(composition.asked)
    sign = 1.0 if alert.higher_is_better else -1.0
    first, second = asked
    return {
        (part, name): sign * (second[part][name].sum - question.sum)
        for part, questions in first.items()
        for name, question in questions.items()
        if name in second.get(part, {})
    }


SHORT_ID = 8
"""Characters of an alert's id in outputs; more where two ids begin alike."""


def title(alert: Alert) -> str:
    """Returns the checkpoint, the metric and its direction in a few words."""
    return f"{alert.checkpoint}: {alert.benchmark} {alert.metric} {_went(alert)}"


def sentence(alert: Alert) -> str:
    """Returns the alert as a sentence, with measured and expected value and both noises."""
    noises = {"standard error of questions": alert.question_noise, "deviation of training": alert.training_noise}
    known = ", ".join(f"{name} {value:.2g}" for name, value in noises.items() if value is not None)
    return (
        f"{alert.benchmark} {alert.metric} of {alert.run} {_went(alert)} "
        f"at step {alert.step:,}: "
        f"{alert.found:.4g}, expected {alert.expected:.4g}" + (f" ({known})" if known else "")
    )


def acknowledging(alert: Alert, evaluation_path: str) -> str:
    """Returns the command that acknowledges an alert."""
    return f"assay alerts {evaluation_path} --acknowledge {alert.id[:SHORT_ID]}"


def _went(alert: Alert) -> str:
    return "fell" if alert.found < alert.expected else "rose"
