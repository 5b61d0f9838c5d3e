"""Non-inferiority test: is a score shown not to be worse by a margin?

GO needs the lower end of the change's 95 % interval above −margin. For independent questions that are right or wrong it
is the score interval (Tango 1998): of scores worse by the margin at most 3.2 % pass, by exact enumeration of 10 to 200
questions. Otherwise it is a t interval over clusters: 3 to 5 % pass with 200 clusters or more, up to 22 % with few, by
simulation. A gate passes such a score no more often, as all of its rules must pass. An equal score may be refused by
chance if the margin is small against the interval. So each reason states the smallest margin at which a gate refuses at
most 5 % of equal runs, over all of its scores and checkpoints.
"""

from __future__ import annotations

import math

from resources.storage import storage
from tasks.gates.gate import Gate
from tasks.records.record import RECORD_NAME, CheckpointReference
from tasks.reports.comparison import ComparedMetric
from tasks.reports.table import measured
from tasks.spec.names import how_many, step_of
from tasks.statistics.adjustment import spent

FALSE_ALARMS = 0.05
"""Share of runs, or checkpoints, no worse than the baseline that a gate may refuse by chance."""

MOST_LEFT_OUT = 0.05
"""Largest share of questions with answers from a single side, as for truncated prompts (`max_truncated`)."""


def false_alarms_of(gate: Gate, checkpoint: CheckpointReference, evaluation_path: str) -> float:
    """Returns a checkpoint's part of the run's allowed false alarms, by its number among the recorded steps."""
    if gate.false_alarms == "per checkpoint":
        return FALSE_ALARMS
    cells = (
        storage.parent(f.uri)
        for f in storage.list_files(storage.join(evaluation_path, checkpoint.run))
        if storage.basename(f.uri) == RECORD_NAME
    )
    steps = {step_of(storage.basename(storage.parent(storage.parent(cell)))) for cell in cells}
    before = sum(step < checkpoint.step for step in steps if step is not None)
    return FALSE_ALARMS * spent(before + 1)


def judged_by_margin(
    metric: ComparedMetric, *, margin: float, false_alarms: float, left_out: float = MOST_LEFT_OUT
) -> tuple[str, bool]:
    """Returns the finding on a score against the baseline, and True if it passes.

    `false_alarms` is the chance of refusing an equal score; `left_out` the largest share of questions with answers from
    a single side.
    """
    n = f"{how_many(metric.pairing.pairs, 'question')} of both" if metric.pairing else metric.unpaired_because
    shown = f"{measured(metric.first, None)} → {measured(metric.second, None)} ({n})"
    apart = metric.pairing.only_first + metric.pairing.only_second if metric.pairing else 0
    if metric.pairing and apart:
        shown += f"; left out: {how_many(metric.pairing.only_first, 'question')} of the baseline alone, "
        shown += f"{metric.pairing.only_second:,} of this checkpoint alone"
        if apart > left_out * (apart + metric.pairing.pairs):
            return f"{shown}, more than {left_out:.0%} of all", False
    if metric.higher_is_better is None:
        return f"{shown}; nothing says which direction is better", False
    if not math.isfinite(metric.finding.difference):
        return f"{shown}; not a number", False
    end = metric.finding.low if metric.higher_is_better else metric.finding.high
    detectable = metric.finding.detectable(false_alarms)
    if end is None or detectable is None:
        why = "all questions are in the same cluster" if metric.pairing else "nor are there standard errors of both"
        return f"{shown}; not tested: {why}", False
    lowest = end if metric.higher_is_better else -end
    shown += f"; worse by {_loss(-lowest)} at most" if lowest < 0 else f"; better by {_loss(lowest)} at least"
    shown += f"; equal scores pass margins from {_loss(detectable)} on"
    if lowest <= -margin and margin < detectable:
        needed = math.ceil((detectable / margin) ** 2 * (metric.pairing.pairs if metric.pairing else min(metric.n)))
        shown += f", but may not pass {margin:g}: that takes about {how_many(needed, 'question')}"
    return shown, lowest > -margin


def _loss(value: float) -> str:
    return f"{value:.3g}"
