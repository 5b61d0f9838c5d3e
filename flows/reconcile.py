"""The flow that does what a policy asks for and nothing has settled yet; safe to start at any time, and twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from prefect import flow
from prefect.runtime import deployment, flow_run
from pydantic import Field

from flows.dispatching import dispatch
from flows.evaluation import run_pending
from flows.hooks import leave_nothing
from pools.weights.merges import with_each_location
from resources.errors import AssayError, BadInput, CheckpointError, EvaluationIncomplete, EvaluationInterrupted
from resources.storage import storage
from tasks.checkpoints.discovery import LOADED_NATIVELY, Checkpoint, find_checkpoints
from tasks.gates.early import require_whole, unfinished_verdict
from tasks.gates.gate import Gate
from tasks.policies.batches import served_together
from tasks.policies.cancelled_runs import stopping_if_cancelled
from tasks.policies.gate import conclude_policy, conclude_settled, with_early
from tasks.policies.policy import Policy, check_policy_paths, own_gate
from tasks.policies.reconciliation import OpenCell, Reconciliation, RunListing, reconcile
from tasks.policies.snapshot import Estimates, take_snapshot
from tasks.prefect_server.client import end_reported
from tasks.prefect_server.flow_runs import collapse_waiting, settle_lost
from tasks.prefect_server.progress import report_event
from tasks.prefect_server.progress_artifact import marked
from tasks.records.record import now
from tasks.running.cells import Cell, plan_cells, standing_record
from tasks.running.expected import check_budget, tell, with_expectations
from tasks.spec.loading import load_config
from tasks.spec.names import how_many


@dataclass(frozen=True)
class Pass:
    """The result of one reconciliation: what was open at its beginning, and what became of the cells it took on."""

    found: Reconciliation
    succeeded: int
    failed: int
    left: int
    error: AssayError | None
    scheduled: int = 0
    decided: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For `--json`, and as what the flow returns."""
        states = {state: len(cells) for state, cells in self.found.by_state().items()}
        return {
            "done_before": self.found.done_count,
            "open_before": states,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "decided_early": self.decided,
            "left_to_others": self.left,
            "scheduled": self.scheduled,
            "error": str(self.error) if self.error else None,
        }


@flow(
    name="reconcile-policy",
    flow_run_name="reconcile {policy}",
    persist_result=False,
    on_cancellation=[leave_nothing],
    on_crashed=[leave_nothing],
)
def reconcile_policy(policy: Annotated[str, Field(title="file")] | Policy, gate: Gate | None = None) -> dict[str, Any]:
    """Evaluates the cells that a policy, given whole or as a file, wants and that no record settles.

    Cells that another run has claimed are left to it. Nothing to do is a success.

    Args:
        policy: A YAML file with one, in any store, or a policy whole.
        gate: What the scores of each run must show by now, in place of the policy's own gate; the flow run fails where
            it says NO-GO.

    Raises:
        AssayError: the policy cannot be right, or a cell that was taken on has no succeeded record in the end.
        GateRefused: the gate says NO-GO; the policy's own one says it once of each checkpoint.
    """
    require_whole(gate, by="--gate on a policy's runs")
    if deployment.id:
        collapse_waiting(deployment.id, beside=str(flow_run.id))
        settle_lost(deployment.id)
    with end_reported():
        wanted = load_policy(policy) if isinstance(policy, str) else policy
        own = own_gate(wanted)
        if gate is not None:
            require_whole(own, by=f"a policy that is judged by another gate, {gate.name}")
        outcome = reconcile_once(wanted)
        if gate is not None:
            conclude_policy(gate, wanted, outcome.error)
        elif own is not None:
            conclude_settled(own, wanted, outcome.error)
        elif outcome.error is not None:
            raise outcome.error
    return outcome.as_dict()


def load_policy(uri: str) -> Policy:
    """A policy from a YAML or JSON file, in any store.

    Raises:
        BadInput: it is not there, or not valid.
    """
    return load_config(uri, Policy)


