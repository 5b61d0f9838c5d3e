"""Supervision: a queue and workers for a checkpoint, restarted when they die, until all shards are written."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from pools.endpoint import RunningModel
from pools.jobs import Restarts, placed_with, pool_environment
from pools.pool.session import PoolSession
from pools.settings import POOL_KEY_VARIABLE
from resources.actors.actors import ActorHandle, actor_variables, create_actor
from resources.errors import ActorCallLost, ActorDied, BackendUnavailable, JobFailed
from resources.jobs.jobs import Call, Client, JobHandle, JobRequest, JobStatus
from tasks.errors import TooManyErrors
from tasks.generation.asking import Origin
from tasks.generation.config import GenerationConfig
from tasks.generation.output import Output
from tasks.generation.prompts import Plan
from tasks.generation.queue import QueueState, Shard, ShardProgress, ShardQueue
from tasks.generation.worker import WorkOrder, run_worker
from tasks.prefect_server.progress import AnswersProgress, report, report_event

_DELIVERIES = 50
_DEATHS_IN_TEN_MINUTES = 20
"""Most crashes in ten minutes of the queue, or of a worker, that are followed by a restart."""
_LOOK_SECONDS = 0.5
_QUEUE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """The answers of a checkpoint to generate; `job_name` returns a job's name for its role."""

    config: GenerationConfig
    plan: Plan
    origin: Origin
    output: Output
    session: PoolSession
    client: Client
    job_name: Callable[[str], str]
    cell: int = 1
    """Number of the checkpoint among `cells`, for the progress."""
    cells: int = 1

    @property
    def total(self) -> int:
        return self.plan.prompts * self.config.sampling.samples


def supervise(supervision: Supervision, running: RunningModel) -> None:
    """Returns when all shards are written.

    Raises:
        EngineDied, EngineStartFailed, ModelUnusable, ProxyFailed: the pool will not answer any more.
    """
    queues = Restarts(_DEATHS_IN_TEN_MINUTES)
    while True:  # the written files are checked again after each queue, whose state is no proof
        written = set(supervision.output.written())
        meter = _Meter(supervision, written=sorted(written))
        missing = [shard for shard in supervision.plan.shards if shard.number not in written]
        if not missing:
            return
        try:
            _with_queue(supervision, running, missing, meter)
        except (ActorDied, ActorCallLost, BackendUnavailable) as error:
            if not queues.allow():
                raise JobFailed(
                    expected="a queue of shards that lives",
                    found=f"it died, {queues.last}: {error.found}",
                    remedy="look at the log of its job; run again to go on",
                ) from error
            report_event(f"the queue of shards died and is created again: {error.found}")


def _with_queue(supervision: Supervision, running: RunningModel, missing: Sequence[Shard], meter: _Meter) -> None:
    workers: dict[str, JobHandle] = {}
    deaths: dict[str, Restarts] = defaultdict(lambda: Restarts(_DEATHS_IN_TEN_MINUTES))
    count = min(supervision.config.workers, len(missing))
    with ExitStack() as ending:
        queue = create_actor(
            supervision.client,
            ShardQueue,
            missing,
            name=supervision.job_name("queue"),
            environment=pool_environment(supervision.session.access.config, env_vars={}),
            max_concurrency=4,
            max_deliveries=_DELIVERIES,
        )
        ending.callback(queue.job.terminate)
        while True:
            for name in (f"worker-{number}" for number in range(count)):
                if name not in workers or _has_died(name, workers[name], deaths[name]):
                    workers[name] = _submit_worker(supervision, name, queue, running, workers=count)
                    ending.callback(workers[name].terminate)
            state: QueueState = queue.state.remote().result(_QUEUE_SECONDS)
            meter.report(state.progress)
            if state.dead:
                raise JobFailed(
                    expected="every shard to be finished by a worker",
                    found=f"no worker could finish {'; '.join(state.dead)}",
                    remedy="read the reason; run again to go on",
                )
            if not state.left:
                return
            supervision.session.check(supervision.origin.checkpoint)
            time.sleep(_LOOK_SECONDS)


def _has_died(name: str, job: JobHandle, deaths: Restarts) -> bool:
    details = job.details()
    if not details.status.finished:
        return False
    if details.status is not JobStatus.SUCCEEDED and not deaths.allow():
        raise JobFailed(
            expected=f"a {name} that lives",
            found=f"it ended, {deaths.last}: {details.reason}\n{job.logs(20)}".rstrip(),
            remedy="correct what its log complains about; run again to go on",
        )
    report_event(f"{name} ended, and is started again: {details.reason or details.status}")
    return True


def _submit_worker(
    supervision: Supervision, name: str, queue: ActorHandle, running: RunningModel, *, workers: int
) -> JobHandle:
    access, config = supervision.session.access, supervision.config
    keys = {POOL_KEY_VARIABLE: access.key.get_secret_value(), **actor_variables()}
    order = WorkOrder(
        worker=name,
        config=config,
        origin=supervision.origin,
        output=supervision.output,
        proxy=access.address,
        running=replace(running, api_key="none"),  # keys are passed in environment variables
        in_flight=math.ceil((config.in_flight or running.capacity) / workers),
    )
    resources = config.worker_resources.model_copy(update={"replicas": 1})
    if not supervision.client.is_local:
        resources = resources.model_copy(update=placed_with(access.config.resource_config))
    return supervision.client.submit(
        JobRequest(
            supervision.job_name(name),
            Call(run_worker, (order, queue)),
            resources=resources,
            environment=pool_environment(access.config, env_vars=keys),
        )
    )


class _Meter:
    def __init__(self, supervision: Supervision, *, written: Sequence[int]) -> None:
        self._supervision = supervision
        self._before = ShardProgress()
        for summary in supervision.output.summaries(written):
            self._before.add(ShardProgress(summary.rows, summary.completion_tokens, summary.errors))
        self._first: tuple[float, ShardProgress] | None = None
        self.report(ShardProgress())

    def report(self, so_far: ShardProgress) -> None:
        now, of = time.monotonic(), self._supervision
        if self._first is None and so_far.rows:  # earlier time is the workers' start
            self._first = now, so_far
        since, first = self._first or (now, so_far)
        seconds = max(now - since, 1e-3)
        rows, errors, rate = (
            self._before.rows + so_far.rows,
            self._before.errors + so_far.errors,
            (so_far.rows - first.rows) / seconds,
        )
        report(
            AnswersProgress(
                checkpoint=of.origin.checkpoint,
                cell=of.cell,
                cells=of.cells,
                done=rows,
                total=of.total,
                errors=errors,
                rows_per_second=rate,
                tokens_per_second=(so_far.tokens - first.tokens) / seconds,
                seconds_left=(of.total - rows) / rate if rate else None,
            )
        )
        if errors > (most := of.config.most_errors(of.total)):
            reason = f"; the last: {so_far.last_error}" if so_far.last_error else ""
            raise TooManyErrors(
                expected=f"at most {most:g} errors among {of.total} answers of {of.origin.checkpoint}",
                found=f"{errors} so far{reason}",
                remedy=f"correct the prompts and choose another output, or raise max_errors to go on in "
                f"{of.output.folder}, where each error is in the column of that name",
            )
