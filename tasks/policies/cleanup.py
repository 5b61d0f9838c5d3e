"""Cleanup after cancelled or crashed flow runs: their claims and jobs on a cluster end, cells of cancelled runs wait.

Claims end later by themselves with their lease, jobs with their submitter or a lease. Cells that a user cancelled with
their flow run wait for `assay retry`, as after `assay cancel`: a schedule or an event would start them again at once.
Flow runs that end otherwise, by a signal of their worker or a crash, do not affect their cells.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from pydantic import ValidationError

from resources.errors import AssayError
from resources.jobs.jobs import Client
from tasks.checkpoints.run_snapshot import expand_runs
from tasks.policies.actions import CANCELLED_BY_COMMAND
from tasks.policies.overrides import write_override
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import OpenCell, RunListing, reconcile
from tasks.policies.snapshot import run_folder, take_snapshot
from tasks.prefect_server.client import prefect_client, server_address
from tasks.prefect_server.progress import report_event
from tasks.running.claims.files import claims_folder, end_claim, read_claims
from tasks.spec.names import how_many, job_label, name_of
from tasks.spec.training import TrainAndEvaluateConfig


def _claims_folders(parameters: Mapping[str, Any]) -> dict[str, str]:
    if "policy" in parameters:
        policy = Policy.model_validate(parameters["policy"])
        names = [name_of(run)[0] for run in expand_runs(policy.runs)]
        return {name: claims_folder(policy.evaluation_path, name) for name in names}
    folders: dict[str, str] = {}
    for key in ("config", "request"):
        request = parameters.get(key)
        if isinstance(request, Mapping) and "training" in request:
            first = TrainAndEvaluateConfig.model_validate(request).asked()[0]
            folders[first.run_name] = claims_folder(first.evaluation_path, first.run_name)
        elif isinstance(request, Mapping) and {"evaluation_path", "model_path"} <= request.keys():
            name = _run_of(request)
            folders[name] = claims_folder(request["evaluation_path"], name)
    return folders


def _run_of(request: Mapping[str, Any]) -> str:
    model = (request.get("pool_config") or {}).get("model") or {}
    return request.get("model_name") or model.get("name") or name_of(request["model_path"])[0]


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
    """Stops the cells without an outcome if the current flow run is cancelled inside the block.

    If that fails, or the process is killed first, the flow run's hook stops the started cells.
    """
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

    Args:
        cells: cells that it was to evaluate, started or not.
        flow_run_id: its claims, held or released, identify more cells, except those with a later override.

    Raises:
        AssayError: runs of the policy cannot be read, or overrides cannot be written.
    """
    listings = take_snapshot(policy)
    taken = {(cell.run, *cell.key) for cell in cells}
    begun = {key for listing in listings for key in _begun(listing, policy, flow_run_id)}
    reconciliation = reconcile(listings, policy, now=time.time())
    by_run: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for cell in reconciliation.every:
        key = (cell.run, *cell.key)
        ours = key in begun or (key in taken and cell.state != "claimed")
        if ours and cell.state not in ("failed", "stopped", "decided_early"):
            by_run[cell.run].append(cell.key)
    for run, keys in by_run.items():
        write_override(run_folder(policy, run), "stop", keys, policy=policy.name, flow_run=name)
    return sum(map(len, by_run.values()))


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
