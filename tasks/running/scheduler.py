"""Evaluating cells side by side: every evaluator at once on one pool, checkpoint by checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from threading import Event, Lock

from prefect import task
from prefect.cache_policies import NO_CACHE

from pools.engine.launch import Servable
from pools.jobs import is_local
from resources.backends.current import current_client
from resources.backends.local.client import local_client
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from tasks.evaluators.harness import warmed
from tasks.evaluators.registry import EVALUATORS
from tasks.prefect_server.progress import report_event
from tasks.running.attempt import Harness, Turn, evaluate_cell
from tasks.running.cells import Cell
from tasks.running.serving import Interruption, Serving
from tasks.running.shares import Shares
from tasks.spec.evaluation import EvaluationConfig, EvaluatorName

_INTERRUPTED_SECONDS = 30.0
_TURN_SECONDS = 0.05


def stage_tokenizers(cells: Sequence[Cell]) -> list[Servable]:
    """The checkpoints of those cells that need serving, each once, as a pool is told of them."""
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
    """The cell's checkpoint, as a pool is told of it; its tokenizer is copied to this machine for the harness.

    The weights are copied by the replicas, each before it needs them. Retried, since copying fails now and then.
    """
    return Servable.from_folder(cell.reference.name, cell.folder, cell.digests)


class Harnesses:
    """The evaluators of some cells: interpreters, and what keeps those imported that can be."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._prepared: dict[tuple[EvaluatorName, str], Harness] = {}
        self._preparing = threading.Lock()

    def prepare(self, configs: Sequence[EvaluationConfig]) -> None:
        """Makes ready what some evaluations of one evaluator need; takes no time but to build an environment."""
        evaluator = EVALUATORS[configs[0].evaluator]
        name = evaluator.environment(configs[0])
        environment = ensure_environment(ENVIRONMENTS[name], on_progress=report_event)
        server = None
        if is_local(current_client()) or not configs[0].native:  # a fork server is of use on its own machine
            server = self._stack.enter_context(
                warmed(evaluator, configs, python=environment.python, client=local_client())
            )
        self._prepared[configs[0].evaluator, name] = Harness(evaluator, environment.python, server)

    def of(self, cell: Cell) -> Harness:
        """The one for a cell; made ready now if it was not expected to be needed."""
        with self._preparing:
            key = _kind(cell.config)
            if key not in self._prepared:
                self.prepare([cell.config])
            return self._prepared[key]


@contextmanager
def _harnesses(configs: Sequence[EvaluationConfig]) -> Iterator[Harnesses]:
    with ExitStack() as stack:
        harnesses = Harnesses(stack)
        for kind in dict.fromkeys(map(_kind, configs)):
            harnesses.prepare([config for config in configs if _kind(config) == kind])
        yield harnesses


def _kind(config: EvaluationConfig) -> tuple[EvaluatorName, str]:
    """Evaluator and environment: evaluations that have both in common share a harness."""
    return config.evaluator, EVALUATORS[config.evaluator].environment(config)


def evaluate_cells(
    cells: Collection[Cell],
    serving: Serving | None,
    *,
    configs: Sequence[EvaluationConfig] | None = None,
    shares: Shares | None = None,
) -> None:
    """Evaluates cells, in order, as many at once as whoever serves them can use; each publishes its own record.

    Args:
        cells: ordered by checkpoint, so that a pool is asked for few checkpoints at once. The next one may be long in
            coming: what has begun goes on meanwhile.
        serving: answers for those that need an endpoint.
        configs: the evaluations that they belong to; read from the cells when None.
        shares: claims of these cells; each is given up when it has its outcome.
    """
    if configs is None:
        configs = list({id(cell.config): cell.config for cell in cells}.values())
    evaluations = sum(not config.native for config in configs)
    at_once = evaluations + (serving.checkpoints_at_once if serving else 0)
    with _harnesses(configs) as harnesses:
        _evaluate_side_by_side(cells, serving, harnesses.of, at_once=at_once, shares=shares)


def _evaluate_side_by_side(
    cells: Collection[Cell],
    serving: Serving | None,
    harness_of: Callable[[Cell], Harness],
    *,
    at_once: int,
    shares: Shares | None,
) -> None:
    threads = ThreadPoolExecutor(max(1, at_once), thread_name_prefix="cell")
    # What loads a checkpoint itself has the machine's accelerators for itself, and keeps no pool waiting.
    alone = ThreadPoolExecutor(1, thread_name_prefix="native-cell")
    one_loads, interruption = Lock(), Interruption()
    running = []
    try:
        for position, cell in enumerate(cells, start=1):
            asked = Event()
            context = copy_context()  # carries the Prefect run and whoever listens to progress
            turn = Turn(
                position,
                len(cells),
                harness_of,
                one_loads,
                on_open=asked.set,
                interruption=interruption,
                shares=shares,
            )
            executor = alone if cell.config.native else threads
            future = executor.submit(context.run, _evaluate_one, cell, serving, turn)
            running.append(future)
            while not (cell.config.native or asked.wait(_TURN_SECONDS) or future.done()):
                pass  # checkpoints are asked for in order, though evaluated side by side
        for future in running:
            future.result()
    except BaseException:  # a signal, or Prefect itself: what has begun is ended, the rest is not begun
        interruption.interrupt()
        if serving is not None:
            serving.interrupt()
        for executor in (threads, alone):
            executor.shutdown(wait=False, cancel_futures=True)
        wait([future for future in running if not future.cancelled()], timeout=_INTERRUPTED_SECONDS)
        raise
    finally:
        threads.shutdown(wait=False)
        alone.shutdown(wait=False)


def _evaluate_one(cell: Cell, serving: Serving | None, turn: Turn) -> None:
    evaluate_cell(cell, serving, turn, return_state=True)
    if turn.shares is not None:
        turn.shares.release(cell)
