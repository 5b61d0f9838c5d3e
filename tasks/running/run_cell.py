"""Running a cell: open its endpoint, run the harness, write a record of any outcome, send it to the sinks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from pools.endpoint import LocalCheckpoint, RunningModel
from pools.weights.checkpoint_copy import require_planned
from pools.weights.kept import kept_location
from pools.weights.layouts import inspect_again
from pools.weights.merges import with_each_location
from pools.weights.model_files import digest_model_folder
from resources.backends.local.client import local_client
from resources.errors import AssayError, EndpointUnusable
from resources.storage import storage
from tasks.errors import BenchmarksChanged, ClaimLost, EvaluationInterrupted, RecordUnwritten
from tasks.evaluators.evaluator import Parsed, Progress
from tasks.evaluators.harness import read_output, run_harness, verify_counts, verify_ends
from tasks.evaluators.native import NativeEvaluation, output_here
from tasks.prefect_server.progress import CellDone, report, report_event
from tasks.records.index import note_record
from tasks.records.record import (
    JOURNAL_FOLDER,
    Record,
    begin_scope,
    end_scope,
    end_scope_and_answers,
    note_sinks,
    weighed_at_first,
    write_record,
)
from tasks.records.samples import SAMPLES_NAME
from tasks.records.verdicts import write_early
from tasks.reports.artifacts import show_as_asset
from tasks.running.attempt import Attempt, RunResources, early_verdict, wanted_early
from tasks.running.cells import Cell
from tasks.running.provisioning import judge_of
from tasks.running.serving import Serving, same_model
from tasks.running.warm import Harness
from tasks.sinks.publishing import publish_record
from tasks.spec.benchmarks import benchmarks_uri, evaluation_hash
from tasks.spec.names import job_name, suites_in


def worth_another_try(_task: object, _run: object, state: Any) -> bool:
    """Returns True if Prefect must retry: the failure came from Assay, not from model, benchmark or request."""
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
def run_cell(
    cell: Cell, run: RunResources, *, position: int = 1, on_open: Callable[[], None] = lambda: None
) -> Record | None:
    """Evaluates a cell, publishes a record of any outcome, and sends it to its sinks.

    If the cell was decided early, publishes a verdict instead of a record and returns None. `position` is that of the
    cell in its run; `on_open` is called once its checkpoint was requested.
    """
    began = time.monotonic()
    attempt = Attempt(cell, run, position, on_open)
    with tempfile.TemporaryDirectory(prefix="assay-cell-") as scratch:
        with attempt.noting_failure():
            run.interruption.raise_if_interrupted()
            attempt.cell = _by_ability(cell, run.serving)
        output = _output_folder(attempt, Path(scratch))
        if attempt.failure is None:
            with attempt.noting_failure():
                _evaluate(attempt, output)
            with attempt.noting_failure():
                if attempt.opened is not None:
                    attempt.requests, attempt.served = attempt.opened.counts(), attempt.opened.asked_all()
        with attempt.noting_failure(), attempt.timed("publish"):
            if not storage.is_local(attempt.cell.uri) and output.is_dir():
                storage.copy_from_local(output, storage.join(attempt.cell.uri, attempt.name))
    done = partial(CellDone, attempt.cell.title, position, run.cells)
    if attempt.failure is None and attempt.parsed is not None and attempt.parsed.early:
        try:
            attempt.run.claimed.prove(attempt.planned)
            write_early(attempt.cell.uri, early_verdict(attempt))
        finally:
            _close(attempt, finished=False)  # the remaining requests may be sent later
        report(done("decided early", time.monotonic() - began))
        return None
    record = _write(attempt)
    _tell(attempt, record)
    report(done(record.status, time.monotonic() - began))
    if attempt.failure is not None and record.status not in ("succeeded", "gone"):
        raise attempt.failure
    return record


def _by_ability(cell: Cell, serving: Serving | None) -> Cell:
    if cell.levanter_fallback is None or serving is None or serving.has_prompt_logprobs(cell.reference.name):
        return cell
    report_event(f"{cell.title}: the engine returns no log-probabilities of prompts, so Levanter evaluates it")
    return cell.levanter_fallback


def _output_folder(attempt: Attempt, scratch: Path) -> Path:
    uri = attempt.cell.uri
    return (storage.local_path(uri).absolute() if storage.is_local(uri) else scratch) / attempt.name


def _evaluate(attempt: Attempt, output: Path) -> None:
    cell = attempt.cell
    harness = attempt.run.harness_of(cell.config)

    def check() -> None:
        attempt.raise_if_ended()
        if attempt.opened is not None:
            attempt.expect_by_plan(output)

    attempt.run.interruption.raise_if_interrupted()
    model, judge = (None, None) if cell.config.native else _open(attempt)
    attempt.report_progress(Progress(f"starting {harness.evaluator.name}", 0, 0))
    with _as_planned(cell), _by_same_model(attempt):
        if model is None:
            attempt.parsed = _evaluate_natively(attempt, harness, output)
        else:
            assert harness.python is not None, "evaluators that ask an endpoint run here"
            with attempt.timed("evaluate"):
                attempt.parsed = run_harness(
                    harness.evaluator,
                    model,
                    cell.config,
                    output=output,
                    python=harness.python,
                    server=harness.server,
                    client=local_client(),
                    judge=judge,
                    on_progress=attempt.report_progress,
                    check_endpoint=check,
                    name=_job_name(cell, harness),
                    early=wanted_early(attempt),
                )
            attempt.expect_by_plan(output)  # it may have ended between two checks
    if not attempt.parsed.early:
        verify_counts(attempt.parsed)
    verify_ends(attempt.parsed, cell.config.max_at_limit)


@contextmanager
def _as_planned(cell: Cell) -> Iterator[None]:
    _require_planned(cell)
    try:
        yield
    finally:
        _require_planned(cell)


@contextmanager
def _by_same_model(attempt: Attempt) -> Iterator[None]:
    interrupted = False
    try:
        yield
    except EvaluationInterrupted:
        interrupted = True
        raise
    finally:
        try:
            if attempt.opened is not None and not interrupted:
                attempt.opened.prove_unchanged()
        except EndpointUnusable:
            end_scope(attempt.cell.uri)
            raise


def _require_planned(cell: Cell) -> None:
    if evaluation_hash(cell.config) != cell.evaluation_hash:
        raise BenchmarksChanged(
            expected=f"the benchmarks in {benchmarks_uri(cell.config)}, and files that they name, as they were planned",
            found="other contents",
            remedy="let nothing write there while they are evaluated, and run again: this makes a new plan",
        )
    if cell.config.native:  # pools check the files that they serve
        with kept_location(cell.folder.uri, cell.digests) as uri:
            now = inspect_again(replace(cell.folder, uri=uri))
            now.require_complete(planned=True)
            require_planned(cell.folder.uri, digest_model_folder(now), cell.digests)


def _job_name(cell: Cell, harness: Harness) -> str:
    asked = suites_in(cell.config.wandb_tags) or [task.metric_key for task in cell.config.evals]
    environment = harness.evaluator.environment(cell.config)
    return job_name(environment.name, cell.reference.name, *asked[:1], flow_run=flow_run.id)


def _evaluate_natively(attempt: Attempt, harness: Harness, output: Path) -> Parsed:
    attempt.on_open()
    cell = attempt.cell
    reference = cell.folder.reference
    evaluation = NativeEvaluation(
        cell.config.model_copy(update={"sinks": ()}),
        LocalCheckpoint(
            cell.reference.name,
            with_each_location(cell.folder.uri, storage.absolute),
            cell.folder.kind,
            with_each_location(reference.uri, storage.absolute) if reference else None,
        ),
        cell.digests,
        storage.absolute(storage.join(cell.uri, attempt.name)),
        storage.absolute(storage.join(cell.uri, JOURNAL_FOLDER)),
    )
    attempt.served = {"by": "the evaluator itself"}
    outcome = attempt.run.native_jobs.evaluate(
        evaluation,
        harness.native,
        position=attempt.position,
        name=_job_name(cell, harness),
        on_progress=attempt.report_progress,
        check=attempt.raise_if_ended,
    )
    attempt.seconds["evaluate"], attempt.machine = outcome.seconds, outcome.machine
    outcome.raise_failure()
    output.mkdir(parents=True, exist_ok=True)  # with a remote store, only the samples are published from this folder
    results = output_here(evaluation, output.with_name(f"{output.name}-copy"))
    return read_output(harness.evaluator, cell.config, results, samples=output / SAMPLES_NAME)


def _open(attempt: Attempt) -> tuple[RunningModel, RunningModel | None]:
    cell, serving = attempt.cell, attempt.run.serving
    assert serving is not None, "cells that need an endpoint get an endpoint"
    attempt.report_progress(Progress("asking for the checkpoint", 0, 0))
    with attempt.timed("open"):
        attempt.opened = serving.open(
            cell.reference.name,
            cell=begin_scope(cell.uri),
            attempt=attempt.name,
            mirror=storage.absolute(storage.join(cell.uri, JOURNAL_FOLDER)),
            in_chat=cell.config.asks_in_chat,
        )
        _begin_again_for_another_model(attempt)
        attempt.on_open()
        return attempt.opened.running, judge_of(cell.config, attempt.opened.running)


def _begin_again_for_another_model(attempt: Attempt) -> None:
    weighed, uri = attempt.opened.weighed if attempt.opened else (), attempt.cell.uri
    if weighed and not same_model(weighed, weighed_at_first(uri, weighed)):
        end_scope(uri)
        begin_scope(uri)
        weighed_at_first(uri, weighed)


def _write(attempt: Attempt) -> Record:
    try:
        try:
            return _prove_and_write(attempt)
        except AssayError:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: at least the failure must be recorded
            attempt.failure = attempt.failure or attempt.failure_of(error)
            attempt.parsed, attempt.served, attempt.requests = None, {}, {}
            return _prove_and_write(attempt)
    except Exception as error:
        _close(attempt, finished=False)
        if isinstance(error, ClaimLost):
            raise
        cause = attempt.failure_of(error)
        raise RecordUnwritten(
            expected=f"to write the record of {attempt.cell.title}", found=cause.found, remedy=cause.remedy
        ) from error


def _prove_and_write(attempt: Attempt) -> Record:
    record = attempt.record()
    attempt.run.claimed.prove(attempt.planned)
    with attempt.timed("record"):
        return write_record(attempt.cell.uri, record)


def _tell(attempt: Attempt, record: Record) -> None:
    cell = attempt.cell
    _close(attempt, finished=record.succeeded)
    try:
        note_record(storage.join(cell.config.evaluation_path, cell.reference.run), cell.uri, record)
        show_as_asset(record, cell.uri)
        if cell.config.sinks:
            note_sinks(cell.uri, publish_record(record, cell.uri, cell.config.sinks))
    except Exception as error:  # noqa: BLE001 - the boundary: the record is written, and the next run reports it
        report_event(f"{cell.title}: its record was not reported everywhere: {attempt.failure_of(error).found}")


def _close(attempt: Attempt, *, finished: bool) -> None:
    try:
        if attempt.opened is not None:
            attempt.opened.close(finished=finished)
        if finished and attempt.cell.config.native:
            end_scope_and_answers(attempt.cell.uri)
        elif finished:  # the pool's journal deletes its copy itself
            end_scope(attempt.cell.uri)
    except Exception as error:  # noqa: BLE001 - the boundary: its record is written
        report_event(f"{attempt.cell.title}: its answers stay in the journal: {attempt.failure_of(error).found}")
