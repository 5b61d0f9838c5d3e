"""The demo's flow: all checkpoints by every harness of its suite, and the mean of the last checkpoints by the first."""

from __future__ import annotations

from flows.evaluation import evaluate
from flows.hooks import pipeline
from tasks.checkpoints.discovery import discover, layouts_for
from tasks.prefect_server.flow_runs import error_noted
from tasks.records.record import Record
from tasks.running.cells import as_served, plan_cells
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig


@pipeline("evaluate-demo", run_name="evaluate {merged.run_name} · demo")
def evaluate_demo(configs: tuple[EvaluationConfig, ...], merged: EvaluationConfig) -> list[Record]:
    """Runs every evaluation of a run's checkpoints, and an evaluation of a merged checkpoint, on a shared pool.

    Args:
        configs: The evaluations of the checkpoints.
        merged: The evaluation of the merged checkpoint, with its name as model_path.
    """
    with error_noted():
        everything = CheckpointSelection()
        checkpoints = discover(configs[0].model_path, everything, **layouts_for(configs))
        along = plan_cells([as_served(merged)], discover(merged.model_path, everything))
        return evaluate(configs, checkpoints, along=along)
