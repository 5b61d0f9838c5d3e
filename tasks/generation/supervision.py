"""Supervision: a queue and workers for a checkpoint, restarted when they die, until all shards are written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.jobs import Restarts, placed_with, pool_environment
from pools.pool.session import PoolSession
from resources.actors.actor_handle import ActorHandle
from resources.actors.actors import actor_variables, create_actor
from resources.errors import ActorCallLost, ActorDied, BackendUnavailable, JobFailed
from resources.jobs.jobs import Call, Client, JobHandle, JobRequest, JobStatus
from resources.settings import POOL_KEY_VARIABLE
from tasks.errors import TooManyErrors
from tasks.generation.asking import Origin
from tasks.generation.config import GenerationConfig
from tasks.generation.output import Output
from tasks.generation.plan import Plan
from tasks.generation.queue import QueueState, ShardQueue
from tasks.generation.worker import WorkOrder, run_worker

_DELIVERIES = 50
_DEATHS_IN_TEN_MINUTES = 20
"""Most crashes in ten minutes of the queue, or of a worker, that are followed by a restart."""
_LOOK_SECONDS = 0.5
_QUEUE_SECONDS = 300.0
_NOTHING = QueueState(0, 0, 0, (), 0, 0, 0)


@dataclass(frozen=True)
class GenerationState:
    """Progress of a checkpoint's answers."""

    rows: int
    total: int
    tokens: int
    errors: int
    rows_per_second: float
    tokens_per_second: float

    @property
    def seconds_left(self) -> float | None:
        """Estimated time left; None before there is a rate."""
        return (self.total - self.rows) / self.rows_per_second if self.rows_per_second else None


