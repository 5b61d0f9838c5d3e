"""The Prefect tasks of a generation: plan, answers of each checkpoint, manifests.

A checkpoint has a queue and workers, which are restarted when they die, until all shards are written.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prefect import task
from prefect.artifacts import create_link_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import deployment, flow_run

from pools.endpoint import RunningModel
from pools.engine.engines import with_engine_variables
from pools.engine.launch import Servable, environment_name
from pools.jobs import Restarts, placed_with, pool_environment
from pools.pool.session import PoolSession
from pools.settings import POOL_KEY_VARIABLE
from pools.weights.kept import keep, release
from pools.weights.model_files import digest_model_folder
from pools.weights.own_code import require_code_allowed
from resources.actors.actors import ActorHandle, actor_variables, create_actor
from resources.backends.current import current_client
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.errors import ActorCallLost, ActorDied, BackendUnavailable, BadInput, JobFailed
from resources.jobs.jobs import Call, JobHandle, JobRequest, JobStatus
from resources.storage import storage
from tasks.checkpoints.checkpoint import SERVED, WITH_CODE, Checkpoint
from tasks.checkpoints.discovery import discover, run_named_by
from tasks.errors import TooManyErrors
from tasks.generation.config import GenerationConfig
from tasks.generation.output import AnswerFolder, WrittenBy, write_samples_page
from tasks.generation.prompts import PromptPlan, plan_prompts
from tasks.generation.queue import QueueState, Shard, ShardProgress, ShardQueue
from tasks.generation.worker import SharedColumns, WorkOrder, patiently, run_worker
from tasks.prefect_server.client import accelerators_reserved, show
from tasks.prefect_server.progress import AnswersProgress, CellDone, report, report_event
from tasks.reports.artifacts import browser_address
from tasks.running.cells import access_of
from tasks.running.provisioning import require_near, started_pool
from tasks.spec.evaluation import digest_of
from tasks.spec.names import artifact_key, check_deployed_paths, how_many, job_name, name_of

_POOL_PATIENCE_SECONDS = 120.0
_DELIVERIES = 50
_DEATHS_IN_TEN_MINUTES = 20
"""Most crashes in ten minutes of the queue, or of a worker, that are followed by a restart."""
_LOOK_SECONDS = 0.5
_QUEUE_SECONDS = 300.0


@dataclass(frozen=True, eq=False)
class Target:
    """A checkpoint, and the folder of its answers."""

    name: str
    servable: Servable
    output: AnswerFolder
    origin: SharedColumns
    identity: dict[str, Any]


@dataclass(frozen=True, eq=False)
class PlannedGeneration:
    """A generation with its plan and checkpoints."""

    config: GenerationConfig
    plan: PromptPlan
    targets: tuple[Target, ...]

    @property
    def answers(self) -> int:
        """Number of answers of each checkpoint."""
        return self.plan.prompts * self.config.sampling.samples

    def missing(self) -> list[Target]:
        return [target for target in self.targets if len(target.output.written()) < len(self.plan.shards)]


def with_run_named(config: GenerationConfig) -> GenerationConfig:
    """Returns a generation under the name of the run at its path, if no name is given."""
    path = config.model_path
    if path is None or config.model_name is not None or config.run_name != name_of(path)[0]:
        return config
    return config.model_copy(update={"model_name": run_named_by(path)})


@task(task_run_name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan_generation(config: GenerationConfig) -> PlannedGeneration:
    """Reads prompts and checkpoints, and raises for bad input before anything is started."""
    if deployment.id:
        check_deployed_paths([*config.prompts.files, config.output_path, *filter(None, [config.model_path])])
    if config.pool_config is not None:
        config = config.model_copy(update={"pool_config": with_engine_variables(config.pool_config)})
    elif config.pool_name is not None:
        access_of(config.pool_name, config.pool_key_block)
    storage.check_writable(config.output_path)
    if config.pool_config is not None:
        current_client().check_resources(config.pool_config.resource_config.by_machine())
    current_client().check_resources(config.worker_resources)
    plan = plan_prompts(config.prompts, prompts_per_shard=config.prompts_per_shard)
    targets = tuple(_target(config, plan, name, checkpoint) for name, checkpoint in _checkpoints(config))
    for target in targets:
        target.output.begin(target.identity)
    planned = PlannedGeneration(config, plan, targets)
    report_event(
        f"{how_many(plan.prompts, 'prompt')} in {how_many(len(plan.shards), 'shard')}, "
        f"{how_many(len(targets), 'checkpoint')}, {how_many(planned.answers * len(targets), 'answer')}"
    )
    return planned


def _checkpoints(config: GenerationConfig) -> list[tuple[str, Checkpoint]]:
    if config.model_path is not None:
        trusted = config.pool_config is not None and config.pool_config.model.trusts_code
        checkpoints = discover(config.model_path, config.selection, kinds=WITH_CODE if trusted else SERVED)
        if config.pool_config is not None:
            require_code_allowed((each.folder for each in checkpoints if each.folder), allowed=trusted)
        return [(each.named_in(config.run_name), each) for each in checkpoints]
    assert config.pool_name is not None
    kept = access_of(config.pool_name, config.pool_key_block).checkpoints
    return [(name, each) for name, uri in kept.items() for each in discover(uri, config.selection)]


def _target(config: GenerationConfig, plan: PromptPlan, name: str, checkpoint: Checkpoint) -> Target:
    assert checkpoint.folder is not None, "only complete checkpoints are found"
    digests = digest_model_folder(checkpoint.folder)
    if config.protect:
        keep(checkpoint.folder, digests, wanted_by=name)
    asked = {"parameters": config.parameters(), "prompts": {"count": plan.prompts, "digest": plan.digest}}
    origin = SharedColumns(name, digests.checkpoint, config.served_by, digest_of(asked))
    output = AnswerFolder(storage.join(storage.absolute(config.output_path), name), config.output_format)
    identity = {**asked, "checkpoint": {"name": name, "digest": digests.checkpoint}}
    return Target(name, Servable.from_folder(name, checkpoint.folder, digests), output, origin, identity)


@contextmanager
def pool_of(planned: PlannedGeneration, targets: Sequence[Target], *, lost: bool) -> Iterator[PoolSession]:
    """Yields a session with the pool of the checkpoints; after it was `lost`, waits up to 120 s for a kept pool."""
    config = planned.config
    servables = [target.servable for target in targets]
    if config.pool_name is not None:
        known = partial(access_of, config.pool_name, config.pool_key_block)
        access = patiently(known, _POOL_PATIENCE_SECONDS if lost else 0.0)
        with PoolSession(access, servables, holder=f"generation {config.place}", on_event=report_event) as session:
            yield session
        return
    assert config.pool_config is not None
    resources = config.pool_config.resource_config
    require_near(resources, [place for servable in servables for place in servable.locations])
    ensure_environment(ENVIRONMENTS[environment_name(config.pool_config)], on_progress=report_event)
    with accelerators_reserved(resources), started_pool(config.pool_config, servables) as session:
        yield session


@task(task_run_name="answers of {target.name}", cache_policy=NO_CACHE, persist_result=False)
def generate_answers(planned: PlannedGeneration, target: Target, session: PoolSession) -> None:
    """Generates the missing shards of a checkpoint."""
    began, cell, cells = time.monotonic(), planned.targets.index(target) + 1, len(planned.targets)
    report_event(f"loading {target.name}")
    running, _ = session.load(target.name)
    try:
        supervise(planned, target, session, running)
    finally:
        session.unwant(target.name)
    release(target.name)
    report(CellDone(target.name, cell, cells, "succeeded", time.monotonic() - began))


def require_same_prompts(planned: PlannedGeneration) -> None:
    """Raises BadInput if the prompts changed since they were planned, as when a source was replaced meanwhile."""
    config = planned.config
    if plan_prompts(config.prompts, prompts_per_shard=config.prompts_per_shard).digest != planned.plan.digest:
        raise BadInput(
            expected="prompts that stay as they are while they are answered",
            found=f"they changed after they were counted: {', '.join(config.prompts.files)}",
            remedy=f"generate into another folder; in {config.output_path} answers may be to either",
        )


@task(task_run_name="manifests", cache_policy=NO_CACHE, persist_result=False, retries=3, retry_delay_seconds=[1, 5, 20])
def conclude_generation(planned: PlannedGeneration) -> list[dict[str, Any]]:
    """Writes manifests of complete checkpoints and a samples page, shown in Prefect's UI; returns the totals."""
    config, plan = planned.config, planned.plan
    written, missing = [], planned.missing()
    for target in planned.targets:
        if target in missing:
            continue
        sources = [{"uri": s.uri, "prompts": s.prompts, "sha256": s.sha256} for s in plan.sources]
        more = {"parameters_hash": target.origin.parameters, "sources": sources, "pool": config.served_by}
        manifest = target.output.conclude({**target.identity, **more}, shards=len(plan.shards))
        written.append(WrittenBy(target.name, target.output, manifest["totals"]))
    if not written:
        return []
    page = write_samples_page(config, plan, written)
    rows = [{"checkpoint": w.name, **w.totals, "folder": w.output.folder, "samples_page": page} for w in written]
    key = artifact_key(config.run_name)
    described = f"Answers: {config.place}"
    show("totals", lambda: create_table_artifact(rows, key=f"{key}-generated", description=described))
    show(
        "the samples",
        lambda: create_link_artifact(
            browser_address(page), key=f"{key}-samples", link_text=page, description=f"Samples: {config.place}"
        ),
    )
    return rows


