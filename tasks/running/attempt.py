"""One attempt at a cell: from its first request to its record, whatever the outcome, and on to the sinks."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from pools.endpoint import LocalCheckpoint, RunningModel
from resources.backends.current import current_client
from resources.backends.local.client import local_client
from resources.errors import AssayError, EvaluationInterrupted, RecordStatus
from resources.storage import storage
from resources.warm.fork_server import ForkServer
from tasks.evaluators.evaluator import EvaluatedModel, Evaluator, Parsed, Progress
from tasks.evaluators.harness import run_harness, verify_counts
from tasks.prefect_server.progress import CellDone, CellProgress, report, report_event
from tasks.records.index import note_record
from tasks.records.provenance import git_state, hardware, versions
from tasks.records.record import JOURNAL_FOLDER, Record, begin_scope, end_scope, note_sinks, now, write_record
from tasks.running.cells import Cell
from tasks.running.provisioning import judge_of
from tasks.running.serving import Interruption, ServedCell, Serving
from tasks.running.shares import Shares
from tasks.sinks.publishing import publish_record
from tasks.spec.names import job_name, suites_in


@dataclass(frozen=True, eq=False)
class Harness:
    """An evaluator, the interpreter of its environment, and what keeps it imported."""

    evaluator: Evaluator
    python: Path
    server: ForkServer | None


@dataclass(frozen=True, eq=False)
class Turn:
    """A cell's place among those of its run, and what it needs to be evaluated."""

    position: int
    cells: int
    harness_of: Callable[[Cell], Harness]
    one_loads: Lock
    """Held by the one cell whose evaluator loads a checkpoint itself."""
    on_open: Callable[[], None] = lambda: None
    """Called once the cell's checkpoint has been asked for."""
    interruption: Interruption = field(default_factory=Interruption)
    """Ends cells that nobody serves; for the others, whoever serves them is told."""
    shares: Shares | None = None
    """Who else wants these cells: nothing is published of one that was lost to another run."""


@dataclass
class _Outcome:
    """What is known about a cell while it is being evaluated."""

    cell: Cell
    status: RecordStatus = "infra_failed"
    reason: str | None = None
    interrupted: bool = False
    parsed: Parsed | None = None
    served: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    opened: ServedCell | None = None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the block's wall seconds to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = round(self.seconds.get(phase, 0.0) + time.monotonic() - began, 3)


