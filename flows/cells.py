"""The flow that evaluates named cells of a policy; reconciliations send it to work pools."""

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
    """Evaluates the named cells of a policy on this machine, as far as they are pending, and no other cells.

    Args:
        policy: The policy; its dispatch to work pools is ignored.
        cells: Names of the cells.

    Raises:
        AssayError: the policy is invalid, or a cell that was started has no succeeded record at the end.
    """
    if deployment.id:
        settle_lost(deployment.id)
    names = frozenset(cells.names)
    local_policy = policy.model_copy(update={"dispatch": "here", "max_usd": None})  # the sender has checked the budget
    with end_reported():
        outcome = reconcile_once(local_policy, only=lambda cell: name_of_cell(cell) in names)
        if outcome.error is not None:
            raise outcome.error
    return outcome.as_dict()
