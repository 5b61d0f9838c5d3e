"""The flow for a training run: all or some of its checkpoints, on a shared pool."""

from __future__ import annotations

from prefect import flow

from flows.evaluation import evaluate
from flows.hooks import leave_nothing
from tasks.checkpoints.discovery import discover, layouts_for, with_pinned_model
from tasks.prefect_server.flow_runs import error_noted
from tasks.records.record import Record
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.verdicts.gate import Gate


@flow(
    name="evaluate-checkpoints",
    flow_run_name="evaluate {config.place}{selection.words} · {config.asked}",
    persist_result=False,
    on_cancellation=[leave_nothing],
    on_crashed=[leave_nothing],
)
def evaluate_checkpoints(
    config: EvaluationConfig, selection: CheckpointSelection = CheckpointSelection(), gate: Gate | None = None
) -> list[Record]:
    """Evaluates the complete checkpoints of a run that have no succeeded record yet.

    Args:
        config: The evaluation.
        selection: The checkpoints.
        gate: Gate on their scores; the flow run fails on NO-GO.

    Raises:
        AssayError: the run has no complete checkpoint, or a wanted cell has no succeeded record at the end.
        GateRefused: the gate's verdict is NO-GO.
    """
    with error_noted():
        config = with_pinned_model(config)
        checkpoints = discover(config.model_path, selection, **layouts_for([config]))
        return evaluate([config], checkpoints, gate=gate)
