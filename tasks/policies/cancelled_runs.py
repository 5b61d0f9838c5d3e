"""Flow runs cancelled by a user: their cells wait for `assay retry`, as after `assay cancel`.

Otherwise a schedule or an event would start the cells again at once. Flow runs that end otherwise, by a signal of their
worker or a crash, do not affect their cells.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from uuid import UUID

from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from resources.errors import AssayError
from tasks.policies.actions import CANCELLED_BY_COMMAND
from tasks.policies.overrides import write_override
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import OpenCell, RunListing, reconcile
from tasks.policies.snapshot import run_folder, take_snapshot
from tasks.prefect_server.client import prefect_client, server_address
from tasks.prefect_server.progress import report_event
from tasks.spec.names import how_many


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
    taken = {_key(cell) for cell in cells}
    begun = {key for listing in listings for key in _begun(listing, policy, flow_run_id)}
    reconciliation = reconcile(listings, policy, now=time.time())
    by_run: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for cell in (*reconciliation.work, *reconciliation.others):
        key = _key(cell)
        ours = key in begun or (key in taken and cell.state != "claimed")
        if ours and cell.state not in ("failed", "stopped", "decided_early"):
            by_run[cell.run].append(key[1:])
    for run, keys in by_run.items():
        write_override(run_folder(policy, run), "stop", keys, policy=policy.name, flow_run=name)
    return sum(map(len, by_run.values()))


def _begun(listing: RunListing, policy: Policy, flow_run_id: str) -> Iterator[tuple[str, str, str]]:
    for seen in listing.claims:
        claim, subject = seen.claim, seen.claim.subject
        override = listing.overrides.newest(subject.checkpoint, subject.evaluation_hash, policy=policy.name)
        if claim.flow_run == flow_run_id and (override is None or override.at < claim.at):
            yield listing.name, subject.checkpoint, subject.evaluation_hash


def _key(cell: OpenCell) -> tuple[str, str, str]:
    return cell.run, cell.checkpoint.name, cell.evaluation.hash


def _is_being_cancelled(flow_run_id: str) -> bool:
    if server_address() is None:
        return False
    with suppress(AssayError, ObjectNotFound), prefect_client() as client:
        state = client.read_flow_run(UUID(flow_run_id)).state
        if state is None or state.message == CANCELLED_BY_COMMAND:
            return False
        return state.type in (StateType.CANCELLING, StateType.CANCELLED)
    return False