def supervise(planned: PlannedGeneration, target: Target, session: PoolSession, running: RunningModel) -> None:
    """Returns when all shards of a checkpoint are written. Raises if the pool will not answer any more."""
    queues = Restarts(_DEATHS_IN_TEN_MINUTES)
    while True:  # the written files are checked again after each queue, whose state is no proof
        written = set(target.output.written())
        meter = _Meter(planned, target, written=sorted(written))
        missing = [shard for shard in planned.plan.shards if shard.number not in written]
        if not missing:
            return
        try:
            _with_queue(planned.config, target, session, running, missing, meter)
        except (ActorDied, ActorCallLost, BackendUnavailable) as error:
            if not queues.allow():
                raise JobFailed(
                    expected="a queue of shards that lives",
                    found=f"it died, {queues.last}: {error.found}",
                    remedy="look at the log of its job; run again to go on",
                ) from error
            report_event(f"the queue of shards died and is created again: {error.found}")


def _with_queue(
    config: GenerationConfig,
    target: Target,
    session: PoolSession,
    running: RunningModel,
    missing: Sequence[Shard],
    meter: _Meter,
) -> None:
    workers: dict[str, JobHandle] = {}
    deaths: dict[str, Restarts] = defaultdict(lambda: Restarts(_DEATHS_IN_TEN_MINUTES))
    count = min(config.workers, len(missing))
    with ExitStack() as ending:
        queue = create_actor(
            current_client(),
            ShardQueue,
            missing,
            name=_job_name("queue", target),
            environment=pool_environment(session.access.config, env_vars={}),
            max_concurrency=4,
            max_deliveries=_DELIVERIES,
        )
        ending.callback(queue.job.terminate)
        while True:
            for name in (f"worker-{number}" for number in range(count)):
                if name not in workers or _has_died(name, workers[name], deaths[name]):
                    in_flight = math.ceil((config.in_flight or running.capacity) / count)
                    without_key = replace(running, api_key="none")  # keys are passed in environment variables
                    proxy = session.access.address
                    order = WorkOrder(name, config, target.origin, target.output, proxy, without_key, in_flight)
                    workers[name] = _submit_worker(order, target, session, queue)
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
            session.check(target.name)
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


