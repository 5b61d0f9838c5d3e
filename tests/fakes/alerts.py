"""A run with an alert: steady scores, then an obvious drop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fakes.records import FIRST, make_metric, make_record, make_samples, publish
from tasks.records.record import Record
from tasks.verdicts.alert_files import KnownAlert
from tasks.verdicts.alerts import Alert

STEADY = tuple(0.6 + 0.01 * (number % 3 - 1) for number in range(20))
DROP = 0.1


def run_of(values: Sequence[float], *, run: str = "run-a", **fields: Any) -> list[Record]:
    return [
        make_record(step=100 * (number + 1), run=run, metrics=(make_metric(value=value),), **fields)
        for number, value in enumerate(values)
    ]


def known_alert(record: Record, **fields: Any) -> KnownAlert:
    metric = record.metrics[0]
    alert = Alert(
        id=f"{record.checkpoint.step:016x}",
        run=record.checkpoint.run,
        checkpoint=record.checkpoint.name,
        step=record.checkpoint.step,
        evaluator=record.evaluator,
        benchmark=metric.benchmark,
        metric=metric.name,
        evaluation_hash=record.evaluation_hash,
        since=record.checkpoint.step,
        before=record.checkpoint.step - 100,
        expected=metric.value + 0.25,
        found=metric.value,
        question_noise=0.04,
        training_noise=0.01,
        checkpoints_between_false_alarms=1_000,
        higher_is_better=True,
    )
    return KnownAlert(alert=replace(alert, **fields), found_at=FIRST.timestamp(), announced=True)


def publish_drop(evaluation_path: Path, **fields: Any) -> Record:
    """Publishes a steady run and a last checkpoint that loses half of its 10 samples; returns its record."""
    *steady, dropped = run_of([*STEADY, DROP])
    right = [1.0] * 6 + [0.0] * 4
    for record in steady:
        publish(evaluation_path, record, make_samples(right) if record is steady[-1] else None)
    dropped = dropped.model_copy(update=fields)
    publish(evaluation_path, dropped, make_samples([1.0] + [0.0] * 9))
    return dropped
