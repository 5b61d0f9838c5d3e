"""The flow for a training run: its checkpoints, all or some of them, on one pool."""

from __future__ import annotations

from prefect import flow

from flows.evaluation import evaluate_each
from tasks.checkpoints import discover, layouts_for
from tasks.config import CheckpointSelection, EvaluationConfig
from tasks.records import Record


@flow(name="evaluate-checkpoints", flow_run_name="evaluate run {config.model_path}", persist_result=False)
def evaluate_checkpoints(
    config: EvaluationConfig, selection: CheckpointSelection = CheckpointSelection()
) -> list[Record]:
    """Evaluates the complete checkpoints of a run; those that have a succeeded record are not evaluated again.

    Raises:
        AssayError: the run holds no complete checkpoint, or a wanted cell has no succeeded record in the end.
    """
    return evaluate_each([config], discover(config.model_path, selection, **layouts_for([config])))
