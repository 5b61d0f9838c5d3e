"""The flows that evaluate the cells a policy wants and no record settles; safe to start any time and concurrently."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any

from prefect.runtime import deployment, flow_run
from pydantic import Field

from flows.evaluation import run_pending
from flows.hooks import pipeline
from pools.weights.merges import with_each_location
from resources.errors import AssayError, BadInput, CheckpointError
from resources.storage import storage
from tasks.checkpoints.checkpoint import Checkpoint, layouts_for
from tasks.checkpoints.discovery import find_checkpoints
from tasks.errors import EvaluationIncomplete, EvaluationInterrupted
from tasks.policies.actions import stopping_if_cancelled
from tasks.policies.batches import served_together
from tasks.policies.dispatch import FLOW, CellNames, Dispatcher, name_of_cell, read_dispatches, with_dispatches
from tasks.policies.gate import conclude_policy, conclude_settled, with_early
from tasks.policies.policy import Policy, check_policy_paths, own_gate
from tasks.policies.reconciliation import OpenCell, Reconciliation, RunListing, reconcile
from tasks.policies.snapshot import Estimates, take_snapshot
from tasks.prefect_server.client import require_server
from tasks.prefect_server.flow_runs import collapse_waiting, marked, settle_lost
from tasks.prefect_server.progress import report_event
from tasks.records.record import now
from tasks.running.cells import Cell, plan_cells, standing_record
from tasks.running.early import require_whole, unfinished_verdict
from tasks.running.expected import check_budget, tell, with_expectations
from tasks.spec.loading import load_config
from tasks.spec.names import how_many
from tasks.verdicts.gate import Gate


@dataclass(frozen=True)
class Pass:
    """The result of a reconciliation: the cells open at its start, and the outcomes of those it started."""

    state: Reconciliation
    succeeded: int
    failed: int
    left: int
    error: AssayError | None
    scheduled: int = 0
    decided: int = 0
    gone: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns the values for `--json`, which are also the flow's result."""
        states = {state: len(cells) for state, cells in self.state.by_state().items()}
        return {
            "done_before": self.state.done_count,
            "open_before": states,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "decided_early": self.decided,
            "gone": self.gone,
            "left_to_others": self.left,
            "scheduled": self.scheduled,
            "error": str(self.error) if self.error else None,
        }


@pipeline("reconcile-policy", run_name="reconcile {policy}")
def reconcile_policy(policy: Annotated[str, Field(title="file")] | Policy, gate: Gate | None = None) -> dict[str, Any]:
    """Evaluates the cells that a policy, given whole or as a file, wants and that no record settles.

    Cells that another run has claimed are left to it. A policy without pending cells is a success.

    Args:
        policy: A YAML file with a policy, in any store, or a whole policy.
        gate: Gate on the scores of each run so far, in place of the policy's own gate; the flow run fails on NO-GO.
    """
    require_whole(gate, by="--gate on a policy's runs")
    if deployment.id:
        collapse_waiting(deployment.id, current=str(flow_run.id))
        settle_lost(deployment.id)
    loaded_policy = load_policy(policy) if isinstance(policy, str) else policy
    own = own_gate(loaded_policy)
    if gate is not None:
        require_whole(own, by=f"a policy that is judged by another gate, {gate.name}")
    outcome = reconcile_once(loaded_policy)
    if gate is not None:
        conclude_policy(gate, loaded_policy, outcome.error)
    elif own is not None:
        conclude_settled(own, loaded_policy, outcome.error)
    elif outcome.error is not None:
        raise outcome.error
    return outcome.as_dict()


def load_policy(uri: str) -> Policy:
    """Returns the policy in a YAML or JSON file, in any store."""
    return load_config(uri, Policy)


def reconcile_once(policy: Policy, *, only: Callable[[OpenCell], bool] = lambda _: True) -> Pass:
    """Runs a single reconciliation: lists, plans, and evaluates pending cells by group; a failed group stops no other.

    If the policy's gate decides early, it repeats in rounds: cells that need whole results of earlier cells follow
    those, and cells that an early verdict sends to a whole evaluation follow that. If the policy dispatches to work
    pools, cells are sent there instead. The expected cost, with each cell evaluated whole, is logged before the start.
    `only` selects among the pending cells.
    """
    if deployment.id:
        check_policy_paths(policy)
    listings = take_snapshot(policy)
    state = reconcile(listings, policy, now=time.time())
    if policy.dispatch == "work_pools":
        state, scheduled, error = _dispatched(policy, listings, state)
        return Pass(state, 0, 0, 0, error, scheduled)
    report_event(f"{how_many(state.done_count, 'cell')} done, {len(state.work):,} to do, {len(state.others):,} wait")
    began = now()
    held = [cell for cell in state.others if cell.state == "held"]
    meant = [cell for cell in (*state.work, *held) if only(cell)][: policy.most_cells_at_once]
    expected = Estimates(listings).together(meant)
    if expected.cells:
        tell(expected)
    check_budget(expected, policy.max_usd)
    cells: list[Cell] = []
    errors: list[AssayError] = []
    with stopping_if_cancelled(policy, meant):
        todo, begun = state.work, set[tuple[str, str, bool]]()
        while fresh := _of_this_pass(todo, meant, begun):
            begun |= set(map(_way, fresh))
            for group in served_together(fresh):
                [listing] = [listing for listing in listings if listing.name == group[0].run]
                try:
                    planned, _ = with_expectations(_planned(group, listing, errors))
                    cells += planned
                    with marked(_configs(group)), _keeping_verdicts(listing, planned):
                        run_pending(planned, wait=False)
                except AssayError as error:
                    errors.append(error)
                    report_event(f"{group[0].title} and {len(group) - 1} more: {error.found}")
            if not any(listing.early for listing in listings):
                break
            listings = take_snapshot(policy)
            todo = reconcile(listings, policy, now=time.time()).work
    return _concluded(state, cells, errors, since=began)


