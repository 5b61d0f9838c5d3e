"""A flow run that a person cancels: what it had taken on waits for `assay retry`, as after `assay cancel`.

Without that a schedule or an event would begin it again at once. A flow run that ends in another way, by a signal of
its worker or a crash, says nothing about its cells.
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
    """Stops the cells that have no outcome if our flow run is cancelled inside of the block.

    Where that cannot be asked or written now, or the process is killed before, the flow run's hook stops those that
    were begun.
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
    """Stops what a cancelled flow run has left without an outcome, and nobody else has taken up; how many cells.

    Args:
        policy: the policy that it carried out.
        cells: those that it was to evaluate, begun or not.
        flow_run_id: whose claims, held or given up, tell of more cells; none that a person has decided about since.
        name: of the flow run, for people.

    Raises:
        AssayError: the policy's runs cannot be looked at, or overrides not be written.
    """
    listings = take_snapshot(policy)
    taken = {_key(cell) for cell in cells}
    begun = {key for listing in listings for key in _begun(listing, policy, flow_run_id)}
    found = reconcile(listings, policy, now=time.time())
    by_run: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for cell in (*found.work, *found.others):
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
