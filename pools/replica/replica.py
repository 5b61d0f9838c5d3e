"""A replica's engine: a server run as a job, the checkpoint that it holds, and its swaps."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from pools.config import InferencePoolConfig
from pools.endpoint import Scoring
from pools.engine.checks import require_fitting, require_read_as_written, scoring_of
from pools.engine.engine_client import EngineClient
from pools.engine.engines import RELOADING_WORKER, engine_kwargs, ranks_of, replica_capacity
from pools.engine.launch import Launch, Launcher, ServedCheckpoint, engine_job, free_port, why_not_reload
from pools.engine.reload_trust import ROUNDING_NATS, Reading, ReloadTrust, largest_difference
from pools.protocol import ReplicaState
from pools.replica.gang import Gang
from pools.replica.loading import (
    DIED,
    WITHOUT_PREFIX_CACHE,
    Deaths,
    Loading,
    Standing,
    WeightsInMemory,
    may_end_of_its_cache,
    start_failure,
    whole_log,
)
from pools.weights.model_files import read_tensors, tensor_in_common
from resources.errors import (
    AssayError,
    EndpointUnusable,
    EngineStartFailed,
    ModelUnusable,
    ReloadUnavailable,
    SwapRefused,
)
from resources.jobs.jobs import Client, JobHandle, polls

_log = logging.getLogger("assay.agent")
_ENGINE_POLL_SECONDS = 0.05
_PORT_TAKEN = "address already in use"
_REFUSALS_AT_START = 10


class ReplicaEngine:
    """An engine server that can be started, reloaded, restarted and stopped."""

    def __init__(
        self,
        name: str,
        config: InferencePoolConfig,
        *,
        launcher: Launcher,
        client: Client,
        on_change: Callable[[], None],
        drain: Callable[[], None],
        gang: Gang,
    ) -> None:
        self.name = name
        self.key = secrets.token_urlsafe(24)
        """API key of its engines."""
        self.capacity = replica_capacity(config.device, config.model.engine_kwargs)
        self.standing = Standing("starting", None)
        """Replaced as a whole, so that other threads never read a state with another state's checkpoint."""
        self.url: str | None = None
        self.prompt_logprobs = False
        self.max_model_len: int | None = None
        self.scoring = Scoring()
        self.engine_version: str | None = None
        self.deaths = Deaths(name, config.max_replica_restarts)
        self.failure: AssayError | None = None
        self._config = config
        self._launcher = launcher
        self._client = client
        self._on_change = on_change
        self._drain = drain
        self._gang = gang
        self._job: JobHandle | None = None
        self._canary: tuple[float, ...] = ()
        self._canaries: dict[str, tuple[float, ...]] = {}
        self._in_memory = WeightsInMemory()
        self._uncached_configs: set[str] = set()
        self._compared: tuple[Reading, Reading] | None = None
        """Readings before and after a reload that is to be compared with a cold start."""
        self._cannot_reload: str | None = None
        self._stopping = False
        self._changing = threading.RLock()

    @property
    def state(self) -> ReplicaState:
        return self.standing.state

    @property
    def checkpoint(self) -> ServedCheckpoint | None:
        return self.standing.checkpoint

    def load(self, checkpoint: ServedCheckpoint, loading: Loading) -> None:
        with self._changing:
            running = self.checkpoint
            if running is not None and self.state == "ready" and running.digests == checkpoint.digests:
                loading.how = "already loaded"
                self._become("ready", checkpoint)
                return
            with loading.phase("check"):
                require_fitting(checkpoint, self._config, launcher=self._launcher, client=self._client)
            if running is None or self.state != "ready":
                self._start(checkpoint, loading)
                return
            self._become("draining", running)
            with loading.phase("drain"):
                self._drain()
            self._verify(checkpoint, loading, otherwise=Standing("ready", running))
            loading.how = "reload"
            reason = self._why_restart(running, checkpoint, loading) if self._lives else self._count_death(DIED)
            if reason is None:
                self._verify(checkpoint, loading, otherwise=Standing("dead", checkpoint))
                self._canaries.setdefault(checkpoint.digests.checkpoint, self._canary)
                self._become("ready", checkpoint)
                return
            loading.how, loading.reason = "restart", reason
            compared = self._compared
            self._start(checkpoint, loading)
            if compared is not None:
                loading.reason = f"{reason}: {self._judged(checkpoint, *compared)}"

    def _judged(self, checkpoint: ServedCheckpoint, before: Reading, reloaded: Reading) -> str:
        try:
            cold = EngineClient(self.url or "", self.key).reading(self._canary, weights=True)
        except (ReloadUnavailable, SwapRefused) as error:
            return error.found
        return self._trust(checkpoint).judge(before=before, reloaded=reloaded, cold=cold).outcome

    def _verify(self, checkpoint: ServedCheckpoint, loading: Loading, *, otherwise: Standing) -> None:
        try:
            with loading.phase("verify"):
                checkpoint.verify()
        except AssayError as error:
            if otherwise.state == "dead":
                self._end_job()
                self.failure = error
            self._become(*otherwise)
            raise

    def _why_restart(self, running: ServedCheckpoint, checkpoint: ServedCheckpoint, loading: Loading) -> str | None:
        self._compared = None
        reason = self._why_never_reload or why_not_reload(running, checkpoint)
        if reason is not None:
            return reason
        trust = self._trust(checkpoint)
        verdict = trust.recall()
        if verdict is not None and not verdict.agrees:
            return f"a reload differed from a cold start before: {verdict.outcome}"
        # A tensor that is the same in both could stay stale unnoticed: a comparison would prove nothing.
        if verdict is None and (same := tensor_in_common(running.files, checkpoint.files)):
            return f"reloads of this architecture are not proved right yet, and {same} is the same in both checkpoints"
        compared = verdict is None or trust.audits(checkpoint.digests.weights, share=self._config.reload_audit_share)
        engine = EngineClient(self.url or "", self.key)
        try:
            before = engine.reading(self._canary) if compared else None
            with loading.phase("reload"):
                engine.reload_weights(
                    checkpoint.folders, version=checkpoint.digests.checkpoint, ranks=ranks_of(self._config)
                )
            with loading.phase("canary"):
                canary = engine.canary(checkpoint.name, prompt_logprobs=self.prompt_logprobs)
                require_read_as_written(engine, checkpoint, self._config)
            reloaded = engine.reading(canary, weights=True) if compared else None
            wrong = None if compared else self._in_memory.why_wrong(engine, checkpoint)
        except ModelUnusable as error:
            if verdict is None:
                return error.found
            # Reloads are known to be right here, so the weights are at fault. Their NaNs stay in the KV cache's memory,
            # where even masked positions turn NaN times zero into NaN: this engine is unusable from now on.
            self._end_job()
            self.failure = error
            self._become("dead", checkpoint)
            raise
        except ReloadUnavailable as error:
            self._cannot_reload = f"this engine cannot reload weights ({error.found})"
            return self._cannot_reload
        except (SwapRefused, EndpointUnusable) as error:
            return f"reloading in place failed: {error.found}"
        if canary == self._canary and running.digests.weights != checkpoint.digests.weights:
            return "the engine still answered with the former weights"
        if before is not None and reloaded is not None:
            self._compared = before, reloaded
            first = "the first reload of this architecture is compared with a cold start"
            return first if verdict is None else "this reload is among those compared with a cold start"
        if (difference := self._difference_to_former(checkpoint, canary)) is not None:
            return f"log-probabilities differed by up to {difference:.2g} nats from those of the same files before"
        if wrong is not None:
            return wrong
        self._canary = canary
        return None

    @property
    def _why_never_reload(self) -> str | None:
        if not self._config.reload_in_place:
            return "reloading in place is switched off"
        if engine_kwargs(self._config).get("worker_extension_cls") != RELOADING_WORKER:
            return "reloads of this engine cannot be compared with cold starts"
        return self._cannot_reload

    def _trust(self, checkpoint: ServedCheckpoint) -> ReloadTrust:
        arguments = engine_kwargs(self._config)
        arguments.pop("override_generation_config", None)  # affects sampling, not the weights
        engine = {
            "engine": self._launcher.identity,
            "version": self.engine_version,
            "arguments": {**arguments, **self._config.model.unnamed_inputs()},
            "prompt_logprobs": self.prompt_logprobs,
        }
        return ReloadTrust.for_engine(engine=engine, architecture=checkpoint.architecture)

    def _start(self, checkpoint: ServedCheckpoint, loading: Loading, *, ports: int = 3) -> None:
        self._become("starting", checkpoint)  # announced first, since a hung engine ends slowly
        with loading.phase("stop"):
            self._end_job()
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        engine = EngineClient(self.url, self.key)
        try:
            with loading.phase("verify"):
                checkpoint.verify()
            served = replace(checkpoint, caches_prefixes=checkpoint.digests.config not in self._uncached_configs)
            launch = self._launcher.launch(served, port=port, part=self._gang.begin_parts())
            with loading.phase("start"):
                self._job = self._client.submit(engine_job(self.name, self._config, launch, key=self.key))
                self._wait_until_answers(self._job, engine, checkpoint.name, launch)
            with loading.phase("canary"):
                self.prompt_logprobs = engine.has_prompt_logprobs(checkpoint.name)
                self.max_model_len = engine.max_model_len(checkpoint.name)
                self.engine_version = engine.version()
                self._canary = engine.canary(checkpoint.name, prompt_logprobs=self.prompt_logprobs)
                require_read_as_written(engine, checkpoint, self._config)
                self.scoring = scoring_of(engine, checkpoint, longest=self.max_model_len)
                if self._why_never_reload is None:
                    with suppress(ReloadUnavailable, SwapRefused):  # a later reload reports it
                        self._in_memory.started(engine, checkpoint)
            with loading.phase("verify"):
                checkpoint.verify()
            self._require_former(checkpoint)
        except BaseException as error:
            if self._ended_of_its_cache(error, checkpoint):
                self._uncached_configs.add(checkpoint.digests.config)
                return self._start(checkpoint, loading)
            if ports > 1 and self._port_was_taken:
                return self._start(checkpoint, loading, ports=ports - 1)
            self._end_job()
            self.failure = error if isinstance(error, AssayError) else None
            self._become("dead", checkpoint)
            raise
        if not served.caches_prefixes:
            loading.reason = "; ".join(filter(None, (loading.reason, WITHOUT_PREFIX_CACHE)))
        self._become("ready", checkpoint)

    def _ended_of_its_cache(self, error: BaseException, checkpoint: ServedCheckpoint) -> bool:
        dead = not self._lives or (isinstance(error, EndpointUnusable) and not self.healthy(1.0))
        tried = checkpoint.digests.config in self._uncached_configs
        if self._stopping or not dead or tried or self._job is None:
            return False
        return may_end_of_its_cache(error, self._log_of(self._job), self._config)

    @property
    def _port_was_taken(self) -> bool:
        ended = not (self._stopping or self._lives)
        return ended and self._job is not None and _PORT_TAKEN in self._log_of(self._job).lower()

    def _require_former(self, checkpoint: ServedCheckpoint) -> None:
        if (difference := self._difference_to_former(checkpoint, self._canary)) is not None:
            raise EngineStartFailed(
                expected=f"the engine of {self.name} to answer for {checkpoint.name} as it did before",
                found=f"log-probabilities that differ by up to {difference:.2g} nats on the same files",
                remedy="check the machine, its memory first; a restarted pool has no earlier numbers to compare with",
            )
        self._canaries.setdefault(checkpoint.digests.checkpoint, self._canary)

    def _difference_to_former(self, checkpoint: ServedCheckpoint, canary: tuple[float, ...]) -> float | None:
        former = self._canaries.get(checkpoint.digests.checkpoint, canary)
        dtypes = {tensor.dtype for tensor in read_tensors(checkpoint.files).values()}
        exact = self._config.device == "cpu" and dtypes == {"F32"} and "dtype" not in engine_kwargs(self._config)
        difference = largest_difference(former, canary)
        return difference if difference > ROUNDING_NATS["float32" if exact else "bfloat16"] else None

    def _wait_until_answers(self, job: JobHandle, engine: EngineClient, model: str, launch: Launch) -> None:
        refusals = 0
        problem = f"it did not answer within {self._config.startup_timeout_seconds:g} s"
        for _ in polls(self._config.startup_timeout_seconds, longest_seconds=_ENGINE_POLL_SECONDS):
            if self._stopping:
                problem = "it was stopped while starting"
                break
            if job.status().finished or self._gang.ended_part is not None:
                problem = "it ended before its model answered"
                break
            if engine.healthy() and engine.asks_for_key():
                try:
                    engine.require_written(model)
                    return engine.prove_it_answers(model)
                except EndpointUnusable as error:
                    refusals += 1
                    if refusals == _REFUSALS_AT_START:
                        problem = f"its port is open, but the model does not answer: {error.found}"
                        break
        raise start_failure(self._log_of(job), model=model, ended=problem, by_hand=launch.by_hand())

    @property
    def engine_ended(self) -> bool:
        return not self._stopping and self.state == "ready" and not self._lives

    @property
    def _lives(self) -> bool:
        return self._job is not None and not self._job.status().finished and self._gang.ended_part is None

    def healthy(self, timeout_seconds: float) -> bool:
        """Returns True if the engine's server answers within the timeout; a busy server answers late."""
        return self.url is not None and EngineClient(self.url, self.key).healthy(timeout_seconds)

    def revive(self, why: str, *, still: Callable[[], bool]) -> None:
        """Restarts the engine with the checkpoint that it held; gives up after the configured restarts.

        Args:
            why: completes "it …", such as "died".
            still: called again once no load is in progress; False cancels the restart.
        """
        with self._changing:
            checkpoint = self.checkpoint
            if self._stopping or self.state != "ready" or checkpoint is None or self._job is None or not still():
                return
            try:
                self._count_death(why)
                _log.warning("the engine %s and is started again", why)
                self._start(checkpoint, Loading())
            except AssayError:
                return  # the replica is dead now, and announces the reason

    def _count_death(self, why: str) -> str:
        log = self._log_of(self._job).replace(self.key, "***") if self._job else ""
        held = self.checkpoint.digests.checkpoint if self.checkpoint else ""
        failure = self.deaths.count(why, log=log, job=self._job, held=held)
        if failure is None:
            return f"the engine {why}"
        self._end_job()
        self.failure = failure
        self._become("dead", self.checkpoint)
        raise failure

    def _log_of(self, job: JobHandle) -> str:
        return self._gang.ended_part or whole_log(job)

    def stop(self) -> None:
        """Ends the engine's whole process tree; safe to call twice, and while the engine starts."""
        self._stopping = True
        self._end_job()
        with self._changing:
            self._end_job()  # a start in progress has submitted its job by now
            self.standing = Standing("dead", self.checkpoint)

    def _end_job(self) -> None:
        if self._job is not None:
            self._job.terminate()
        self._gang.end_parts()

    def _become(self, state: ReplicaState, checkpoint: ServedCheckpoint | None) -> None:
        self.standing = Standing(state, checkpoint)
        if state == "ready":
            self.failure = None
        self._on_change()
