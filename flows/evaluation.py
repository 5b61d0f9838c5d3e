"""The flow for one checkpoint, and what it shares with the flow for a run: plan, serve, evaluate, publish."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import flow

from tasks.checkpoints import Checkpoint, discover_one
from tasks.config import EvaluationConfig
from tasks.evaluation import conclude, evaluate_cells, plan_cells, stage_tokenizer
from tasks.publishing import publish_report
from tasks.records import Record
from tasks.serving import as_served, provisioned


@flow(name="evaluate-checkpoint", flow_run_name="evaluate {config.model_path}", persist_result=False)
def evaluate_checkpoint(config: EvaluationConfig) -> list[Record]:
    """Evaluates one checkpoint: the one at model_path, or the newest complete one below it if asked to look.

    Raises:
        AssayError: it is not there, not complete, or its cell has no succeeded record in the end.
    """
    return evaluate_each(config, [discover_one(config.model_path, latest=config.discover_latest_checkpoint)])


def evaluate_each(config: EvaluationConfig, checkpoints: Sequence[Checkpoint]) -> list[Record]:
    """Evaluates checkpoints on one pool, leaving out those that have a succeeded record."""
    config = as_served(config)
    cells = plan_cells(config, checkpoints)
    wanted = [cell for cell in cells if not cell.done]
    if wanted:
        with provisioned(config, [stage_tokenizer(cell) for cell in wanted]) as serving:
            evaluate_cells(wanted, serving)
    publish_report(config)
    return conclude(cells)