def reconcile_once(policy: Policy, *, only: Callable[[OpenCell], bool] = lambda _: True) -> Pass:
    """One pass: looks, decides, evaluates what is to be done, group by group; a group that fails stops no other.

    Where the policy's gate decides early there are rounds: what the whole ones of before are needed for follows them,
    and what an early verdict asks to be evaluated whole follows that. Where the policy says so, cells are sent to work
    pools instead. What they are expected to cost, each of them whole, is said before.

    Args:
        policy: the policy.
        only: which cells are meant, of those that are to be done.

    Raises:
        AssayError: nothing could be looked at, or the policy cannot be right.
        OverBudget: the cells are expected to cost more than the policy allows, or nobody knows what.
    """
    if deployment.id:
        check_policy_paths(policy)
    listings = take_snapshot(policy)
    found = reconcile(listings, policy, now=time.time())
    if policy.dispatch == "work_pools":
        found, scheduled, error = dispatch(policy, listings, found)
        return Pass(found, 0, 0, 0, error, scheduled)
    report_event(f"{how_many(found.done_count, 'cell')} done, {len(found.work):,} to do, {len(found.others):,} wait")
    began = now()
    held = [cell for cell in found.others if cell.state == "held"]
    meant = [cell for cell in (*found.work, *held) if only(cell)][: policy.most_cells_at_once]
    expected = Estimates(listings).together(meant)
    if expected.cells:
        tell(expected)
    check_budget(expected, policy.max_usd)
    cells: list[Cell] = []
    errors: list[AssayError] = []
    with stopping_if_cancelled(policy, meant):
        todo, begun = found.work, set[tuple[str, str, bool]]()
        while fresh := _of_this_pass(todo, meant, begun):
            begun |= set(map(_way, fresh))
            for group in served_together(fresh):
                [listing] = [listing for listing in listings if listing.name == group[0].run]
                try:
                    planned, _ = with_expectations(_planned(group, listing, errors))
                    cells += planned
                    with marked(_configs(group)), _keeping_verdicts(listing, planned):
                        run_pending(_configs(group), planned, wait=False)
                except AssayError as error:
                    errors.append(error)
                    report_event(f"{group[0].title} and {len(group) - 1} more: {error.found}")
            if not any(listing.early for listing in listings):
                break
            listings = take_snapshot(policy)
            todo = reconcile(listings, policy, now=time.time()).work
    return _concluded(found, cells, errors, since=began)


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
    wanted = {(_place(cell), cell.evaluation.hash) for cell in group}
    checkpoints = [_as_it_is(cell, errors) for cell in {cell.checkpoint.uri: cell for cell in group}.values()]
    planned = plan_cells(_configs(group), [checkpoint for checkpoint in checkpoints if checkpoint is not None])
    planned = [cell for cell in planned if (cell.reference.uri, cell.evaluation_hash) in wanted]
    if listing.early is None:
        return planned
    meant = {(_place(cell), cell.evaluation.hash) for cell in group if cell.early}
    early = [cell for cell in planned if (cell.reference.uri, cell.evaluation_hash) in meant]
    whole = [cell for cell in planned if cell not in early]
    return [*whole, *with_early(listing.early, early, evaluations=len(listing.wanted))]


@contextmanager
def _keeping_verdicts(listing: RunListing, cells: Sequence[Cell]) -> Iterator[None]:
    try:
        yield
    finally:
        if listing.early is not None:
            for cell in cells:
                if (verdict := unfinished_verdict(cell)) is not None:  # files may have been touched since, not weights
                    listing.early.keep(verdict.model_copy(update={"checkpoint": cell.reference}))


def _place(cell: OpenCell) -> str:
    return with_each_location(cell.checkpoint.uri, storage.behind_link)


def _as_it_is(cell: OpenCell, errors: list[AssayError]) -> Checkpoint | None:
    kinds = LOADED_NATIVELY if cell.evaluation.config.native else ("huggingface",)
    try:
        found = find_checkpoints(cell.checkpoint.uri, kinds=kinds, reference=cell.evaluation.config.native_reference)
    except CheckpointError as error:
        report_event(f"{cell.checkpoint.name}: {error.found}")
        errors.append(error)
        return None
    except BadInput:
        return None
    return next((seen for seen in found if seen.uri == _place(cell) and seen.complete), None)


def _concluded(found: Reconciliation, cells: Sequence[Cell], errors: Sequence[AssayError], *, since: datetime) -> Pass:
    latest = list({cell.uri: cell for cell in cells}.values())  # one that was worse early was planned again, whole
    cells = [cell for cell in latest if unfinished_verdict(cell) is None]
    records = [found.record for found in map(standing_record, cells) if found is not None]
    succeeded = sum(record.succeeded for record in records)
    failed = [record for record in records if not record.succeeded and record.created >= since]
    error: AssayError | None = errors[0] if errors else None
    if error is None and failed:
        ours = all(record.status == "infra_failed" for record in failed)
        kind = EvaluationInterrupted if ours else EvaluationIncomplete
        error = kind(
            expected=f"a succeeded record for {'each of ' if len(cells) > 1 else ''}{how_many(len(cells), 'cell')}",
            found=f"{len(failed)} failed. The first, {failed[0].checkpoint.name}:\n{failed[0].reason}",
            remedy="see why with `assay gaps`; failures of machines are tried again by themselves",
        )
    left = len(cells) - succeeded - len(failed)
    return Pass(found, succeeded, len(failed), left, error, decided=len(latest) - len(cells))