def worth_another_try(_task: object, _run: object, state: Any) -> bool:
    """Prefect retries a cell only if the failure was ours, not the model's, the benchmark's or the request's."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, EvaluationInterrupted):
        return False
    return isinstance(error, AssayError) and error.record_status == "infra_failed" and error.exit_code != 3


@task(
    task_run_name="evaluate {cell.title}: {cell.config.asked}",
    retries=1,
    retry_delay_seconds=2,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def evaluate_cell(cell: Cell, serving: Serving | None, turn: Turn) -> Record:
    """Evaluates one cell, publishes its record, whatever the outcome, and sends it to its sinks.

    Raises:
        AssayError: the cell did not succeed; its record says so too.
        ClaimLost: another run has the cell by now; nothing is recorded.
    """
    wanted, attempt = cell, f"attempt-{secrets.token_hex(4)}"
    outcome = _Outcome(cell)
    failure: AssayError | None = None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="assay-cell-") as scratch:
        try:
            cell = outcome.cell = _by_ability(cell, serving)
        except AssayError as error:
            failure = error
        local = storage.is_local(cell.uri)
        output = storage.local_path(cell.uri).absolute() / attempt if local else Path(scratch) / attempt
        try:
            if failure is None:
                outcome.parsed = _answer(outcome, serving, turn, output, wanted=wanted)
                verify_counts(outcome.parsed)
                outcome.status = "succeeded"
        except AssayError as error:
            failure = error
        try:
            with outcome.timed("publish"):
                if not local and output.is_dir():
                    storage.copy_from_local(output, storage.join(cell.uri, attempt))
        except AssayError as error:
            failure = failure or error
        if failure is not None:
            outcome.status, outcome.reason = failure.record_status, str(failure)
            outcome.interrupted = isinstance(failure, EvaluationInterrupted)
        try:
            if turn.shares is not None:
                turn.shares.prove(wanted)
            record = write_record(cell.uri, _record(outcome, attempt))
        except AssayError:
            _close(outcome, finished=False)
            raise
    note_record(storage.join(cell.config.evaluation_path, cell.reference.run), cell.uri, record)
    _close(outcome, finished=record.succeeded)
    if cell.config.sinks:
        note_sinks(cell.uri, publish_record(record, cell.uri, cell.config.sinks))
    report(CellDone(cell.title, turn.position, turn.cells, record.status, time.monotonic() - began))
    if failure is not None and not record.succeeded:
        raise failure
    return record


def _by_ability(cell: Cell, serving: Serving | None) -> Cell:
    """The cell, or its alternative where the engine gives no log-probabilities of prompts."""
    if cell.alternative is None or serving is None or serving.has_prompt_logprobs(cell.reference.name):
        return cell
    report_event(f"{cell.title}: the engine returns no log-probabilities of prompts, so Levanter evaluates it")
    return cell.alternative


def _answer(outcome: _Outcome, serving: Serving | None, turn: Turn, output: Path, *, wanted: Cell) -> Parsed:
    cell = outcome.cell
    place = (turn.position, turn.cells)
    harness = turn.harness_of(cell)

    def on_progress(progress: Progress) -> None:
        counts = outcome.opened.counts() if outcome.opened else {}
        report(CellProgress(cell.title, *place, progress.stage, progress.done, progress.total, counts))

    def check() -> None:
        if turn.shares is not None:
            turn.shares.raise_if_lost(wanted)
        if outcome.opened is None:
            turn.interruption.raise_if_interrupted()
        else:
            outcome.opened.check()

    with turn.one_loads if cell.config.native else nullcontext(), _asking(outcome):
        model, judge = _model(outcome, serving, turn, output)
        report(CellProgress(cell.title, *place, f"starting {harness.evaluator.name}", 0, 0))
        with outcome.timed("evaluate"):
            return run_harness(
                harness.evaluator,
                model,
                cell.config,
                output=output,
                python=harness.python,
                server=harness.server,
                client=current_client() if cell.config.native else local_client(),
                judge=judge,
                on_progress=on_progress,
                check_endpoint=check,
                name=_job_name(cell, harness),
            )


def _job_name(cell: Cell, harness: Harness) -> str:
    """Harness, checkpoint, and suite or benchmarks, for lists of jobs."""
    asked = suites_in(cell.config.wandb_tags) or [task.metric_key for task in cell.config.evals]
    environment = harness.evaluator.environment(cell.config)
    return job_name(environment, cell.reference.name, *asked[:1], flow_run=flow_run.id)


@contextmanager
def _asking(outcome: _Outcome) -> Iterator[None]:
    """Lets the checkpoint go at the end, whatever happened, and notes how it was served."""
    try:
        yield
    finally:
        if outcome.opened is not None:
            outcome.requests, outcome.served = outcome.opened.counts(), outcome.opened.asked_all()


def _model(
    outcome: _Outcome, serving: Serving | None, turn: Turn, output: Path
) -> tuple[EvaluatedModel, RunningModel | None]:
    """What the evaluator is given: an endpoint, and a judge where it needs one; or the checkpoint itself."""
    cell = outcome.cell
    if cell.config.native:
        turn.interruption.raise_if_interrupted()
        turn.on_open()
        outcome.served = {"by": "the evaluator itself"}
        folder, tokenizer = cell.folder, cell.folder.reference
        return LocalCheckpoint(
            cell.reference.name,
            storage.absolute(folder.uri),
            folder.kind,
            storage.absolute(tokenizer.uri) if tokenizer else None,
        ), None
    assert serving is not None, "cells that need an endpoint are given one"
    report(CellProgress(cell.title, turn.position, turn.cells, "asking for the checkpoint", 0, 0))
    with outcome.timed("open"):
        opened = outcome.opened = serving.open(
            cell.reference.name,
            cell=begin_scope(cell.uri),
            attempt=output.name,
            mirror=storage.absolute(storage.join(cell.uri, JOURNAL_FOLDER)),
            in_chat=cell.config.asks_in_chat,
        )
        turn.on_open()
        judge = judge_of(cell.config, opened.running)
    return opened.running, judge


def _close(outcome: _Outcome, *, finished: bool) -> None:
    """Ends the attempt; what fails here costs no result, only answers that are kept for longer than needed."""
    try:
        if outcome.opened is not None:
            outcome.opened.close(finished=finished)
        if finished:
            end_scope(outcome.cell.uri)
    except AssayError as error:
        report_event(f"{outcome.cell.reference.name}: its answers stay in the journal: {error.found}")


def _record(outcome: _Outcome, attempt: str) -> Record:
    cell, parsed = outcome.cell, outcome.parsed
    commit, dirty = git_state()
    succeeded = outcome.status == "succeeded"
    return Record(
        status=outcome.status,
        reason=outcome.reason,
        cell=storage.basename(cell.uri),
        checkpoint=cell.reference,
        evaluator=cell.config.evaluator,
        benchmarks=tuple(task.metric_key for task in cell.config.evals),
        metrics=parsed.metrics if parsed and succeeded else (),
        counts=parsed.counts if parsed else None,
        evaluation=cell.config.model_dump(mode="json"),
        evaluation_hash=cell.evaluation_hash,
        git_commit=commit,
        git_dirty=dirty,
        versions={**versions(), **(parsed.versions if parsed else {})},
        hardware=hardware(cell.config),
        served=outcome.served,
        seconds=outcome.seconds,
        chip_seconds=_chip_seconds(outcome),
        requests=outcome.requests,
        tags=cell.config.wandb_tags,
        samples=parsed.samples if parsed else None,
        links={title: f"{attempt}/{path}" for title, path in parsed.links.items()} if parsed else {},
        interrupted=outcome.interrupted,
        attempt=attempt,
        created=now(),
    )


def _chip_seconds(outcome: _Outcome) -> float:
    """Accelerators times the seconds they were this cell's alone, or its checkpoint's."""
    config = outcome.cell.config
    if config.native:
        chips = config.resource_config.chip_count() if config.resource_config else 0
        return round(chips * outcome.seconds.get("evaluate", 0.0), 3)
    pool = config.pool_config
    # Replicas are given to one checkpoint at a time, so their seconds are what this one has cost.
    chips = pool.resource_config.chip_count() / pool.resource_config.replicas if pool else 0
    return round(chips * float(outcome.served.get("replica_seconds", 0.0)), 3)
