"""Provisioning of evaluations: environments, an own or a kept pool or an endpoint for answers, and a judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engine.engine_client import EngineClient
from pools.engine.launch import Launcher, Servable, environment_name
from pools.pool.inference import InferencePool
from pools.pool.session import PoolSession
from resources.backends.current import current_client
from resources.config import ResourceConfig
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.errors import BadInput, EndpointUnusable
from resources.regions.region_check import check_reads
from resources.settings import settings
from resources.storage.hub import hub_location
from tasks.evaluators.evaluator import evaluator_of
from tasks.prefect_server.client import accelerators_reserved
from tasks.prefect_server.progress import report_event
from tasks.running.cells import access_of
from tasks.running.serving import CLIENT_CONCURRENCY, CLIENT_TIMEOUT_SECONDS, EndpointServing, PoolServing, Serving
from tasks.running.warm import runs_here, warm_programs
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.evaluators import JudgedOptions, JudgeEndpoint
from tasks.spec.names import name_of, pool_label


@contextmanager
def provisioned(configs: Sequence[EvaluationConfig], checkpoints: Sequence[Servable]) -> Iterator[Serving | None]:
    """Builds missing environments and yields the serving of checkpoints; None if no evaluation needs an endpoint."""
    served = [config for config in configs if not config.native]
    uris = [location for checkpoint in checkpoints for location in checkpoint.locations]
    for config in configs:
        if config.starts_jobs:
            require_near(config.resources, uris)
    prepare_environments(configs)
    if not served:
        yield None
        return
    config = served_alike(served)
    if config.pool_name is not None:
        access = access_of(config.pool_name, config.pool_key_block)
        with PoolSession(access, checkpoints, holder=f"evaluation of {config.run_name}") as session:
            yield PoolServing(session)
        return
    if config.pool_config is None:
        assert config.base_url is not None
        by_name = {checkpoint.name: checkpoint for checkpoint in checkpoints}
        yield EndpointServing(config.base_url, by_name, served_name=config.served_model_name)
        return
    with accelerators_reserved(config.pool_config.resource_config), warm_programs(on_progress=report_event) as warm:
        warm.prepare(configs)
        end = warm.end if config.pool_config.device == "cpu" else _at_once
        with started_pool(config.pool_config, checkpoints, warm.launcher(config.pool_config), end=end) as session:
            yield PoolServing(session)


def _at_once(close: Callable[[], None]) -> None:
    close()


@contextmanager
def started_pool(
    config: InferencePoolConfig,
    checkpoints: Sequence[Servable],
    launcher: Launcher | None = None,
    *,
    end: Callable[[Callable[[], None]], None] = _at_once,
) -> Iterator[PoolSession]:
    """Starts a pool, and ends it with the block; `end` may close it in the background."""
    pool = start_pool(config, checkpoints, launcher)
    try:
        yield pool.session
    finally:
        report_event("closing the pool")
        end(pool.close)


def require_near(resources: ResourceConfig, uris: Sequence[str]) -> None:
    """Raises if reading the checkpoints from a job with these resources would cost too much."""
    client = current_client()
    check_reads(uris, resources, backend=None if client.is_local else client.url)


def served_alike(configs: Sequence[EvaluationConfig]) -> EvaluationConfig:
    """Returns the first evaluation if a single pool or endpoint can serve all of them."""
    first = configs[0]
    for config in configs[1:]:
        for name in ("pool_name", "pool_key_block", "base_url", "served_model_name", "pool_config"):
            if getattr(config, name) != getattr(first, name):
                raise BadInput(
                    expected=f"the same {name} in evaluations that are made together",
                    found="different values",
                    remedy="give all of them the same; apply_chat_template and sampling can be set in each evaluation",
                )
    return first


def judge_of(config: EvaluationConfig, running: RunningModel) -> RunningModel | None:
    """Returns the judge of an evaluation: the configured judge, or the model's own pool; None without a judge."""
    if not isinstance(config.evaluator, JudgedOptions):
        return None
    judge: JudgeEndpoint | None = config.evaluator.judge
    if judge is None:
        return None
    if judge.pool_name is not None:
        access = access_of(judge.pool_name, judge.pool_key_block)
        base_url, key = access.address.base_url, access.key.get_secret_value()
    elif judge.base_url is not None:
        secret = settings().judge_api_key
        base_url, key = judge.base_url.rstrip("/"), secret.get_secret_value() if secret else "none"
    else:
        return running if judge.model is None else replace(running, model=judge.model)
    assert judge.model is not None, "a judge elsewhere has a name"
    direct = judge.pool_name is not None
    engine = EngineClient(base_url.removesuffix("/v1"), key, direct=direct)
    offered = engine.model_names()
    served = judge.model if judge.model in offered else name_of(hub_location(judge.model))[1]  # as `pool up` names it
    if served not in offered:
        raise EndpointUnusable(
            expected=f"a judge {judge.model} at {base_url}",
            found=f"it offers {', '.join(offered) or 'no model'}",
            remedy="correct evaluator.judge.model, or serve it there",
        )
    return RunningModel(
        base_url=base_url,
        model=served,
        tokenizer="",
        capacity=CLIENT_CONCURRENCY,
        prompt_logprobs=False,
        request_timeout_seconds=CLIENT_TIMEOUT_SECONDS,
        apply_chat_template=True,
        api_key=key,
        direct=direct,
    )


@task(
    task_run_name="prepare environments",
    retries=2,
    retry_delay_seconds=[5, 30],
    cache_policy=NO_CACHE,
    persist_result=False,
)
def prepare_environments(configs: Sequence[EvaluationConfig]) -> None:
    """Builds missing local environments of engine and evaluators; retried, since downloads fail now and then."""
    specs = [evaluator_of(config).environment(config) for config in configs if runs_here(config)]
    specs += [
        ENVIRONMENTS[environment_name(config.pool_config)]
        for config in configs
        if config.pool_config and config.pool_name is None
    ]
    for spec in dict.fromkeys(specs):
        ensure_environment(spec, on_progress=report_event)


@task(task_run_name="start the pool of {config.model.name}", cache_policy=NO_CACHE, persist_result=False)
def start_pool(
    config: InferencePoolConfig, checkpoints: Sequence[Servable], launcher: Launcher | None = None
) -> InferencePool:
    """Starts a pool. Not retried: an engine that fails to start reports the reason, and would fail again."""
    label = pool_label(config.model.name, flow_run.id)
    pool = InferencePool(config, checkpoints, launcher=launcher, on_event=report_event, label=label)
    return pool.__enter__()
