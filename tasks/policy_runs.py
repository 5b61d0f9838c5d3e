"""Flow runs of a policy's deployment: those that wait for one that is at work, of which one will do."""

from __future__ import annotations

import time
from contextlib import suppress
from uuid import UUID

from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled

from resources.errors import PrefectUnavailable
from tasks.prefect_client import prefect_client
from tasks.progress import report_event

_BY_MACHINES = ("AUTOMATION", "SCHEDULE")
_WAITING = ("AwaitingConcurrencySlot", "Late")


def collapse_waiting(deployment_id: str, *, beside: str) -> int:
    """Ends the flow runs of a deployment that events and schedules have made, and that wait for this one to end.

    To be called before a run looks at anything: whatever they would have looked at is there by then. A run that a
    person has started is left alone, and so is what is planned for later. Where the server cannot be asked nothing is
    ended; they run one after the other, and find nothing to do.

    Args:
        deployment_id: the deployment.
        beside: id of the run that looks.

    Returns:
        How many were ended.
    """
    ended = 0
    with suppress(PrefectUnavailable), prefect_client() as client:
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                deployment_id=FlowRunFilterDeploymentId(any_=[UUID(deployment_id)]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            ),
            limit=200,
        )
        for run in runs:
            if str(run.id) != beside and _waits(run):
                with suppress(ObjectNotFound):
                    state = Cancelled(message=f"the run {beside} looks at everything that this one would have")
                    client.set_flow_run_state(run.id, state=state)
                    ended += 1
    if ended:
        report_event(f"{ended} runs of this policy that were waiting are not needed any more")
    return ended


def _waits(run: FlowRun) -> bool:
    ours = run.auto_scheduled or (run.created_by is not None and run.created_by.type in _BY_MACHINES)
    due = run.state is not None and (
        run.state.name in _WAITING
        or run.next_scheduled_start_time is None
        or run.next_scheduled_start_time.timestamp() <= time.time()
    )
    return ours and due
