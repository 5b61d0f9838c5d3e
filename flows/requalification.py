"""The flow that evaluates a checkpoint again with other pinned packages, to find out if its scores change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import flow

from flows.evaluation import run_claimed
from flows.hooks import leave_nothing
from resources.settings import with_pinned_lists
from tasks.checkpoints.discovery import discover_checkpoint, layouts_for
from tasks.prefect_server.client import end_reported
from tasks.prefect_server.flow_runs import marked
from tasks.records.record import Record
from tasks.running.cells import as_served, conclude, plan_cells
from tasks.running.claimed_cells import ClaimedCells
from tasks.spec.evaluation import EvaluationConfig


@flow(
    name="requalify",
    flow_run_name="requalify {configs[0].place} · {label}",
    persist_result=False,
    on_cancellation=[leave_nothing],
    on_crashed=[leave_nothing],
)
def ask_again(configs: Sequence[EvaluationConfig], label: str, lists: Mapping[str, Path]) -> list[Record]:
    """Evaluates a checkpoint with other pinned lists, without report, sinks and alerts.

    Args:
        configs: The evaluations, which must share a pool.
        label: The name of this side of the comparison.
        lists: Pinned lists in place of Assay's own, by environment.

    Raises:
        AssayError: a cell has no succeeded record at the end.
    """
    with with_pinned_lists(lists):
        configs = [as_served(config) for config in configs]
        checkpoint = discover_checkpoint(configs[0].model_path, latest=False, **layouts_for(configs))
        with marked(configs), end_reported():
            cells = plan_cells(configs, [checkpoint])
            with ClaimedCells(cells, wait=True) as claimed:
                run_claimed(configs, claimed)
            return conclude(cells)
