"""The flow for a training run: all or some of its checkpoints, on a shared pool."""

from __future__ import annotations

from flows.evaluation import evaluate
from flows.hooks import pipeline
from tasks.checkpoints.discovery import with_pinned_model
from tasks.records.record import Record
from tasks.running.planning import Request, plan
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.verdicts.gate import Gate


@pipeline("evaluate-checkpoints", run_name="evaluate {config.place}{selection.words} · {config.asked}")
def evaluate_checkpoints(
    config: EvaluationConfig, selection: CheckpointSelection = CheckpointSelection(), gate: Gate | None = None
) -> list[Record]:
    """Evaluates the complete checkpoints of a run that have no succeeded record yet.

    Args:
        config: The evaluation.
        selection: The checkpoints.
        gate: Gate on their scores; the flow run fails on NO-GO.
    """
    config = with_pinned_model(config, selection.series)
    return evaluate(plan(Request((config,), selection, gate)), gate=gate)
