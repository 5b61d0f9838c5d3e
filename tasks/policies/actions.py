"""User actions on cells of a policy: request another try, or cancel and block."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Sequence

from prefect.exceptions import PrefectException
from prefect.states import Cancelling

from resources.errors import AssayError, BadInput
from tasks.policies.dispatched import read_dispatches
from tasks.policies.overrides import write_override
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import OpenCell, Reconciliation, RunListing
from tasks.policies.snapshot import run_folder
from tasks.prefect_server.client import prefect_client, server_address
from tasks.prefect_server.progress import report_event
from tasks.running.claims.files import SeenClaim, end_claim

CANCELLED_BY_COMMAND = "assay cancel"
"""Message of the cancelled state of flow runs."""
_FAILED = ("failed", "retries_exhausted", "backing_off")


def chosen(reconciliation: Reconciliation, patterns: Sequence[str]) -> list[OpenCell]:
    """Returns the open cells that match any of `CHECKPOINT` or `CHECKPOINT:SUITE`, each a name or a pattern."""
    every = reconciliation.every
    taken: dict[int, OpenCell] = {}
    for pattern in patterns:
        name, _, suite = pattern.partition(":")
        matching = [
            cell
            for cell in every
            if fnmatch.fnmatch(cell.checkpoint.name, name)
            and any(fnmatch.fnmatch(name, suite or "*") for name in (*cell.evaluation.suites, cell.evaluation.hash))
        ]
        if not matching:
            raise BadInput(
                expected="--cell CHECKPOINT or CHECKPOINT:SUITE of a cell that is wanted and not done",
                found=pattern,
                remedy="`assay status --gaps` lists these cells",
            )
        taken.update((id(cell), cell) for cell in matching)
    return list(taken.values())


def retry(
    policy: Policy, reconciliation: Reconciliation, *, cells: Sequence[OpenCell] | None, failed: bool
) -> list[OpenCell]:
    """Permits another try of cells, by writing overrides; records stay. Returns the cells.

    Args:
        cells: all cells that failed, were cancelled or exhausted their retries when None.
        failed: with `cells=None`, leave out cancelled cells.
    """
    states = _FAILED if failed else (*_FAILED, "stopped")
    meant = [cell for cell in reconciliation.others if cell.state in states] if cells is None else list(cells)
    if cells is None and not failed:
        for run in {cell.run for cell in meant if cell.state == "stopped"}:
            write_override(run_folder(policy, run), "retry", None, policy=policy.name)
    for run, keys in _by_run(meant).items():
        write_override(run_folder(policy, run), "retry", keys, policy=policy.name)
    return meant


def cancel(
    policy: Policy, listings: Sequence[RunListing], *, cells: Sequence[OpenCell] | None
) -> tuple[int, list[str]]:
    """Blocks cells and ends their claims; with `cells=None` all of the policy, later cells included.

    Returns the number of ended claims and, only for the whole policy, the cancelled flow runs.
    """
    if cells is None:
        for listing in listings:
            write_override(run_folder(policy, listing.name), "stop", None, policy=policy.name)
    else:
        for run, keys in _by_run(cells).items():
            write_override(run_folder(policy, run), "stop", keys, policy=policy.name)
    meant = {(cell.run, *cell.key) for cell in cells or ()}
    ended: list[SeenClaim] = []
    for listing in listings:
        hashes = {evaluation.hash for evaluation in listing.evaluations}
        for claim in listing.claims:
            subject = claim.claim.subject
            if claim.claim.released:
                continue
            key = (listing.name, subject.checkpoint, subject.evaluation_hash)
            if key in meant if cells is not None else subject.evaluation_hash in hashes:
                end_claim(claim)
                ended.append(claim)
    if cells is not None:
        return len(ended), []
    runs = {claim.holder.flow_run for claim in ended if claim.holder is not None and claim.holder.flow_run}
    return len(ended), _cancel_flow_runs(policy, sorted(runs))


def _cancel_flow_runs(policy: Policy, ids: Sequence[str]) -> list[str]:
    if server_address() is None:
        return []
    at_work_pools: list[str] = []
    if policy.dispatch == "work_pools":
        try:
            at_work_pools = [str(dispatch.id) for dispatch in read_dispatches(policy).at_work]
        except AssayError as error:
            report_event(f"flow runs at work pools could not be cancelled, and find nothing to do: {error}")
    cancelled: list[str] = []
    for flow_run_id in dict.fromkeys([*ids, *at_work_pools]):
        try:
            with prefect_client() as client:
                client.set_flow_run_state(flow_run_id, state=Cancelling(message=CANCELLED_BY_COMMAND))
        except (AssayError, PrefectException) as error:
            report_event(f"flow run {flow_run_id} could not be cancelled: {error}")
        else:
            cancelled.append(flow_run_id)
    return cancelled


def _by_run(cells: Sequence[OpenCell]) -> dict[str, list[tuple[str, str]]]:
    keys: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for cell in cells:
        keys[cell.run].append(cell.key)
    return keys
