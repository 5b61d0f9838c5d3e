"""Evaluating cells in parallel: all evaluators at once on a single pool, checkpoint by checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from threading import Event

from prefect import task
from prefect.cache_policies import NO_CACHE

from pools.engine.launch import Servable
from pools.weights.kept import release
from resources.errors import AssayError
from resources.tracing import mark, span_of_requests
from tasks.errors import RecordUnwritten
from tasks.prefect_server.progress import report_event
from tasks.running.attempt import Interruption, RunResources
from tasks.running.cells import Cell, configs_of
from tasks.running.claimed_cells import ClaimedCells
from tasks.running.native_jobs import MOST_IN_A_JOB, NativeJobs
from tasks.running.run_cell import run_cell
from tasks.running.serving import Serving
from tasks.running.warm import warm_programs
from tasks.spec.evaluation import EvaluationConfig

_INTERRUPTED_SECONDS = 30.0
_TURN_SECONDS = 0.05


def stage_tokenizers(cells: Sequence[Cell]) -> list[Servable]:
    """Returns the checkpoints of cells that need serving, without duplicates, as the pool's input."""
    first = {cell.reference.name: cell for cell in reversed(cells) if not cell.config.native}
    return [
        stage_tokenizer(cell) for name in dict.fromkeys(c.reference.name for c in cells) if (cell := first.get(name))
    ]


@task(
    task_run_name="stage {cell.reference.name}",
    retries=2,
    retry_delay_seconds=[5, 30],
    cache_policy=NO_CACHE,
    persist_result=False,
)
def stage_tokenizer(cell: Cell) -> Servable:
    """Returns the cell's checkpoint as input of a pool; copies its tokenizer to this machine for the harness.

    Replicas copy the weights, each before it needs them. Retried, since copying fails now and then.
    """
    return Servable.from_folder(cell.reference.name, cell.folder, cell.digests)


def schedule_cells(
    cells: Sequence[Cell],
    serving: Serving | None,
    *,
    arriving: Iterable[Cell] | None = None,
    configs: Sequence[EvaluationConfig] | None = None,
    claimed: ClaimedCells,
) -> None:
    """Runs cells in order, as many at once as `serving` can use; each publishes its own record.

    Args:
        cells: ordered by checkpoint, so that few checkpoints of a pool are requested at once.
        arriving: yields the cells if `cells` grows. It may block for long: started cells go on meanwhile.
        claimed: claims of these cells; each is released when it has its outcome.
    """
    if configs is None:
        configs = configs_of(cells)
    evaluations = sum(not config.native for config in configs)
    at_once = evaluations + (serving.checkpoints_at_once if serving else 0)
    threads = ThreadPoolExecutor(max(1, at_once), thread_name_prefix="cell")
    # Cells that load their checkpoints themselves block no pool; they wait for their shared job.
    native_threads = ThreadPoolExecutor(MOST_IN_A_JOB, thread_name_prefix="native-cell")
    interruption = Interruption()
    running: list[Future[Exception | None]] = []
    with warm_programs(on_progress=report_event) as warm, NativeJobs() as native_jobs:
        warm.prepare(configs)
        resources = RunResources(warm.harness_of, serving, native_jobs, interruption, claimed)
        try:
            for position, cell in enumerate(cells if arriving is None else arriving, start=1):
                asked = Event()
                executor = native_threads if cell.config.native else threads
                if cell.config.native:
                    native_jobs.expect(position)
                # The copy of the context carries the Prefect run and the listeners to progress.
                run = replace(resources, cells=len(cells))  # it grows
                future = executor.submit(copy_context().run, _run_and_release, cell, run, position, asked.set)
                running.append(future)
                while not (cell.config.native or asked.wait(_TURN_SECONDS) or future.done()):
                    pass  # checkpoints are requested in order, though evaluated in parallel
            unrecorded = [future.result() for future in running]
        except BaseException:  # a signal, or Prefect itself: end started cells, start no more
            interruption.set()
            for executor in (threads, native_threads):
                executor.shutdown(wait=False, cancel_futures=True)
            wait([future for future in running if not future.cancelled()], timeout=_INTERRUPTED_SECONDS)
            raise
        finally:
            threads.shutdown(wait=False)
            native_threads.shutdown(wait=False)
    for error in filter(None, unrecorded):
        raise error


def _run_and_release(cell: Cell, run: RunResources, position: int, on_open: Callable[[], None]) -> Exception | None:
    try:
        with span_of_requests("cell", **_named(cell)):
            state = run_cell(cell, run, position=position, on_open=on_open, return_state=True)
            mark(failed=not state.is_completed())
    finally:
        run.native_jobs.forget(position)
        release(cell.uri)
    run.claimed.release(cell)
    error = None if state.is_completed() else state.result(raise_on_failure=False)
    recorded = isinstance(error, AssayError) and not isinstance(error, RecordUnwritten)
    return error if isinstance(error, Exception) and not recorded else None


def _named(cell: Cell) -> dict[str, str | int]:
    reference, evaluator = cell.reference, cell.config.evaluator.name
    benchmarks = ", ".join(task.metric_key for task in cell.config.evals)
    named = {"checkpoint": reference.name, "step": reference.step, "evaluator": evaluator, "benchmarks": benchmarks}
    return {f"assay.{name}": value for name, value in named.items()}
