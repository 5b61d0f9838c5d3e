"""The flow that does what a policy asks for and nothing has settled yet; safe to start at any time, and twice."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from prefect import flow
from prefect.runtime import deployment, flow_run
from pydantic import Field

from flows.evaluation import evaluate_wanted
from flows.hooks import leave_nothing
from flows.loading import load_config
from resources.errors import AssayError, BadInput, EvaluationIncomplete, EvaluationInterrupted
from tasks.cells import Cell, plan_cells
from tasks.checkpoints import LOADED_NATIVELY, Checkpoint, find_checkpoints
from tasks.policies import Policy, check_policy_paths
from tasks.policy_looking import look
from tasks.policy_runs import collapse_waiting
from tasks.progress import report_event
from tasks.reconciliation import OpenCell, Reconciliation, reconcile
from tasks.records import Record, now, read_record
from tasks.run_marks import marked


@dataclass(frozen=True)
class Pass:
    """What one reconciliation came to: what was open at its beginning, and what became of the cells it took on."""

    found: Reconciliation
    succeeded: int
    failed: int
    left: int
    error: AssayError | None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`, and as what the flow returns."""
        states = {state: len(cells) for state, cells in self.found.by_state().items()}
        return {
            "done_before": self.found.done_count,
            "open_before": states,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "left_to_others": self.left,
            "error": str(self.error) if self.error else None,
        }


@flow(
    name="reconcile-policy",
    flow_run_name="reconcile {policy}",
    persist_result=False,
    on_cancellation=[leave_nothing],
    on_crashed=[leave_nothing],
)
def reconcile_policy(policy: Annotated[str, Field(title="file")] | Policy) -> dict[str, Any]:
    """Evaluates the cells that a policy, given whole or as a file, wants and that no record settles.

    Cells that another run has claimed are left to it. Nothing to do is a success.

    Args:
        policy: A YAML file with one, in any store, or a policy whole.

    Raises:
        AssayError: the policy cannot be right, or a cell that was taken on has no succeeded record in the end.
    """
    if deployment.id:
        collapse_waiting(deployment.id, beside=str(flow_run.id))
    outcome = reconcile_once(load_policy(policy) if isinstance(policy, str) else policy)
    if outcome.error is not None:
        raise outcome.error
    return outcome.as_dict()


def load_policy(uri: str) -> Policy:
    """A policy from a YAML or JSON file, in any store.

    Raises:
        BadInput: it is not there, or not valid.
    """
    return load_config(uri, Policy)


def reconcile_once(policy: Policy) -> Pass:
    """One pass: looks, decides, evaluates what is to be done, group by group; a group that fails stops no other.

    Raises:
        AssayError: nothing could be looked at, or the policy cannot be right.
    """
    if deployment.id:
        check_policy_paths(policy)
    found = reconcile(look(policy), policy, now=time.time())
    report_event(f"{found.done_count:,} cells done, {len(found.work):,} to do, {len(found.others):,} wait")
    began = now()
    taken = found.work[: policy.most_cells_at_once]
    cells: list[Cell] = []
    errors: list[AssayError] = []
    for group in _groups(taken):
        try:
            planned = _planned(group)
            cells += planned
            with marked(_configs(group)):
                evaluate_wanted(_configs(group), planned, wait=False)
        except AssayError as error:
            errors.append(error)
            report_event(f"{group[0].title} and {len(group) - 1} more: {error.found}")
    return _concluded(found, cells, errors, since=began)


def _groups(work: Iterable[OpenCell]) -> list[list[OpenCell]]:
    """Cells that one pool or endpoint can serve: of one run, served alike; by priority, which runs through a group."""
    groups: dict[tuple[Any, ...], list[OpenCell]] = {}
    for cell in work:
        config = cell.evaluation.config
        served = config.pool_config.model_dump_json() if config.pool_config else None
        kind = cell.checkpoint.kind  # an engine serves only one of them
        ways = (None,) if config.native else (served, config.pool_name, config.base_url)
        groups.setdefault((cell.run, kind, cell.evaluation.priority, ways), []).append(cell)
    return list(groups.values())


def _configs(group: Sequence[OpenCell]) -> list[Any]:
    return list({cell.evaluation.hash: cell.evaluation.config for cell in group}.values())


def _planned(group: Sequence[OpenCell]) -> list[Cell]:
    """The cells of a group, whole: with digests, folders and what stands there by now."""
    wanted = {(cell.checkpoint.uri, cell.evaluation.hash) for cell in group}
    checkpoints = [_looked_at(cell) for cell in {cell.checkpoint.uri: cell for cell in group}.values()]
    planned = plan_cells(_configs(group), [one for one in checkpoints if one is not None])
    return [cell for cell in planned if (cell.reference.uri, cell.evaluation_hash) in wanted]


def _looked_at(cell: OpenCell) -> Checkpoint | None:
    """A checkpoint as it is by now; None if it is not whole any more, which the next pass will see too."""
    kinds = LOADED_NATIVELY if cell.evaluation.config.native else ("huggingface",)
    try:
        found = find_checkpoints(cell.checkpoint.uri, kinds=kinds, reference=cell.evaluation.config.levanter.reference)
    except BadInput:
        return None
    return next((one for one in found if one.uri == cell.checkpoint.uri and one.complete), None)


def _concluded(found: Reconciliation, cells: Sequence[Cell], errors: Sequence[AssayError], *, since: datetime) -> Pass:
    records = [record for record in map(_standing, cells) if record is not None]
    succeeded = sum(record.succeeded for record in records)
    failed = [record for record in records if not record.succeeded and record.created >= since]
    error: AssayError | None = errors[0] if errors else None
    if error is None and failed:
        ours = all(record.status == "infra_failed" for record in failed)
        kind = EvaluationInterrupted if ours else EvaluationIncomplete
        error = kind(
            expected=f"a succeeded record for each of {len(cells)} cells",
            found=f"{len(failed)} failed. The first, {failed[0].checkpoint.name}:\n{failed[0].reason}",
            remedy="see why with `assay gaps`; failures of machines are tried again by themselves",
        )
    return Pass(found, succeeded, len(failed), len(cells) - succeeded - len(failed), error)


def _standing(cell: Cell) -> Record | None:
    found = [read_record(one.uri) for one in (cell, cell.alternative) if one is not None]
    return max(
        (record for record in found if record is not None),
        key=lambda record: (record.succeeded, record.created),
        default=None,
    )
