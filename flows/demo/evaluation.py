"""The demo's flow: every checkpoint by every harness of its suite, and beside them the mean of the last ones by one."""

from __future__ import annotations

from prefect import flow

from flows.evaluation import evaluate
from flows.hooks import leave_nothing
from tasks.checkpoints.discovery import discover, layouts_for
from tasks.prefect_server.noted_errors import error_noted
from tasks.records.record import Record
from tasks.running.cells import as_served, plan_cells
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig


@flow(
    name="evaluate-demo",
    flow_run_name="evaluate {merged.run_name} · demo",
    persist_result=False,
    on_cancellation=[leave_nothing],
    on_crashed=[leave_nothing],
)
def evaluate_demo(configs: tuple[EvaluationConfig, ...], merged: EvaluationConfig) -> list[Record]:
    """Makes every evaluation of a run's checkpoints, and one more of a merged checkpoint, on one pool.

    Args:
        configs: The evaluations of the checkpoints.
        merged: That of the merged one, whose name is its model_path.
    """
    with error_noted():
        everything = CheckpointSelection()
        checkpoints = discover(configs[0].model_path, everything, **layouts_for(configs))
        along = plan_cells([as_served(merged)], discover(merged.model_path, everything))
        return evaluate(configs, checkpoints, along=along)