def _submit_worker(order: WorkOrder, target: Target, session: PoolSession, queue: ActorHandle) -> JobHandle:
    access, client = session.access, current_client()
    keys = {POOL_KEY_VARIABLE: access.key.get_secret_value(), **actor_variables()}
    resources = order.config.worker_resources.model_copy(update={"replicas": 1})
    if not client.is_local:
        resources = resources.model_copy(update=placed_with(access.config.resource_config))
    return client.submit(
        JobRequest(
            _job_name(order.worker, target),
            Call(run_worker, (order, queue)),
            resources=resources,
            environment=pool_environment(access.config, env_vars=keys),
        )
    )


def _job_name(role: str, target: Target) -> str:
    return job_name(role, target.name, flow_run=flow_run.id)


class _Meter:
    def __init__(self, planned: PlannedGeneration, target: Target, *, written: Sequence[int]) -> None:
        self._planned, self._target = planned, target
        self._before = ShardProgress()
        for summary in target.output.summaries(written):
            self._before.add(ShardProgress(summary.rows, summary.completion_tokens, summary.errors))
        self._first: tuple[float, ShardProgress] | None = None
        self.report(ShardProgress())

    def report(self, so_far: ShardProgress) -> None:
        now, planned, target = time.monotonic(), self._planned, self._target
        if self._first is None and so_far.rows:  # earlier time is the workers' start
            self._first = now, so_far
        since, first = self._first or (now, so_far)
        seconds = max(now - since, 1e-3)
        rows, errors = self._before.rows + so_far.rows, self._before.errors + so_far.errors
        rate = (so_far.rows - first.rows) / seconds
        report(
            AnswersProgress(
                checkpoint=target.name,
                cell=planned.targets.index(target) + 1,
                cells=len(planned.targets),
                done=rows,
                total=planned.answers,
                errors=errors,
                rows_per_second=rate,
                tokens_per_second=(so_far.tokens - first.tokens) / seconds,
                seconds_left=(planned.answers - rows) / rate if rate else None,
            )
        )
        if errors > (most := planned.config.most_errors(planned.answers)):
            reason = f"; the last: {so_far.last_error}" if so_far.last_error else ""
            raise TooManyErrors(
                expected=f"at most {most:g} errors among {planned.answers} answers of {target.name}",
                found=f"{errors} so far{reason}",
                remedy=f"correct the prompts and choose another output, or raise max_errors to go on in "
                f"{target.output.folder}, where each error is in the column of that name",
            )
