"""Flow runs of a policy's deployment: waiting runs that are superseded, and runs that were killed."""

from __future__ import annotations

import time
from contextlib import suppress
from uuid import UUID

from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from tasks.errors import PrefectUnavailable
from tasks.prefect_server.client import prefect_client
from tasks.prefect_server.progress import report_event
from tasks.prefect_server.progress_artifact import note_ending
from tasks.spec.names import how_many

_BY_MACHINES = ("AUTOMATION", "SCHEDULE")
_OVER = [StateType.CRASHED, StateType.CANCELLED]
_OPEN = [StateType.RUNNING, StateType.PENDING]


def collapse_waiting(deployment_id: str, *, current: str) -> int:
    """Cancels waiting runs of a deployment that events and schedules created; returns their number.

    The current run does their work. Must be called before it reads any state: everything they would have read exists by
    then. Runs started by users or planned for later are left alone. If the server cannot be reached nothing is
    cancelled; the runs then execute in turn without work.
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
            if str(run.id) != current and _waits(run):
                with suppress(ObjectNotFound):
                    state = Cancelled(message=f"the run {current} looks at everything that this run would have")
                    client.set_flow_run_state(run.id, state=state)
                    ended += 1
    if ended:
        report_event(f"{how_many(ended, 'waiting flow run')} of this policy cancelled: this run looks at everything")
    return ended


def _waits(run: FlowRun) -> bool:
    ours = run.auto_scheduled or (run.created_by is not None and run.created_by.type in _BY_MACHINES)
    planned = run.next_scheduled_start_time
    return ours and (planned is None or planned.timestamp() <= time.time())


def settle_lost(deployment_id: str) -> int:
    """Marks the open task runs of a deployment's crashed or cancelled flow runs as crashed; returns their number.

    An automation marks a flow run that died with its worker, but its task runs would be shown as running forever. Must
    be called by the next flow run.
    """
    lost = _end_task_runs(
        FlowRunFilter(
            deployment_id=FlowRunFilterDeploymentId(any_=[UUID(deployment_id)]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_OVER)),
        )
    )
    for flow_run_id in dict.fromkeys(lost):
        note_ending(flow_run_id, "crashed")
    return len(lost)


def end_task_runs(flow_run_id: UUID) -> int:
    """Marks the open task runs of an ended flow run as crashed; returns their number."""
    return len(_end_task_runs(FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))))


def _end_task_runs(flow_runs: FlowRunFilter) -> list[UUID]:
    still = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=_OPEN)))
    flow_run_ids: list[UUID] = []
    with suppress(PrefectUnavailable), prefect_client() as client:
        for run in client.read_task_runs(flow_run_filter=flow_runs, task_run_filter=still, limit=200):
            with suppress(ObjectNotFound):
                state = Crashed(message="it was killed with its flow run")
                client.set_task_run_state(run.id, state=state, force=True)
                flow_run_ids += [run.flow_run_id] if run.flow_run_id else []
    return flow_run_ids
