"""Evaluating cells: which are wanted, which are done, and one of them from its first request to its record."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import deployment

from pools.launch import Servable
from pools.model_files import ModelDigests, ModelFolder, digest_model_folder
from resources import storage
from resources.environments import ENVIRONMENTS, ensure_environment
from resources.errors import AssayError, BadInput, EvaluationIncomplete, EvaluationInterrupted, RecordStatus
from resources.fork_server import ForkServer
from resources.jobs import current_client
from tasks.benchmarks import benchmarks_digest
from tasks.checkpoints import Checkpoint
from tasks.config import EvaluationConfig, digest_of
from tasks.evaluators.harness import Evaluator, Parsed, Progress, run_harness, verify_counts, warmed
from tasks.evaluators.registry import EVALUATORS
from tasks.progress import CellDone, CellProgress, report, report_event
from tasks.provenance import git_state, hardware, versions
from tasks.records import (
    JOURNAL_FOLDER,
    CheckpointReference,
    Record,
    begin_scope,
    end_scope,
    now,
    read_record,
    write_record,
)
from tasks.serving import ServedCell, Serving

_MOST_NAMES_IN_A_CELL = 3
_INTERRUPTED_SECONDS = 30.0
_TURN_SECONDS = 0.05


@dataclass(frozen=True, eq=False)
class Cell:
    """One checkpoint and one set of benchmarks. `uri` is its folder; `record` what stands there already."""

    config: EvaluationConfig
    folder: ModelFolder
    digests: ModelDigests
    reference: CheckpointReference
    evaluation_hash: str
    uri: str
    record: Record | None

    @property
    def done(self) -> bool:
        """Whether it has a succeeded record, so that nothing is left to do."""
        return self.record is not None and self.record.succeeded


@task(cache_policy=NO_CACHE, persist_result=False)
def plan_cells(config: EvaluationConfig, checkpoints: Sequence[Checkpoint]) -> list[Cell]:
    """A cell for each checkpoint, in the order given, with its record where one stands; weights are digested.

    Not retried: what fails here is the request, a checkpoint that changed, or a folder that cannot be written.

    Raises:
        BadInput: a path is relative where nobody knows to what, or two checkpoints have one name.
        UnknownBenchmark: the evaluator does not know a benchmark.
        CheckpointError: a checkpoint stopped being complete meanwhile.
        StorageError: something could not be read.
    """
    _check_request(config, checkpoints)
    storage.check_writable(config.evaluation_path)
    evaluator = EVALUATORS[config.evaluator]
    evaluator.check(config, python=ensure_environment(ENVIRONMENTS[evaluator.environment]).python)
    evaluation_hash = digest_of({**config.what_is_measured(), "benchmarks": benchmarks_digest(config)})
    cells = [_cell(config, checkpoint, evaluation_hash) for checkpoint in checkpoints]
    done = sum(cell.done for cell in cells)
    report_event(f"{len(cells)} cells wanted, {done} of them recorded already, {len(cells) - done} to evaluate")
    return cells


def _check_request(config: EvaluationConfig, checkpoints: Sequence[Checkpoint]) -> None:
    """What only shows once the checkpoints are known, or the place where the flow runs."""
    twice = [name for name, times in Counter(_name(config, one) for one in checkpoints).items() if times > 1]
    if twice:
        places = ", ".join(one.uri for one in checkpoints if _name(config, one) == twice[0])
        raise BadInput(
            expected=f"one checkpoint of each name below {config.model_path}",
            found=f"{twice[0]} at {places}",
            remedy="evaluate one run at a time: name its folder as model_path",
        )
    if config.served_model_name is not None and len(checkpoints) > 1:
        raise BadInput(
            expected="one checkpoint for served_model_name",
            found=f"{len(checkpoints)} checkpoints",
            remedy="name one of them as model_path",
        )
    paths = (config.evaluation_path, config.model_path, config.benchmarks_path or "/")
    relative = [path for path in paths if storage.is_local(path) and not storage.local_path(path).is_absolute()]
    if relative and deployment.id:
        raise BadInput(
            expected="absolute paths in a deployed flow: a worker runs it in a folder that it deletes afterwards",
            found=", ".join(relative),
            remedy="write the whole path",
        )


def _name(config: EvaluationConfig, checkpoint: Checkpoint) -> str:
    return f"{config.run_name}{checkpoint.name.removeprefix(checkpoint.run)}"


def _cell(config: EvaluationConfig, checkpoint: Checkpoint, evaluation_hash: str) -> Cell:
    assert checkpoint.folder is not None, "only complete checkpoints become cells"
    digests = digest_model_folder(checkpoint.folder)
    reference = CheckpointReference(
        uri=checkpoint.uri,
        run=config.run_name,
        name=_name(config, checkpoint),
        step=checkpoint.step,
        digest=digests.checkpoint,
        weights_digest=digests.weights,
    )
    keys = [task.metric_key for task in config.evals]
    more = len(keys) - _MOST_NAMES_IN_A_CELL
    shown = "-".join(keys[:_MOST_NAMES_IN_A_CELL]) + (f"-and-{more}-more" if more > 0 else "")
    identity = digest_of([evaluation_hash, reference.digest])[:10]
    step, folder = f"step-{checkpoint.step}", f"{shown[:80]}-{identity}"
    uri = storage.join(config.evaluation_path, reference.run, step, config.evaluator, folder)
    return Cell(config, checkpoint.folder, digests, reference, evaluation_hash, uri, read_record(uri))


@task(
    task_run_name="stage {cell.reference.name}",
    retries=2,
    retry_delay_seconds=[5, 30],
    cache_policy=NO_CACHE,
    persist_result=False,
)
def stage_tokenizer(cell: Cell) -> Servable:
    """The cell's checkpoint, as a pool is told of it; its tokenizer is copied to this machine for the harness.

    The weights are copied by the replicas, each before it needs them. Retried, since copying fails now and then.
    """
    return Servable.from_folder(cell.reference.name, cell.folder, cell.digests)


@dataclass(frozen=True, eq=False)
class Harness:
    """The evaluator of some cells, the interpreter of its environment, and what keeps it imported."""

    evaluator: Evaluator
    python: Path
    server: ForkServer | None
    on_open: Callable[[], None] = lambda: None
    """Called once the cell's checkpoint has been asked for."""


