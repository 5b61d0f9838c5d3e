"""Flow runs in Prefect: tags and progress, waiting runs that are superseded, runs that were killed, errors of failed
runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Crashed
from prefect.types import KeyValueLabels

from resources.errors import AssayError, error_of
from tasks.errors import PrefectUnavailable
from tasks.prefect_server.client import every_page, prefect_client
from tasks.prefect_server.progress import (
    AnswersProgress,
    CellDone,
    CellProgress,
    Update,
    listening,
    report_event,
    reported,
)
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.names import artifact_key, how_many

_BY_MACHINES = ("AUTOMATION", "SCHEDULE")
_SECONDS_BETWEEN_UPDATES = 5.0
_LAST_UPDATE_SECONDS = 5.0
"""Time limit for showing the last update at the end of the cells, in seconds."""
_ERROR_LABEL = "assay.error."


def collapse_waiting(deployment_id: str, *, current: str) -> int:
    """Cancels waiting runs of a deployment that events and schedules created; returns their number. The current run
    does their work. Must be called before it reads any state: everything they would have read exists by then. Runs
    started by users or planned for later are left alone. If the server cannot be reached nothing is cancelled; the runs
    then execute in turn without work."""
    ended = 0
    with suppress(PrefectUnavailable), prefect_client() as client:
        for run in every_page(client.read_flow_runs, flow_run_filter=_of_deployment(deployment_id, "SCHEDULED")):
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
    """Marks the open task runs of a deployment's crashed or cancelled flow runs as crashed; returns their number. An
    automation marks a flow run that died with its worker, but its task runs would be shown as running forever. Must be
    called by the next flow run."""
    lost = _end_task_runs(_of_deployment(deployment_id, "CRASHED", "CANCELLED"))
    for flow_run_id in dict.fromkeys(lost):
        note_ending(flow_run_id, "crashed")
    return len(lost)


def end_task_runs(flow_run_id: UUID) -> int:
    """Marks the open task runs of an ended flow run as crashed; returns their number."""
    return len(_end_task_runs(FlowRunFilter.model_validate({"id": {"any_": [flow_run_id]}})))


def _of_deployment(identifier: str, *states: str) -> FlowRunFilter:
    return FlowRunFilter.model_validate({"deployment_id": {"any_": [identifier]}, "state": {"type": {"any_": states}}})


def _end_task_runs(flow_runs: FlowRunFilter) -> list[UUID]:
    still = TaskRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "PENDING"]}}})
    flow_run_ids: list[UUID] = []
    with suppress(PrefectUnavailable), prefect_client() as client:
        for run in every_page(client.read_task_runs, flow_run_filter=flow_runs, task_run_filter=still):
            with suppress(ObjectNotFound):
                state = Crashed(message="it was killed with its flow run")
                client.set_task_run_state(run.id, state=state, force=True)
                flow_run_ids += [run.flow_run_id] if run.flow_run_id else []
    return flow_run_ids


def note_ending(flow_run_id: UUID, ending: str) -> None:
    """Appends how a flow run ended, such as `cancelled`, to its progress artifact, if the server can be reached."""
    of_run: dict[str, Any] = {"flow_run_id": {"any_": [flow_run_id]}, "type": {"any_": ["progress"]}}
    with suppress(PrefectUnavailable), prefect_client() as client:
        for artifact in client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(of_run)):
            client.update_artifact(artifact.id, ArtifactUpdate(description=f"{artifact.description}; {ending}"))


@contextmanager
def error_noted() -> Iterator[None]:
    """Stores an AssayError from the block as labels of the flow run, whose state has only a message, if the run belongs
    to a deployment. Labels are set before the flow run ends, for clients that wait for it; omitted if the server is
    unreachable."""
    try:
        yield
    except AssayError as error:
        if deployment.id and flow_run.id:
            labels: KeyValueLabels = {f"{_ERROR_LABEL}{name}": value for name, value in error.as_values().items()}
            with suppress(PrefectUnavailable, ObjectNotFound), prefect_client() as client:
                client.update_flow_run_labels(UUID(flow_run.id), labels)
        raise


def noted_error(run: FlowRun) -> AssayError | None:
    """Returns the stored error of a flow run, if any."""
    start = len(_ERROR_LABEL)
    labels = {name[start:]: value for name, value in run.labels.items() if name.startswith(_ERROR_LABEL)}
    return error_of(labels) if labels else None


@contextmanager
def marked(configs: Sequence[EvaluationConfig]) -> Iterator[None]:
    """Tags the current flow run, and shows the share of finished cells in it; does nothing outside of a flow run. Task
    runs get no tags: Prefect requests each tag of a task from the server before the task may start, so an unreachable
    server would end the evaluation. An unreachable server costs only the tags and the progress, and delays no cell."""
    tags = [f"run={configs[0].run_name}", *(f"evaluator={config.evaluator.title}" for config in configs)]
    tags += [tag for config in configs for tag in config.wandb_tags]
    with marked_as(configs[0].run_name, tags=tags):
        yield


@contextmanager
def marked_as(run: str, *, tags: Sequence[str]) -> Iterator[None]:
    """Marks the flow run as `marked`, for runs that are no evaluations."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    _tag(context.flow_run, tags)
    bar = ProgressBar(run, also=reported())
    try:
        with listening(bar.take):
            yield
    finally:
        bar.close()


