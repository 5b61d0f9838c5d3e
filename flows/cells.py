"""The flow that evaluates named cells of a policy: what a reconciliation sends to a work pool."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.runtime import deployment

from flows.hooks import leave_nothing
from flows.reconcile import reconcile_once
from tasks.policies.dispatched import FLOW, CellNames, name_of_cell
from tasks.policies.policy import Policy
from tasks.prefect_server.client import end_reported
from tasks.prefect_server.flow_runs import settle_lost


@flow(
    name=FLOW,
    flow_run_name="evaluate {policy} · {cells}",
    persist_result=False,
    on_cancellation=[leave_nothing],
    on_crashed=[leave_nothing],
)
def evaluate_cells(policy: Policy, cells: CellNames) -> dict[str, Any]:
    """Evaluates cells of a policy here, as far as they are still to be done; the policy's others are left alone.

    Args:
        policy: The policy; where it would send its cells is not looked at.
        cells: Which of its cells.

    Raises:
        AssayError: the policy cannot be right, or a cell that was taken on has no succeeded record in the end.
    """
    if deployment.id:
        settle_lost(deployment.id)
    wanted = frozenset(cells.names)
    here = policy.model_copy(update={"dispatch": "here", "max_usd": None})  # whoever sent them has looked at that
    with end_reported():
        outcome = reconcile_once(here, only=lambda cell: name_of_cell(cell) in wanted)
        if outcome.error is not None:
            raise outcome.error
    return outcome.as_dict()
