"""What Prefect's UI shows of a flow run while it goes on: tags to find it by, and how far it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

import httpx
from prefect import tags
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext

from tasks.config import EVALUATOR_TITLES, EvaluationConfig
from tasks.names import artifact_key
from tasks.progress import CellDone, CellProgress, Update, listening, report_event, reported

_SECONDS_BETWEEN_UPDATES = 5.0


@contextmanager
def marked(configs: Sequence[EvaluationConfig]) -> Iterator[None]:
    """Tags the flow run we are in, and its task runs in the block; shows there how much of the cells is done.

    Outside of a flow run it does nothing. A Prefect server that does not answer costs the marks, nothing else.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        yield
        return
    found = tags_of(configs)
    _tag(context.flow_run.id, {*context.flow_run.tags, *found})
    bar = ProgressBar(configs[0].run_name, also=reported())
    with tags(*found), listening(bar.take):
        yield


def tags_of(configs: Sequence[EvaluationConfig]) -> list[str]:
    """Run and evaluators, and the tags of the records, which name suite and policy."""
    found = [f"run={configs[0].run_name}"]
    found += [f"evaluator={EVALUATOR_TITLES[config.evaluator]}" for config in configs]
    found += [tag for config in configs for tag in config.wandb_tags]
    return list(dict.fromkeys(found))


def _tag(flow_run_id: UUID, wanted: set[str]) -> None:
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run_id, tags=sorted(wanted))
    except httpx.HTTPError as error:
        report_event(f"the flow run stays without tags: {error}")


class ProgressBar:
    """A progress artifact: cells done, and the shares of those that are being evaluated.

    Args:
        run: that the cells are of.
        also: is told of every update too.
        clock: gives seconds.
    """

    def __init__(
        self, run: str, *, also: Callable[[Update], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._also, self._clock = run, also, clock
        self._lock = threading.Lock()
        self._shares: dict[int, float] = {}
        self._done: set[int] = set()
        self._cells = 0
        self._artifact: UUID | None = None
        self._sent_at: float | None = None
        self._given_up = False

    @property
    def percent(self) -> float:
        """How much is done, from 0 to 100."""
        return 100.0 * (len(self._done) + sum(self._shares.values())) / self._cells if self._cells else 0.0

    def take(self, update: Update) -> None:
        """Takes in one update, and shows it unless another was shown just now."""
        self._also(update)
        if not isinstance(update, CellProgress | CellDone):
            return
        with self._lock:
            self._count(update)
            now = self._clock()
            soon_again = self._sent_at is not None and now - self._sent_at < _SECONDS_BETWEEN_UPDATES
            if self._given_up or (soon_again and not isinstance(update, CellDone)):
                return
            self._sent_at = now
            self._send()

    def _count(self, update: CellProgress | CellDone) -> None:
        self._cells = update.cells
        if isinstance(update, CellDone):
            self._shares.pop(update.cell, None)
            self._done.add(update.cell)
        elif update.cell not in self._done:
            self._shares[update.cell] = update.done / update.total if update.total else 0.0

    def _send(self) -> None:
        described = f"{len(self._done)} of {self._cells} cells of {self._run} evaluated"
        try:
            if self._artifact is None:
                key = f"{artifact_key(self._run)}-progress"
                made = create_progress_artifact(self.percent, key=key, description=described)
                assert isinstance(made, UUID), "there is no event loop in the threads of cells"
                self._artifact = made
            else:
                update_progress_artifact(self._artifact, self.percent, description=described)
        except httpx.HTTPError as error:  # every further try would keep a cell waiting
            self._given_up = True
            report_event(f"progress is shown here only: {error}")
