"""An attempt at a cell: its state, the record that it produces, and the interruption signal."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from prefect.context import FlowRunContext

from resources.environments.environments import pinned_versions
from resources.errors import AssayError, IrregularFile, UnexpectedError
from resources.storage import storage
from resources.tracing import span
from tasks.errors import EvaluationInterrupted
from tasks.evaluators.early import WantedEarly, WantedScore, batches_in
from tasks.evaluators.evaluator import Parsed, Progress, evaluator_of
from tasks.evaluators.reading import tokens_to_ask
from tasks.prefect_server.progress import CellProgress, report
from tasks.records.builds import Build, Qualification, build_of, is_qualified, read_qualifications
from tasks.records.details import Asking, Digests
from tasks.records.provenance import git_state, hardware, versions
from tasks.records.record import Record, now
from tasks.records.samples import encodable
from tasks.records.verdicts import ANSWERED_NAME, EarlyVerdict, read_early, spent_on_early
from tasks.running.cells import Cell
from tasks.running.claimed_cells import ClaimedCells
from tasks.running.expected import expected_by_plan
from tasks.running.native_jobs import NativeJobs
from tasks.running.pricing import cost_of, resources_of_replica
from tasks.running.serving import ServedCell, Serving
from tasks.running.warm import Harness
from tasks.spec.evaluation import EvaluationConfig


class Interruption(threading.Event):
    """The signal that ends a run; its cells poll it."""

    def raise_if_interrupted(self) -> None:
        if self.is_set():
            raise EvaluationInterrupted(
                expected="the run to go on until the cell has its record",
                found="the run was interrupted",
                remedy="run it again: what was answered is in the journal",
            )


@dataclass(frozen=True, eq=False)
class RunResources:
    """Resources that the cells of a run share."""

    harness_of: Callable[[EvaluationConfig], Harness]
    serving: Serving | None = None
    native_jobs: NativeJobs = field(default_factory=NativeJobs)
    interruption: Interruption = field(default_factory=Interruption)
    claimed: ClaimedCells = field(default_factory=lambda: ClaimedCells((), wait=False))
    """Claims of the cells: cells lost to another run are not published."""
    cells: int = 1
    """Number of the cells."""


@dataclass
class Attempt:
    """An attempt at a cell, the position-th of its run; without a `failure` it has succeeded."""

    planned: Cell
    run: RunResources
    position: int = 1
    on_open: Callable[[], None] = lambda: None
    """Called once the cell's checkpoint was requested."""
    name: str = field(default_factory=lambda: f"attempt-{secrets.token_hex(4)}")
    """Its folder next to the record."""
    failure: AssayError | None = None
    parsed: Parsed | None = None
    served: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    opened: ServedCell | None = None
    machine: dict[str, str] = field(default_factory=dict)
    """The system that the evaluator ran on, if that is not this process's."""
    _expected_by_plan: bool = False

    def __post_init__(self) -> None:
        self.cell = self.planned
        """The planned cell, or its fallback."""

    def raise_if_ended(self) -> None:
        """Raises if the run was interrupted, if its claim is known to be lost, or if the endpoint does not answer."""
        self.run.claimed.raise_if_lost(self.planned)
        self.run.interruption.raise_if_interrupted()
        if self.opened is not None:
            self.opened.check()

    def report_progress(self, progress: Progress) -> None:
        counts = self.opened.counts() if self.opened else {}
        place = (self.cell.title, self.position, self.run.cells)
        report(CellProgress(*place, progress.stage, progress.done, progress.total, counts))

    @cached_property
    def decided_before(self) -> EarlyVerdict | None:
        return read_early(self.cell.uri)

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Stores an exception from the block as the failure, if there is none yet; other BaseExceptions propagate."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the boundary: every attempt ends with a record, counted
            self.failure = self.failure or self.failure_of(error)

    def failure_of(self, error: Exception) -> AssayError:
        """Returns the error itself if it is an AssayError, else an UnexpectedError that wraps it."""
        if isinstance(error, AssayError):
            return error
        return UnexpectedError.of(error, expected=f"a result of {self.cell.title}, or an error that says what is wrong")

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the block's wall seconds to a phase, which is a span of the cell's trace."""
        began = time.monotonic()
        try:
            with span(phase):
                yield
        finally:
            self.seconds[phase] = round(self.seconds.get(phase, 0.0) + time.monotonic() - began, 3)

    def expect_by_plan(self, output: Path) -> None:
        """Predicts and reports the cost from the harness's plan, if it exists and the cell has no prediction yet."""
        if self._expected_by_plan or self.cell.predicted is not None or (asked := tokens_to_ask(output)) is None:
            return
        self._expected_by_plan = True
        self.cell = replace(self.cell, predicted=expected_by_plan(self.cell, asked))

    def record(self) -> Record:
        """Returns the record of the attempt in its current state; only successes have scores."""
        cell, failure = self.cell, self.failure
        parsed = self.parsed
        commit, dirty = git_state()
        context = FlowRunContext.get()  # not from prefect.runtime, which may query the server from a cell's thread
        flow_run = context.flow_run if context else None
        return Record(
            status=failure.record_status if failure else "succeeded",
            reason=encodable(self._reason(failure)) if failure else None,
            cell=storage.basename(cell.uri),
            checkpoint=cell.reference,
            evaluator=cell.config.evaluator.name,
            benchmarks=tuple(task.metric_key for task in cell.config.evals),
            metrics=parsed.metrics if parsed and not failure else (),
            counts=parsed.counts if parsed else None,
            details=dict(parsed.details) if parsed else {},
            asking=parsed.asking if parsed else Asking(),
            evaluation=cell.config.model_dump(mode="json"),
            evaluation_hash=cell.evaluation_hash,
            git_commit=commit,
            git_dirty=dirty,
            versions={**versions(), **self._harness_packages(), **(parsed.versions if parsed else {})},
            hardware={**hardware(cell.config), **self.machine},
            served=self.served,
            seconds=self.seconds,
            chip_seconds=self._chip_seconds(),
            cost=cost_of(
                cell.config,
                self._replica_seconds(),
                judged=self.opened is not None,
                predicted=cell.predicted,
                earlier=spent_on_early(self.decided_before),
            ),
            requests=self.requests,
            tags=cell.config.wandb_tags,
            samples=parsed.samples if parsed else None,
            digests=Digests(samples=parsed.samples_digest if parsed else None),
            links={title: f"{self.name}/{path}" for title, path in parsed.links.items()} if parsed else {},
            interrupted=isinstance(failure, EvaluationInterrupted),
            flow_run=flow_run.name if flow_run else None,
            attempt=self.name,
            created=now(),
        )

    def _reason(self, failure: AssayError) -> str:
        errors: list[str] = self.served.get("engine_errors", [])
        return "\n".join(
            [str(failure), *(f"An engine died meanwhile; the first error in its log: {e}" for e in errors)]
        )

    def _harness_packages(self) -> dict[str, str]:
        return pinned_versions(evaluator_of(self.cell.config).environment(self.cell.config))

    def _replica_seconds(self) -> float | None:
        if self.cell.config.native:
            return self.seconds.get("evaluate", 0.0)
        if self.opened is None:  # it failed before it requested its checkpoint
            return 0.0 if self.cell.config.pool_config else None
        seconds = self.served.get("replica_seconds")
        return None if seconds is None else float(seconds)

    def _chip_seconds(self) -> float:
        resources = resources_of_replica(self.cell.config)
        return round(resources.chip_count() * (self._replica_seconds() or 0.0), 3) if resources else 0.0