def _of_this_pass(
    work: Sequence[OpenCell], meant: Sequence[OpenCell], begun: Collection[tuple[str, str, bool]]
) -> list[OpenCell]:
    cells = {_way(cell)[:2] for cell in meant}
    return [cell for cell in work if _way(cell)[:2] in cells and _way(cell) not in begun]


def _way(cell: OpenCell) -> tuple[str, str, bool]:
    return cell.checkpoint.uri, cell.evaluation.hash, cell.early


def _configs(group: Sequence[OpenCell]) -> list[Any]:
    return list({cell.evaluation.hash: cell.evaluation.config for cell in group}.values())


def _planned(group: Sequence[OpenCell], listing: RunListing, errors: list[AssayError]) -> list[Cell]:
    cell_keys = {(_place(cell), cell.evaluation.hash) for cell in group}
    checkpoints = [_as_it_is(cell, errors) for cell in {cell.checkpoint.uri: cell for cell in group}.values()]
    planned = plan_cells(_configs(group), [checkpoint for checkpoint in checkpoints if checkpoint is not None])
    planned = [cell for cell in planned if (cell.reference.uri, cell.evaluation_hash) in cell_keys]
    if listing.early is None:
        return planned
    meant = {(_place(cell), cell.evaluation.hash) for cell in group if cell.early}
    early = [cell for cell in planned if (cell.reference.uri, cell.evaluation_hash) in meant]
    whole = [cell for cell in planned if cell not in early]
    return [*whole, *with_early(listing.early, early, evaluations=len(listing.evaluations))]


@contextmanager
def _keeping_verdicts(listing: RunListing, cells: Sequence[Cell]) -> Iterator[None]:
    try:
        yield
    finally:
        if listing.early is not None:
            for cell in cells:
                # modified times of files may have changed since, not the weights
                if (verdict := unfinished_verdict(cell)) is not None:
                    listing.early.keep(verdict.model_copy(update={"checkpoint": cell.reference}))


def _place(cell: OpenCell) -> str:
    return with_each_location(cell.checkpoint.uri, storage.behind_link)


def _as_it_is(cell: OpenCell, errors: list[AssayError]) -> Checkpoint | None:
    try:
        listed = find_checkpoints(cell.checkpoint.uri, **layouts_for([cell.evaluation.config]))
    except CheckpointError as error:
        report_event(f"{cell.checkpoint.name}: {error.found}")
        errors.append(error)
        return None
    except BadInput:
        return None
    complete = next((seen for seen in listed if seen.uri == _place(cell) and seen.complete), None)
    seen = cell.checkpoint  # which the listing of its run has named
    return complete and replace(complete, run=cell.run, name=seen.name, step=seen.step, label=seen.label)


def _concluded(state: Reconciliation, cells: Sequence[Cell], errors: Sequence[AssayError], *, since: datetime) -> Pass:
    # a cell with an early verdict of worse was planned again, whole
    latest = list({cell.uri: cell for cell in cells}.values())
    cells = [cell for cell in latest if unfinished_verdict(cell) is None]
    records = [recorded.record for recorded in map(standing_record, cells) if recorded is not None]
    succeeded = sum(record.succeeded for record in records)
    gone = sum(record.status == "gone" for record in records)
    failed = [record for record in records if record.status not in ("succeeded", "gone") and record.created >= since]
    error: AssayError | None = errors[0] if errors else None
    if error is None and failed:
        ours = all(record.status == "infra_failed" for record in failed)
        kind = EvaluationInterrupted if ours else EvaluationIncomplete
        error = kind(
            expected=f"a succeeded record for {'each of ' if len(cells) > 1 else ''}{how_many(len(cells), 'cell')}",
            found=f"{len(failed)} failed. The first, {failed[0].checkpoint.name}:\n{failed[0].reason}",
            remedy="see why with `assay status --gaps`; failures of machines are tried again by themselves",
        )
    left = len(cells) - succeeded - len(failed) - gone
    return Pass(state, succeeded, len(failed), left, error, decided=len(latest) - len(cells), gone=gone)


@pipeline(FLOW, run_name="evaluate {policy} · {cells}")
def evaluate_cells(policy: Policy, cells: CellNames) -> dict[str, Any]:
    """Evaluates the named cells of a policy on this machine, as far as they are pending, and no other cells.

    Args:
        policy: The policy; its dispatch to work pools is ignored.
        cells: Names of the cells.
    """
    if deployment.id:
        settle_lost(deployment.id)
    names = frozenset(cells.names)
    local_policy = policy.model_copy(update={"dispatch": "here", "max_usd": None})  # the sender has checked the budget
    outcome = reconcile_once(local_policy, only=lambda cell: name_of_cell(cell) in names)
    if outcome.error is not None:
        raise outcome.error
    return outcome.as_dict()


def _dispatched(
    policy: Policy, listings: Sequence[RunListing], state: Reconciliation
) -> tuple[Reconciliation, int, AssayError | None]:
    # Failed batches do not stop the others, and waiting for capacity is not an error.
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
