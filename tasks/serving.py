"""Who answers an evaluator's requests: an inference pool that we start, or an endpoint that runs already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE

from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engine_client import EngineClient
from pools.inference import InferencePool
from pools.launch import ServedCheckpoint, environment_name
from resources.environments import ENVIRONMENTS, ensure_environment
from resources.errors import EndpointUnusable
from resources.settings import settings
from tasks.config import EvaluationConfig
from tasks.evaluators.registry import EVALUATORS
from tasks.progress import report_event

_CLIENT_CONCURRENCY = 16
_CLIENT_TIMEOUT_SECONDS = 1800.0


class Serving(Protocol):
    """Somebody who can be asked to hold a checkpoint and answer for it."""

    def load(self, name: str) -> tuple[RunningModel, dict[str, Any]]:
        """Makes one checkpoint answer; also tells how it came about, for the record."""
        ...

    def counts(self, name: str) -> dict[str, int]:
        """Requests counted for a checkpoint so far, by outcome; empty where nobody counts."""
        ...

    def check(self) -> None:
        """Raises if nobody will answer any more."""
        ...


class PoolServing:
    """A pool of our own."""

    def __init__(self, pool: InferencePool) -> None:
        self._pool = pool

    def load(self, name: str) -> tuple[RunningModel, dict[str, Any]]:
        """See `Serving.load`."""
        running, loaded = self._pool.load(name)
        return running, {"by": "pool", **asdict(loaded), "engine": dict(self._pool.engine_identity())}

    def counts(self, name: str) -> dict[str, int]:
        """See `Serving.counts`."""
        return self._pool.counts(name)

    def check(self) -> None:
        """See `Serving.check`."""
        self._pool.check()


class EndpointServing:
    """Somebody else's endpoint, of which nothing is known but its address; it serves what it serves."""

    def __init__(
        self, base_url: str, checkpoints: Mapping[str, ServedCheckpoint], *, served_name: str | None = None
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._checkpoints = checkpoints
        self._served_name = served_name
        key = settings().endpoint_api_key
        self._key = key.get_secret_value() if key else "none"
        self._engine = EngineClient(self._base_url.removesuffix("/v1"), self._key)

    def load(self, name: str) -> tuple[RunningModel, dict[str, Any]]:
        """Finds the checkpoint among the names the endpoint offers; it is not asked to load anything."""
        offered = self._engine.model_names()
        # A server that was given no name uses the path it was given.
        known = [self._served_name] if self._served_name else [name, str(self._checkpoints[name].folder)]
        model = next((one for one in known if one in offered), None)
        if model is None:
            raise EndpointUnusable(
                expected=f"{self._base_url} to serve {' or '.join(known)}",
                found=f"it offers {', '.join(offered) or 'no model'}",
                remedy="serve the checkpoint under that name, or give the name it has there as served_model_name",
            )
        self._engine.prove_it_answers(model)
        running = RunningModel(
            base_url=self._base_url,
            model=model,
            tokenizer=str(self._checkpoints[name].folder),
            capacity=_CLIENT_CONCURRENCY,
            prompt_logprobs=self._engine.has_prompt_logprobs(model),
            request_timeout_seconds=_CLIENT_TIMEOUT_SECONDS,
            max_model_len=self._engine.max_model_len(model),
            api_key=self._key,
        )
        return running, {"by": "endpoint", "base_url": self._base_url, "model": model, "weights": "as its owner says"}

    def counts(self, name: str) -> dict[str, int]:
        """Nobody counts here."""
        return {}

    def check(self) -> None:
        """Raises if the endpoint is gone, which the harness would put down to itself."""
        self._engine.check_reachable()


@contextmanager
def provisioned(config: EvaluationConfig, checkpoints: Sequence[ServedCheckpoint]) -> Iterator[Serving]:
    """Serving for some checkpoints, for as long as the block lasts; environments are built first where missing."""
    prepare_environments(config)
    if config.pool_config is None:
        assert config.base_url is not None
        by_name = {checkpoint.name: checkpoint for checkpoint in checkpoints}
        yield EndpointServing(config.base_url, by_name, served_name=config.served_model_name)
        return
    pool = start_pool(config.pool_config, checkpoints)
    try:
        yield PoolServing(pool)
    finally:
        report_event("closing the pool")
        pool.close()


@task(retries=2, retry_delay_seconds=[5, 30], cache_policy=NO_CACHE, persist_result=False)
def prepare_environments(config: EvaluationConfig) -> None:
    """Builds the environments of engine and evaluator, where missing; retried, since downloads fail now and then."""
    names = [EVALUATORS[config.evaluator].environment]
    if config.pool_config is not None:
        names.append(environment_name(config.pool_config))
    for name in names:
        ensure_environment(ENVIRONMENTS[name], on_progress=report_event)


@task(cache_policy=NO_CACHE, persist_result=False)
def start_pool(config: InferencePoolConfig, checkpoints: Sequence[ServedCheckpoint]) -> InferencePool:
    """Starts a pool. Not retried: an engine that does not start says why, and would say it again."""
    pool = InferencePool(config, checkpoints, on_event=report_event)
    return pool.__enter__()