def wanted_early(attempt: Attempt) -> WantedEarly | None:
    """Returns the requested decisions of a cell, with the batches of its early verdict, answered in the journal."""
    cell, before = attempt.cell, attempt.decided_before
    if before is None:
        return cell.early
    try:
        content = storage.read_bytes(storage.join(cell.uri, before.attempt, ANSWERED_NAME), within=cell.uri).decode()
        return replace(cell.early or WantedEarly(), batches=batches_in(content))
    except (FileNotFoundError, IrregularFile, ValueError):
        return cell.early


def early_verdict(attempt: Attempt) -> EarlyVerdict:
    """Returns the verdict of an attempt that was decided before all requests were sent."""
    cell, parsed, record = attempt.cell, attempt.parsed, attempt.record()
    assert parsed is not None and cell.early is not None, "decided early"
    build, qualifications = build_of(record), read_qualifications(cell.config.evaluation_path)
    return EarlyVerdict(
        cell=record.cell,
        checkpoint=record.checkpoint,
        evaluator=record.evaluator,
        benchmarks=record.benchmarks,
        evaluation_hash=record.evaluation_hash,
        wanted=cell.early.digest,
        gate=cell.early.gate,
        alpha=cell.early.alpha,
        scores=tuple(
            score.model_copy(update={"unlike": tuple(_unlike(planned, build, record.evaluator, qualifications))})
            for score, planned in zip(parsed.early, cell.early.scores, strict=True)
        ),
        asked=parsed.counts.answered,
        questions=parsed.counts.requested,
        requests=record.requests,
        seconds=record.seconds,
        cost=record.cost,
        chip_seconds=record.chip_seconds,
        build=build,
        flow_run=record.flow_run,
        attempt=attempt.name,
        created=record.created,
    )


def _unlike(
    planned: WantedScore, build: Build, evaluator: str, qualifications: Sequence[Qualification]
) -> Iterator[str]:
    for before in planned.builds:
        if not is_qualified(before, build, qualifications, evaluator=evaluator, benchmark=planned.benchmark):
            yield from before.changes(build)