def evaluate_cells(cells: Sequence[Cell], serving: Serving) -> None:
    """Evaluates cells, in order, as many at once as whoever serves them can use; each publishes its own record."""
    config = cells[0].config
    evaluator = EVALUATORS[config.evaluator]
    python = ensure_environment(ENVIRONMENTS[evaluator.environment]).python
    with warmed(evaluator, config, python=python, client=current_client()) as server:
        _evaluate_side_by_side(cells, serving, Harness(evaluator, python, server))


def _evaluate_side_by_side(cells: Sequence[Cell], serving: Serving, harness: Harness) -> None:
    threads = ThreadPoolExecutor(serving.cells_at_once, thread_name_prefix="cell")
    running = []
    try:
        for position, cell in enumerate(cells, start=1):
            asked = Event()
            context = copy_context()  # carries the Prefect run and whoever listens to progress
            mine = replace(harness, on_open=asked.set)
            future = threads.submit(context.run, _evaluate_one, cell, serving, mine, position, len(cells))
            running.append(future)
            while not (asked.wait(_TURN_SECONDS) or future.done()):
                pass  # checkpoints are asked for in order, though evaluated side by side
        for future in running:
            future.result()
    except BaseException:  # a signal, or Prefect itself: what has begun is ended, the rest is not begun
        serving.interrupt()
        threads.shutdown(wait=False, cancel_futures=True)
        wait([future for future in running if not future.cancelled()], timeout=_INTERRUPTED_SECONDS)
        raise
    finally:
        threads.shutdown(wait=False)


def _evaluate_one(cell: Cell, serving: Serving, harness: Harness, position: int, cells: int) -> None:
    evaluate_cell(cell, serving, harness, position, cells, return_state=True)