class Supervision:
    """Generates the answers of a checkpoint with workers; `name` returns a job's name for its role."""

    def __init__(
        self,
        config: GenerationConfig,
        plan: Plan,
        *,
        origin: Origin,
        output: Output,
        session: PoolSession,
        client: Client,
        name: Callable[[str], str],
        on_state: Callable[[GenerationState], None],
        on_event: Callable[[str], None],
    ) -> None:
        self._config, self._plan, self._origin, self._output = config, plan, origin, output
        self._session, self._client, self._name = session, client, name
        self._on_state, self.on_event = on_state, on_event
        self._total = plan.prompts * config.sampling.samples
        self._before = _NOTHING
        self._first: tuple[float, QueueState] | None = None

    def run(self, running: RunningModel) -> None:
        """Returns when all shards are written.

        Raises:
            EngineDied, EngineStartFailed, ModelUnusable, ProxyFailed: the pool will not answer any more.
        """
        queues = Restarts(_DEATHS_IN_TEN_MINUTES)
        while True:
            try:
                if self._with_queue(running):
                    return
            except (ActorDied, ActorCallLost, BackendUnavailable) as error:
                if not queues.allow():
                    raise JobFailed(
                        expected="a queue of shards that lives",
                        found=f"it died, {queues.last}: {error.found}",
                        remedy="look at the log of its job; run again to go on",
                    ) from error
                self.on_event(f"the queue of shards died and is created again: {error.found}")

    def _with_queue(self, running: RunningModel) -> bool:
        written = self._output.written()
        self._count_written(written)
        missing = set(range(len(self._plan.shards))) - set(written)
        if not missing:
            return True
        with ExitStack() as ending:
            queue = create_actor(
                self._client,
                ShardQueue,
                [shard for shard in self._plan.shards if shard.number in missing],
                name=self._name("queue"),
                environment=pool_environment(self._pool, env_vars={}),
                max_concurrency=4,
                max_deliveries=_DELIVERIES,
            )
            ending.callback(queue.job.terminate)
            count = min(self._config.workers, len(missing))
            workers = [_Worker(self, f"worker-{number}", queue, running, count) for number in range(count)]
            for worker in workers:
                ending.callback(worker.end)
            self._watch(queue, workers)
        return False  # check the written files again: the queue's state is no proof

    def _watch(self, queue: ActorHandle, workers: list[_Worker]) -> None:
        while True:
            for worker in workers:
                worker.start_if_ended()
            state: QueueState = queue.state.remote().result(_QUEUE_SECONDS)
            self._report(state)
            self._check_errors(state)
            if state.dead:
                raise JobFailed(
                    expected="every shard to be finished by a worker",
                    found=f"no worker could finish {'; '.join(state.dead)}",
                    remedy="read the reason; run again to go on",
                )
            if not state.left:
                return
            self._session.check(self._origin.checkpoint)
            time.sleep(_LOOK_SECONDS)

    @property
    def _pool(self) -> InferencePoolConfig:
        return self._session.access.config

    def submit_worker(self, name: str, queue: ActorHandle, running: RunningModel, *, workers: int) -> JobHandle:
        """Starts a worker, with its share of the concurrent requests."""
        access = self._session.access
        keys = {POOL_KEY_VARIABLE: access.key.get_secret_value(), **actor_variables()}
        order = WorkOrder(
            worker=name,
            config=self._config,
            origin=self._origin,
            output=self._output,
            proxy=access.address,
            running=replace(running, api_key="none"),  # keys are passed in environment variables
            in_flight=math.ceil((self._config.in_flight or running.capacity) / workers),
        )
        resources = self._config.worker_resources.model_copy(update={"replicas": 1})
        if not self._client.is_local:
            resources = resources.model_copy(update=placed_with(self._pool.resource_config))
        return self._client.submit(
            JobRequest(
                self._name(name),
                Call(run_worker, (order, queue)),
                resources=resources,
                environment=pool_environment(self._pool, env_vars=keys),
            )
        )

    def _count_written(self, written: list[int]) -> None:
        summaries = self._output.summaries(written)
        self._before = QueueState(
            waiting=0,
            leased=0,
            done=len(summaries),
            dead=(),
            rows=sum(summary.rows for summary in summaries),
            tokens=sum(summary.completion_tokens for summary in summaries),
            errors=sum(summary.errors for summary in summaries),
        )
        self._first = None
        self._report(_NOTHING)
        self._check_errors(_NOTHING)

    def _report(self, state: QueueState) -> None:
        now = time.monotonic()
        if self._first is None and state.rows:  # earlier time is the workers' start
            self._first = now, state
        since, first = self._first or (now, state)
        seconds = max(now - since, 1e-3)
        self._on_state(
            GenerationState(
                rows=self._before.rows + state.rows,
                total=self._total,
                tokens=self._before.tokens + state.tokens,
                errors=self._before.errors + state.errors,
                rows_per_second=(state.rows - first.rows) / seconds,
                tokens_per_second=(state.tokens - first.tokens) / seconds,
            )
        )

    def _check_errors(self, state: QueueState) -> None:
        errors, most = self._before.errors + state.errors, self._config.most_errors(self._total)
        if errors > most:
            reason = f"; the last: {state.last_error}" if state.last_error else ""
            raise TooManyErrors(
                expected=f"at most {most:g} errors among {self._total} answers of {self._origin.checkpoint}",
                found=f"{errors} so far{reason}",
                remedy=f"correct the prompts and choose another output, or raise max_errors to go on in "
                f"{self._output.folder}, where each error is in the column of that name",
            )


class _Worker:
    def __init__(
        self, supervision: Supervision, name: str, queue: ActorHandle, running: RunningModel, count: int
    ) -> None:
        self._submit = lambda: supervision.submit_worker(name, queue, running, workers=count)
        self._name = name
        self._on_event = supervision.on_event
        self._deaths = Restarts(_DEATHS_IN_TEN_MINUTES)
        self._job: JobHandle | None = None

    def start_if_ended(self) -> None:
        if self._job is not None:
            details = self._job.details()
            if not details.status.finished:
                return
            if details.status is not JobStatus.SUCCEEDED and not self._deaths.allow():
                raise JobFailed(
                    expected=f"a {self._name} that lives",
                    found=f"it ended, {self._deaths.last}: {details.reason}\n{self._job.logs(20)}".rstrip(),
                    remedy="correct what its log complains about; run again to go on",
                )
            self._on_event(f"{self._name} ended, and is started again: {details.reason or details.status}")
        self._job = self._submit()

    def end(self) -> None:
        if self._job is not None:
            self._job.terminate()