def _tag(flow_run: FlowRun, more: Sequence[str]) -> None:
    flow_run.tags = sorted({*flow_run.tags, *more})
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, tags=flow_run.tags)
    except httpx.HTTPError as error:
        report_event(f"the flow run stays without tags: {error}")


class ProgressBar:
    """A progress artifact: cells with an outcome, plus the shares of cells in progress. A separate thread sends the
    latest state, so callers never wait for the server. Cells that were interrupted or failed for infrastructure reasons
    have no outcome; they keep their share, since their answers are kept. `also`: called with each update, too. `send`:
    shows a share in percent and a line."""

    def __init__(
        self,
        run: str,
        *,
        also: Callable[[Update], None],
        send: Callable[[float, str], None] | None = None,
        pause_seconds: float = _SECONDS_BETWEEN_UPDATES,
    ) -> None:
        self._run, self._also, self._pause_seconds = run, also, pause_seconds
        self._send = send or self._send_artifact
        self._artifact: UUID | None = None
        self._lock, self._woken, self._closing = threading.Lock(), threading.Event(), threading.Event()
        self._shares: dict[int, float] = {}
        self._done: set[int] = set()
        self._cells = 0
        self._answers: str | None = None
        self._news = False
        self._thread: threading.Thread | None = None

    def take(self, update: Update) -> None:
        self._also(update)
        if not isinstance(update, CellProgress | AnswersProgress | CellDone):
            return
        with self._lock:
            self._count(update)
            self._news = True
            if self._thread is None and not self._closing.is_set():
                context = copy_context()  # carries the artifact's flow run
                self._thread = threading.Thread(target=context.run, args=(self._show,), name="progress", daemon=True)
                self._thread.start()
        self._woken.set()

    def close(self) -> None:
        """Shows the last update, within a few seconds at most, and nothing after that."""
        with self._lock:
            self._closing.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join(_LAST_UPDATE_SECONDS)

    def _count(self, update: CellProgress | AnswersProgress | CellDone) -> None:
        self._cells = update.cells
        self._answers = update.described if isinstance(update, AnswersProgress) else None
        if isinstance(update, CellDone):
            if update.status != "infra_failed":
                self._shares.pop(update.cell, None)
                self._done.add(update.cell)
        elif update.cell not in self._done:
            self._shares[update.cell] = update.done / update.total if update.total else 0.0

    def _show(self) -> None:
        closing = False
        while not closing:
            self._woken.wait()
            with self._lock:
                self._woken.clear()
                closing, news, self._news = self._closing.is_set(), self._news, False
                percent = 100.0 * (len(self._done) + sum(self._shares.values())) / max(self._cells, 1)
                described = f"{len(self._done)} of {how_many(self._cells, 'cell')} of {self._run} evaluated"
                described = self._answers or described
            try:
                if news:
                    self._send(percent, described)
            except httpx.HTTPError:  # the server is unreachable
                self._news = True
                self._woken.set()
            self._closing.wait(self._pause_seconds)

    def _send_artifact(self, percent: float, described: str) -> None:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # retries are pointless: newer progress follows soon
            if self._artifact is None:
                key = f"{artifact_key(self._run)}-progress"
                made = create_progress_artifact(percent, key=key, description=described)
                assert isinstance(made, UUID), "there is no event loop in the thread that shows it"
                self._artifact = made
            else:
                update_progress_artifact(self._artifact, percent, description=described)
