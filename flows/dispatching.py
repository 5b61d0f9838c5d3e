"""Sends evaluations to work pools: the cells of a policy, or a request of `assay evaluate`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from resources.errors import AssayError
from tasks.policies.dispatch import Dispatcher
from tasks.policies.dispatched import read_dispatches, with_dispatches
from tasks.policies.policy import Policy, check_policy_paths
from tasks.policies.reconciliation import Reconciliation, RunListing
from tasks.policies.snapshot import Estimates
from tasks.prefect_server.client import require_server
from tasks.prefect_server.progress import report_event
from tasks.running.expected import check_budget, tell
from tasks.spec.names import how_many


def dispatch(
    policy: Policy, listings: Sequence[RunListing], state: Reconciliation
) -> tuple[Reconciliation, int, AssayError | None]:
    """Sends pending cells to work pools in batches, and moves batches that no worker starts to other work pools.

    Failed batches do not stop the others, and waiting for capacity is not an error. Returns the cells that were open
    before, the number of cells sent, and the first error.

    Raises:
        BadInput: there is no persistent server, a path is relative, or a region has no deployment of the flow.
        PrefectUnavailable: the server does not answer.
        OverBudget: the expected cost exceeds the policy's limit, or is unknown.
    """
    require_server()
    check_policy_paths(policy)
    sent = read_dispatches(policy)
    state = with_dispatches(state, listings, sent, policy, now=time.time())
    report_event(f"{how_many(state.done_count, 'cell')} done, {len(state.work):,} to do, {len(state.others):,} wait")
    dispatcher = Dispatcher(policy, listings, sent)
    for before, batch in dispatcher.move_stuck(state):
        report_event(f"no worker begins {before.name!r} at {before.work_pool}; {batch.described()}")
    cells = 0
    error: AssayError | None = None
    taken = state.work[: policy.most_cells_at_once]
    batches = dispatcher.batches(taken)
    expected = Estimates(listings, batches).together(taken)
    if expected.cells:
        tell(expected)
    check_budget(expected, policy.max_usd)
    for batch in batches:
        report_event(batch.described())  # with its price, before anything is spent
        if batch.choice is not None:
            dispatcher.send(batch)
            cells += len(batch.cells)
        elif not batch.waits:
            error = error or batch.error
    return state, cells, error
