"""User actions on cells of a policy: request another try, or cancel and block."""

from __future__ import annotations

import fnmatch
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal
from uuid import UUID

from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import flow_run
from prefect.states import Cancelling
from pydantic import ValidationError

from resources.errors import AssayError, BadInput
from resources.jobs.jobs import Client
from tasks.policies.dispatch import read_dispatches
from tasks.policies.policy import Policy, write_override
from tasks.policies.reconciliation import OpenCell, Reconciliation, RunListing, reconcile
from tasks.policies.snapshot import run_folder, run_folders, take_snapshot
from tasks.prefect_server.client import prefect_client, server_address
from tasks.prefect_server.progress import report_event
from tasks.running.claims.files import SeenClaim, claims_folder, end_claim, read_claims
from tasks.spec.names import how_many, job_label, name_of, name_of_series, run_name_of
from tasks.spec.training import TrainAndEvaluateConfig

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
    """Permits another try of cells, by writing overrides; records stay. Returns the cells. `cells`: all cells that
    failed, were cancelled or exhausted their retries when None. `failed`: with `cells=None`, leave out cancelled
    cells."""
    states = _FAILED if failed else (*_FAILED, "stopped")
    meant = [cell for cell in reconciliation.others if cell.state in states] if cells is None else list(cells)
    if cells is None and not failed:
        for run in {cell.run for cell in meant if cell.state == "stopped"}:
            write_override(run_folder(policy, run), "retry", None, policy=policy.name)
    _override(policy, "retry", meant)
    return meant


def cancel(
    policy: Policy, listings: Sequence[RunListing], *, cells: Sequence[OpenCell] | None
) -> tuple[int, list[str]]:
    """Blocks cells and ends their claims; with `cells=None` all of the policy, later cells included. Returns the number
    of ended claims and, only for the whole policy, the cancelled flow runs."""
    if cells is None:
        for listing in listings:
            write_override(run_folder(policy, listing.name), "stop", None, policy=policy.name)
    else:
        _override(policy, "stop", cells)
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


def _override(
    policy: Policy, kind: Literal["retry", "stop"], cells: Sequence[OpenCell], *, flow_run: str | None = None
) -> None:
    keys: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for cell in cells:
        keys[cell.run].append(cell.key)
    for run, of_run in keys.items():
        write_override(run_folder(policy, run), kind, of_run, policy=policy.name, flow_run=flow_run)


def _claims_folders(parameters: Mapping[str, Any]) -> dict[str, str]:
    if "policy" in parameters:
        policy = Policy.model_validate(parameters["policy"])
        return {name: claims_folder(policy.evaluation_path, name) for name in run_folders(policy)}
    folders: dict[str, str] = {}
    for key in ("config", "request"):
        request = parameters.get(key)
        if isinstance(request, Mapping) and "training" in request:
            first = TrainAndEvaluateConfig.model_validate(request).asked()[0]
            folders[first.run_name] = claims_folder(first.evaluation_path, first.run_name)
        elif isinstance(request, Mapping) and {"evaluation_path", "model_path"} <= request.keys():
            model = (request.get("pool_config") or {}).get("model") or {}
            series, path = (parameters.get("selection") or {}).get("series"), request["model_path"]
            given = request.get("model_name") or model.get("name") or name_of(path)[0]
            # the flow looked at a folder with a step in its name, which may be gone, for which of the two it is
            for run in (given, run_name_of(path)) if given == name_of(path)[0] else (given,):
                name = name_of_series(run, series)
                folders[name] = claims_folder(request["evaluation_path"], name)
    return folders


def end_claims(parameters: Mapping[str, Any], *, flow_run: str) -> int:
    """Ends the claims of a flow run before their lease expires; returns their number."""
    ended = 0
    with suppress(ValidationError):
        for folder in _claims_folders(parameters).values():
            held = [seen for seen in read_claims(folder) if seen.claim.flow_run == flow_run and not seen.claim.released]
            ended += sum(map(end_claim, held))
    return ended


def end_jobs(client: Client, *, flow_run: str) -> int:
    """Ends leftover cluster jobs of a flow run; returns their number. Local jobs end with their submitting process."""
    if client.is_local:
        return 0
    label = job_label(flow_run)
    ended = 0
    for job in client.jobs():
        if not job.status.finished and label in job.name.split("-"):
            with suppress(AssayError):  # it ended meanwhile
                client.attach(job.job_id).terminate()
                ended += 1
    return ended


@contextmanager
def stopping_if_cancelled(policy: Policy, cells: Sequence[OpenCell]) -> Iterator[None]:
    """Stops the cells without an outcome if the current flow run is cancelled inside the block. If that fails, or the
    process is killed first, the flow run's hook stops the started cells."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and flow_run.id and _is_being_cancelled(flow_run.id):
            with suppress(AssayError):
                stopped = stop_unfinished(policy, cells, flow_run_id=flow_run.id, name=str(flow_run.name))
                report_event(f"{how_many(stopped, 'cell')} to wait for assay retry: this flow run was cancelled")
        raise


def stop_unfinished(policy: Policy, cells: Sequence[OpenCell] = (), *, flow_run_id: str, name: str) -> int:
    """Stops cells that a cancelled flow run left without an outcome and no other run claimed; returns their number.
    `cells`: cells that it was to evaluate, started or not. `flow_run_id`: its claims, held or released, identify more
    cells, except those with a later override. Raises AssayError if runs of the policy cannot be read, or overrides
    cannot be written."""
    listings = take_snapshot(policy)
    taken = {(cell.run, *cell.key) for cell in cells}
    begun = {key for listing in listings for key in _begun(listing, policy, flow_run_id)}
    reconciliation = reconcile(listings, policy, now=time.time())

    def is_left(cell: OpenCell) -> bool:
        key = (cell.run, *cell.key)
        ours = key in begun or (key in taken and cell.state != "claimed")
        return ours and cell.state not in ("failed", "stopped", "decided_early")

    left = list(filter(is_left, reconciliation.every))
    _override(policy, "stop", left, flow_run=name)
    return len(left)


def _begun(listing: RunListing, policy: Policy, flow_run_id: str) -> Iterator[tuple[str, str, str]]:
    for seen in listing.claims:
        claim, subject = seen.claim, seen.claim.subject
        override = listing.overrides.newest(subject.checkpoint, subject.evaluation_hash, policy=policy.name)
        if claim.flow_run == flow_run_id and (override is None or override.at < claim.at):
            yield listing.name, subject.checkpoint, subject.evaluation_hash


def _is_being_cancelled(flow_run_id: str) -> bool:
    if server_address() is None:
        return False
    with suppress(AssayError, ObjectNotFound), prefect_client() as client:
        state = client.read_flow_run(UUID(flow_run_id)).state
        if state is None or state.message == CANCELLED_BY_COMMAND:
            return False
        return state.type in (StateType.CANCELLING, StateType.CANCELLED)
    return False
