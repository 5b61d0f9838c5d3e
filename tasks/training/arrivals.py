"""Cells of a run that is being trained: planned as checkpoints become complete, until the training ends."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pools.engine.launch import Servable
from resources.errors import BackendUnavailable, CheckpointError, StorageError
from resources.jobs.jobs import JobDetails, JobHandle
from resources.storage import storage
from resources.storage.storage import FileInfo
from tasks.checkpoints.checkpoint import first_at_multiples
from tasks.checkpoints.discovery import Checkpoint, checkpoint_at
from tasks.prefect_server.progress import Event, report, report_event
from tasks.running.cells import Cell, plan_cells
from tasks.running.claimed_cells import ClaimedCells
from tasks.running.scheduler import stage_tokenizers
from tasks.running.serving import Serving
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.labels import order_of
from tasks.spec.names import how_many
from tasks.training.job import SILENCE_SECONDS

_STEP_LINE = re.compile(r'\{"tracker": "json_logger".*"train/loss".*\}')
_SECONDS_BETWEEN_STEPS = 10.0
_LOG_LINES = 40


class ArrivingCheckpoints:
    """The checkpoints of a run: each is returned once it is complete, and again if it is rewritten. A checkpoint is
    read only after two listings agree about its files, so polling during a write is cheap. `every_n_steps`: return only
    the first step at or past each multiple of this, and the last step. `steps_from`: an expression for their steps."""

    def __init__(self, uri: str, *, every_n_steps: int | None = None, steps_from: str | None = None) -> None:
        self._uri = uri
        self._steps_from = steps_from
        self._every = every_n_steps
        self._seen: dict[str, tuple[FileInfo, ...]] = {}
        self._looked_into: dict[str, tuple[FileInfo, ...]] = {}
        self._left_out: dict[int, Checkpoint] = {}
        self._complete: set[int] = set()

    def find_new(self, *, last: bool = False) -> list[Checkpoint]:
        """Returns the complete checkpoints that were not returned before, sorted by step. `last`: True if the training
        has ended: skips the wait for two equal listings, and includes the last step. Raises StorageError if they cannot
        be listed or read."""
        grouped: dict[str, list[FileInfo]] = defaultdict(list)
        for file in storage.list_files(self._uri):
            grouped[storage.parent(file.uri)].append(file)
        now = {folder: tuple(files) for folder, files in grouped.items()}
        looked_into: dict[str, tuple[FileInfo, ...]] = {}
        settled = [folder for folder, files in now.items() if last or self._seen.get(folder) == files]
        self._seen = now
        arrived: list[Checkpoint] = []
        for folder in settled:
            if self._looked_into.get(folder) == now[folder]:
                continue
            checkpoint = checkpoint_at(folder, steps_from=self._steps_from)
            looked_into[folder] = now[folder]
            if checkpoint is not None and checkpoint.complete:
                arrived.append(checkpoint)
            elif checkpoint is not None and last:
                report_event(f"left out {checkpoint.uri}: {'; '.join(checkpoint.problems)}")
        self._looked_into |= looked_into  # only now: an unreadable checkpoint must not mark the others as returned
        self._complete |= {checkpoint.step for checkpoint in arrived if checkpoint.label is None}
        if self._every is not None:
            taken = first_at_multiples(self._complete, self._every)
            arrived = [checkpoint for checkpoint in arrived if checkpoint.label is None]
            self._left_out |= {checkpoint.step: checkpoint for checkpoint in arrived if checkpoint.step not in taken}
            arrived = [checkpoint for checkpoint in arrived if checkpoint.step in taken]
        if last and (newest := max(self._complete, default=-1)) in self._left_out:
            arrived.append(self._left_out.pop(newest))
        return sorted(arrived, key=lambda each: (order_of(each.step, each.label), each.modified, each.uri))

    def forget(self, uris: Iterable[str]) -> None:
        """Makes `find_new` return some checkpoints again, for example after a failure."""
        for uri in uris:
            self._looked_into.pop(uri, None)


class ArrivingCells:
    """The cells that this run must evaluate, in order of arrival. `wanted` has the cells that have arrived, `planned`
    all cells, including cells with a record. Cells that other runs have claimed are polled again in each round; those
    still claimed when the training ends stay in `claimed`. `job`: the training; None if it has ended.
    `silence_seconds`: time without an answer after which the training's backend counts as lost."""

    def __init__(
        self,
        configs: Sequence[EvaluationConfig],
        exports: ArrivingCheckpoints,
        job: JobHandle | None,
        *,
        claimed: ClaimedCells,
        poll_seconds: float,
        plan: Callable[[Sequence[EvaluationConfig], Sequence[Checkpoint]], list[Cell]] = plan_cells,
        sleep: Callable[[float], None] = time.sleep,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self.planned: dict[tuple[str, str], Cell] = {}
        self.wanted: list[Cell] = []
        self.serving: Serving | None = None
        self._configs = configs
        self._exports = exports
        self._training = _WatchedTraining(job, silence_seconds) if job is not None else None
        self._claimed = claimed
        self._poll_seconds = poll_seconds
        self._plan_cells = plan
        self._sleep = sleep
        self._asked: set[str] = set()
        self._digests: dict[str, str] = {}
        self._ended = False

    def arrive(self) -> Iterator[Cell]:
        """Yields the cells from the first on, and waits for more until the training ends."""
        position = 0
        while True:
            while position < len(self.wanted):
                yield self.wanted[position]
                position += 1
            if self._ended:
                return
            self._look()

    def first(self) -> list[Servable]:
        """Returns the first checkpoints once there are some; empty if there is nothing to evaluate."""
        while not self.wanted and not self._ended:
            self._look()
        return stage_tokenizers(self.wanted)

    def _look(self) -> None:
        # before listing, so that the last checkpoints are found
        ended = self._training is None or self._training.has_ended()
        new_checkpoints: list[Checkpoint] = []
        ours: list[Cell] = []
        try:
            new_checkpoints = self._exports.find_new(last=ended)
            self._claimed.add(self._plan(new_checkpoints))
            ours = self._taken()
        except (StorageError, CheckpointError) as error:
            if ended:
                raise
            report_event(f"looking again for checkpoints: {error.found}")
            self._exports.forget(checkpoint.uri for checkpoint in new_checkpoints)
        self.wanted += ours
        self._ended = ended
        if not ours and not ended:
            self._sleep(self._poll_seconds)

    def _plan(self, new_checkpoints: Sequence[Checkpoint]) -> list[Cell]:
        if not new_checkpoints:
            return []
        fresh: list[Cell] = []
        for cell in self._plan_cells(self._configs, new_checkpoints):
            self.planned[cell.reference.name, cell.evaluation_hash] = cell
            if not cell.done and cell.uri not in self._asked and self._is_unchanged(cell):
                fresh.append(cell)
        self._asked |= {cell.uri for cell in fresh}
        return fresh

    def _taken(self) -> list[Cell]:
        ours = self._claimed.take()
        others = [cell for cell in ours if not self._is_unchanged(cell)]
        self._claimed.release(*others)
        ours = [cell for cell in ours if cell not in others]
        try:
            if ours and self.serving is not None:
                self.serving.bring(stage_tokenizers(ours))
        except (StorageError, CheckpointError):
            self._claimed.release(*ours)
            self._asked -= {cell.uri for cell in ours}
            self._exports.forget(cell.reference.uri for cell in ours)
            raise
        self._digests |= {cell.reference.name: cell.reference.digest for cell in ours}
        return ours

    def _is_unchanged(self, cell: Cell) -> bool:
        same = self._digests.get(cell.reference.name, cell.reference.digest) == cell.reference.digest
        if not same:  # requests in flight use its name, and would be answered by other weights
            report_event(f"{cell.reference.name} was written again, with other weights: evaluate it afterwards")
        return same


class _WatchedTraining:
    def __init__(self, job: JobHandle, silence_seconds: float) -> None:
        self._job = job
        self._silence_seconds = silence_seconds
        self._preemptions = 0
        self._told_at = self._answered_at = time.monotonic()

    def has_ended(self) -> bool:
        try:
            details = self._job.details()
            self._tell(details)
        except BackendUnavailable as error:  # a training of days must survive a restart of its controller
            if time.monotonic() - self._answered_at > self._silence_seconds:
                raise
            report_event(f"the training cannot be looked at: {error.found}")
            return False
        self._answered_at = time.monotonic()
        return details.status.finished

    def _tell(self, details: JobDetails) -> None:
        if details.preemptions > self._preemptions:
            self._preemptions = details.preemptions
            times = how_many(details.preemptions, "time")
            report_event(f"the training begins again: {times} so far ended from outside")
        if time.monotonic() - self._told_at >= _SECONDS_BETWEEN_STEPS:
            self._told_at = time.monotonic()
            if (step := step_in(self._job.logs(_LOG_LINES, replica=0))) is not None:
                report(Event(step))


def step_in(log: str) -> str | None:
    """Returns the progress of a training from the last line of Levanter's `json_logger`."""
    lines = _STEP_LINE.findall(log)
    if not lines:
        return None
    try:
        logged: dict[str, Any] = json.loads(lines[-1])
        return f"training: step {logged['step']}, loss {logged['metrics']['train/loss']:.2f}"
    except (ValueError, KeyError, TypeError):
        return None
