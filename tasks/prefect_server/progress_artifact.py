"""Tags and progress of running flow runs in Prefect's UI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from uuid import UUID

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterType,
)
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.errors import PrefectUnavailable
from tasks.prefect_server.client import prefect_client
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

_SECONDS_BETWEEN_UPDATES = 5.0
_LAST_UPDATE_SECONDS = 5.0
"""Time limit for showing the last update at the end of the cells, in seconds."""


@contextmanager
def marked(configs: Sequence[EvaluationConfig]) -> Iterator[None]:
    """Tags the current flow run, and shows the share of finished cells in it; does nothing outside of a flow run.

    Task runs get no tags: Prefect requests each tag of a task from the server before the task may start, so an
    unreachable server would end the evaluation. An unreachable server costs only the tags and the progress, and delays
    no cell.
    """
    with marked_as(configs[0].run_name, tags=tags_of(configs)):
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


def tags_of(configs: Sequence[EvaluationConfig]) -> list[str]:
    """Returns tags of run and evaluators, and the records' tags, which name suite and policy."""
    tags = [f"run={configs[0].run_name}"]
    tags += [f"evaluator={config.evaluator.title}" for config in configs]
    tags += [tag for config in configs for tag in config.wandb_tags]
    return list(dict.fromkeys(tags))


def _tag(flow_run: FlowRun, more: Sequence[str]) -> None:
    flow_run.tags = sorted({*flow_run.tags, *more})
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, tags=flow_run.tags)
    except httpx.HTTPError as error:
        report_event(f"the flow run stays without tags: {error}")


def note_ending(flow_run_id: UUID, ending: str) -> None:
    """Appends how a flow run ended, such as `cancelled`, to its progress artifact, if the server can be reached."""
    with suppress(PrefectUnavailable), prefect_client() as client:
        artifacts = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]),
                type=ArtifactFilterType(any_=["progress"]),
            )
        )
        for artifact in artifacts:
            client.update_artifact(artifact.id, ArtifactUpdate(description=f"{artifact.description}; {ending}"))


class ProgressBar:
    """A progress artifact: cells with an outcome, plus the shares of cells in progress.

    A separate thread sends the latest state, so callers never wait for the server. Cells that were interrupted or
    failed for infrastructure reasons have no outcome; they keep their share, since their answers are kept.

    Args:
        also: called with each update, too.
        send: shows a share in percent and a line.
    """

    def __init__(
        self,
        run: str,
        *,
        also: Callable[[Update], None],
        clock: Callable[[], float] = time.monotonic,
        send: Callable[[float, str], None] | None = None,
    ) -> None:
        self._run, self._also, self._clock = run, also, clock
        self._send = send or _Artifact(f"{artifact_key(run)}-progress").show
        self._changed = threading.Condition()
        self._shares: dict[int, float] = {}
        self._done: set[int] = set()
        self._cells = 0
        self._answers: str | None = None
        self._news, self._closing = False, False
        self._thread: threading.Thread | None = None

    @property
    def percent(self) -> float:
        return 100.0 * (len(self._done) + sum(self._shares.values())) / self._cells if self._cells else 0.0

    def take(self, update: Update) -> None:
        self._also(update)
        if not isinstance(update, CellProgress | AnswersProgress | CellDone):
            return
        with self._changed:
            self._count(update)
            self._news = True
            if self._thread is None and not self._closing:
                context = copy_context()  # carries the artifact's flow run
                self._thread = threading.Thread(target=context.run, args=(self._show,), name="progress", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Shows the last update, within a few seconds at most, and nothing after that."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
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
        shown_at: float | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._news or self._closing)
                while shown_at is not None and not self._closing:
                    left = shown_at + _SECONDS_BETWEEN_UPDATES - self._clock()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                if not self._news:
                    return
                self._news = False
                percent = self.percent
                described = f"{len(self._done)} of {how_many(self._cells, 'cell')} of {self._run} evaluated"
                described = self._answers or described
            shown_at = self._clock()
            try:
                self._send(percent, described)
            except httpx.HTTPError:  # the server is unreachable
                with self._changed:
                    self._news = True
                    if self._closing:
                        return


class _Artifact:
    def __init__(self, key: str) -> None:
        self._key = key
        self._made: UUID | None = None

    def show(self, percent: float, described: str) -> None:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):  # retries are pointless: newer progress follows soon
            if self._made is None:
                made = create_progress_artifact(percent, key=self._key, description=described)
                assert isinstance(made, UUID), "there is no event loop in the thread that shows it"
                self._made = made
            else:
                update_progress_artifact(self._made, percent, description=described)
