"""A flow run that a person cancels: what it had taken on waits for `assay retry`, as after `assay cancel`.

Without that a schedule or an event would begin it again at once. A flow run that ends in another way, by a signal of
its worker or a crash, says nothing about its cells.
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
from prefect.settings import PREFECT_API_URL

from resources.errors import AssayError
from tasks.claims.files import read_claims
from tasks.policies.actions import CANCELLED_BY_COMMAND
from tasks.policies.cleanup import claims_folders, held_by
from tasks.policies.overrides import write_override
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import OpenCell, reconcile
from tasks.policies.snapshot import run_folder, take_snapshot
from tasks.prefect_server.client import prefect_client
from tasks.prefect_server.progress import report_event


@contextmanager
def stopping_if_cancelled(policy: Policy, cells: Sequence[OpenCell]) -> Iterator[None]:
    """Stops the cells that have no outcome if our flow run is cancelled inside of the block."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and flow_run.id and _is_being_cancelled(flow_run.id):
            with suppress(AssayError):  # then the next reconciliation begins them again
                stop_unfinished(policy, cells, flow_run_name=str(flow_run.name))
        raise


def stop_claimed(parameters: Mapping[str, Any], *, flow_run_id: str, name: str) -> int:
    """Stops the cells that a cancelled flow run of a policy still has claims of, since it was killed; how many.

    Raises:
        StorageError: claims cannot be read, or overrides not be written.
    """
    if "policy" not in parameters:
        return 0
    policy = Policy.model_validate(parameters["policy"])
    stopped = 0
    for run, folder in claims_folders(parameters).items():
        held = [seen.claim.subject for seen in read_claims(folder) if held_by(seen, flow_run_id)]
        if held:
            keys = [(subject.checkpoint, subject.evaluation_hash) for subject in held]
            write_override(run_folder(policy, run), "stop", keys, policy=policy.name, flow_run=name)
        stopped += len(held)
    return stopped


def _is_being_cancelled(flow_run_id: str) -> bool:
    """Returns whether somebody said so, by other means than `assay cancel`, which leaves overrides itself."""
    if PREFECT_API_URL.value() is None:
        return False
    with suppress(AssayError, ObjectNotFound), prefect_client() as client:
        state = client.read_flow_run(UUID(flow_run_id)).state
        if state is None or state.message == CANCELLED_BY_COMMAND:
            return False
        return state.type in (StateType.CANCELLING, StateType.CANCELLED)
    return False


def stop_unfinished(policy: Policy, cells: Sequence[OpenCell], *, flow_run_name: str) -> None:
    """Stops those of some cells, which a cancelled flow run had, that have no outcome and that nobody else has.

    Raises:
        AssayError: the policy's runs cannot be looked at, or overrides not be written.
    """
    taken = {(cell.run, cell.checkpoint.name, cell.evaluation.hash) for cell in cells}
    found = reconcile(take_snapshot(policy), policy, now=time.time())
    by_run: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for cell in (*found.work, *found.others):
        key = (cell.run, cell.checkpoint.name, cell.evaluation.hash)
        # Our own claims are given up by now: one that is claimed another run evaluates.
        if key in taken and cell.state not in ("failed", "stopped", "claimed"):
            by_run[cell.run].append(key[1:])
    for run, keys in by_run.items():
        write_override(run_folder(policy, run), "stop", keys, policy=policy.name, flow_run=flow_run_name)
        report_event(f"{len(keys)} of {run} wait for assay retry, since this flow run was cancelled")