@dataclass
class _Outcome:
    """What is known about a cell while it is being evaluated."""

    status: RecordStatus = "infra_failed"
    reason: str | None = None
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
    task_run_name="evaluate {cell.reference.name}",
    retries=1,
    retry_delay_seconds=2,
    retry_condition_fn=worth_another_try,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def evaluate_cell(cell: Cell, serving: Serving, harness: Harness, position: int, cells: int) -> Record:
    """Evaluates one cell and publishes its record, whatever the outcome.

    Raises:
        AssayError: the cell did not succeed; its record says so too.
    """
    attempt = f"attempt-{secrets.token_hex(4)}"
    outcome = _Outcome()
    failure: AssayError | None = None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="assay-cell-") as scratch:
        local = storage.is_local(cell.uri)
        output = storage.local_path(cell.uri).absolute() / attempt if local else Path(scratch) / attempt
        try:
            outcome.parsed = _answer(cell, serving, harness, output, outcome, (position, cells))
            verify_counts(outcome.parsed)
            outcome.status = "succeeded"
        except AssayError as error:
            failure, outcome.status, outcome.reason = error, error.record_status, str(error)
        with outcome.timed("publish"):
            if not local and output.is_dir():
                storage.copy_from_local(output, storage.join(cell.uri, attempt))
        record = write_record(cell.uri, _record(cell, outcome, attempt))
    _close(cell, outcome, finished=record.succeeded)
    report(CellDone(cell.reference.name, position, cells, record.status, time.monotonic() - began))
    if failure is not None and not record.succeeded:
        raise failure
    return record


def _answer(
    cell: Cell, serving: Serving, harness: Harness, output: Path, outcome: _Outcome, place: tuple[int, int]
) -> Parsed:
    name = cell.reference.name
    report(CellProgress(name, *place, "asking for the checkpoint", 0, 0))
    with outcome.timed("open"):
        opened = outcome.opened = serving.open(
            name,
            cell=begin_scope(cell.uri),
            attempt=output.name,
            mirror=storage.absolute(storage.join(cell.uri, JOURNAL_FOLDER)),
        )

    harness.on_open()

    def on_progress(progress: Progress) -> None:
        counts = opened.counts()
        report(CellProgress(name, *place, progress.stage, progress.done, progress.total, counts))

    report(CellProgress(name, *place, f"starting {harness.evaluator.name}", 0, 0))
    try:
        with outcome.timed("evaluate"):
            return run_harness(
                harness.evaluator,
                opened.running,
                cell.config,
                output=output,
                python=harness.python,
                server=harness.server,
                client=current_client(),
                on_progress=on_progress,
                check_endpoint=opened.check,
            )
    finally:
        outcome.requests, outcome.served = opened.counts(), opened.asked_all()


def _close(cell: Cell, outcome: _Outcome, *, finished: bool) -> None:
    """Ends the attempt; what fails here costs no result, only answers that are kept for longer than needed."""
    try:
        if outcome.opened is not None:
            outcome.opened.close(finished=finished)
        if finished:
            end_scope(cell.uri)
    except AssayError as error:
        report_event(f"{cell.reference.name}: its answers stay in the journal: {error.found}")


def _record(cell: Cell, outcome: _Outcome, attempt: str) -> Record:
    commit, dirty = git_state()
    pool = cell.config.pool_config
    # Replicas are given to one checkpoint at a time, so their seconds are what this one has cost.
    chips = pool.resource_config.chip_count() / pool.resource_config.replicas if pool else 0
    busy_seconds = float(outcome.served.get("replica_seconds", 0.0))
    parsed = outcome.parsed
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
        chip_seconds=round(chips * busy_seconds, 3),
        requests=outcome.requests,
        tags=cell.config.wandb_tags,
        attempt=attempt,
        created=now(),
    )


def conclude(cells: Sequence[Cell]) -> list[Record]:
    """The records that stand for some cells now.

    Raises:
        EvaluationIncomplete, EvaluationInterrupted: not every cell has a succeeded record.
    """
    records = {cell: read_record(cell.uri) for cell in cells}
    missing = {
        cell.reference.name: record.status if record else "infra_failed"
        for cell, record in records.items()
        if record is None or not record.succeeded
    }
    if not missing:
        return [record for record in records.values() if record is not None]
    ours = set(missing.values()) == {"infra_failed"}
    reasons = [record.reason for record in records.values() if record and record.reason]
    kind = EvaluationInterrupted if ours else EvaluationIncomplete
    raise kind(
        expected=f"a succeeded record for each of {len(cells)} cells",
        found=f"{', '.join(f'{name}: {status}' for name, status in missing.items())}"
        + (f". The first reason:\n{reasons[0]}" if reasons else ""),
        remedy="run it again: only these are evaluated" if ours else "see the reason in each record.json",
    )
