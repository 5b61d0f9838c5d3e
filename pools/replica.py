"""One replica: an engine server run as a job, and which checkpoint it holds."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pools.config import InferencePoolConfig
from pools.engine_client import EngineClient
from pools.engines import engine_kwargs, replica_capacity
from pools.launch import Launch, Launcher, ServedCheckpoint, why_not_reload
from pools.proxy.state import ReplicaState
from pools.reload_trust import ReloadTrust
from resources.errors import AssayError, EndpointUnusable, EngineStartFailed, ModelUnusable, SwapRefused
from resources.jobs import Client, Command, JobHandle, JobRequest, create_environment

LoadedHow = Literal["cold start", "reload", "restart", "already loaded"]

_POLL_SECONDS = 0.2
_SEARCHED_LINES = 400
_SHOWN_LINES = 15
_EXCEPTION = re.compile(r"(?:^|\] )([A-Z]\w*(?:Error|Exception): .*)", re.MULTILINE)
_REFUSALS_AT_START = 10


@dataclass(frozen=True)
class Loaded:
    """How a checkpoint came into an engine: `reason` says why it could not be reloaded in place."""

    how: LoadedHow
    seconds: float
    reason: str | None = None


class Replica:
    """An engine server that can be started, reloaded, restarted and stopped.

    Args:
        name: unique in the pool.
        config: how the pool serves.
        launcher: how a server is started.
        client: who runs it.
        served_names: names that requests may use.
        on_change: called after every change of state, from the thread that made it.
        drain: waits until nothing is in flight on this replica any more.
    """

    def __init__(
        self,
        name: str,
        config: InferencePoolConfig,
        *,
        launcher: Launcher,
        client: Client,
        served_names: Sequence[str],
        on_change: Callable[[], None],
        drain: Callable[[str], None],
    ) -> None:
        self.name = name
        self.capacity = replica_capacity(config.device, config.model.engine_kwargs)
        self.state: ReplicaState = "starting"
        self.checkpoint: ServedCheckpoint | None = None
        self.url = ""
        self.prompt_logprobs = False
        self.max_model_len: int | None = None
        self.engine_version: str | None = None
        self.restarts = 0
        self.failure: str | None = None
        self._config = config
        self._launcher = launcher
        self._client = client
        self._served_names = tuple(served_names)
        self._on_change = on_change
        self._drain = drain
        self._job: JobHandle | None = None
        self._canary: tuple[float, ...] = ()
        self._untrusted_canary: tuple[float, ...] = ()
        self._stopping = False
        self._changing = threading.RLock()

    def load(self, checkpoint: ServedCheckpoint) -> Loaded:
        """Makes this replica answer for `checkpoint`: reloads in place where that is safe, else starts an engine.

        Raises:
            EngineStartFailed: the engine did not come up with it.
            ModelUnusable: it did, and the weights give no finite numbers.
        """
        began = time.monotonic()
        with self._changing:
            running = self.checkpoint
            if running is not None and self.state == "ready" and running.digests == checkpoint.digests:
                self._become("ready", checkpoint)
                return Loaded("already loaded", 0.0)
            self.restarts = 0
            if running is None or self.state != "ready":
                self._start(checkpoint)
                return Loaded("cold start", time.monotonic() - began)
            self._become("draining", running)
            self._drain(self.name)
            reason = self._why_restart(running, checkpoint)
            if reason is None:
                self._become("ready", checkpoint)
                return Loaded("reload", time.monotonic() - began)
            before, reloaded = self._canary, self._untrusted_canary
            self._start(checkpoint)
            if reloaded:
                verdict = self._trust(checkpoint).judge(before=before, reloaded=reloaded, cold=self._canary)
                reason = (
                    f"{reason}: {'they agree' if verdict.agrees else 'they differ'} ({verdict.difference:.2g} nats)"
                )
            return Loaded("restart", time.monotonic() - began, reason)

    def _why_restart(self, running: ServedCheckpoint, wanted: ServedCheckpoint) -> str | None:
        """Tries to reload in place; None if the engine now provably holds the wanted weights.

        Raises:
            ModelUnusable: it holds them, and they give no finite numbers; the engine is ended.
        """
        self._untrusted_canary = ()
        if not self._config.reload_in_place:
            return "reloading in place is switched off"
        reason = why_not_reload(running, wanted)
        if reason is not None:
            return reason
        verdict = self._trust(wanted).recall()
        if verdict is not None and not verdict.agrees:
            return f"a reload differed from a cold start before, by {verdict.difference:.2g} nats"
        engine = EngineClient(self.url)
        try:
            engine.reload_weights(str(wanted.folder))
            canary = engine.canary(wanted.name, prompt_logprobs=self.prompt_logprobs)
        except ModelUnusable as error:
            if verdict is None:
                return error.found
            # A reload is known to be right here, so it is the weights. What they computed stays in the KV cache's
            # memory, where even masked positions turn NaN times zero into NaN: this engine is of no use any more.
            self._end_job()
            self.failure = error.found
            self._become("dead", wanted)
            raise
        except (SwapRefused, EndpointUnusable) as error:
            return error.found
        if canary == self._canary and running.digests.weights != wanted.digests.weights:
            return "the engine still answered with the former weights"
        if verdict is None:
            self._untrusted_canary = canary
            return "the first reload of this architecture is compared with a cold start"
        self._canary = canary
        return None

    def _trust(self, checkpoint: ServedCheckpoint) -> ReloadTrust:
        arguments = engine_kwargs(self._config)
        arguments.pop("override_generation_config", None)  # says how to sample, not what the weights are
        engine = {
            "engine": self._launcher.identity,
            "version": self.engine_version,
            "arguments": arguments,
            "prompt_logprobs": self.prompt_logprobs,
        }
        return ReloadTrust.for_engine(engine=engine, architecture=checkpoint.digests.config)

    def _start(self, checkpoint: ServedCheckpoint) -> None:
        self._end_job()
        self._become("starting", checkpoint)
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        launch = self._launcher.launch(checkpoint, served_names=self._served_names, port=port)
        engine = EngineClient(self.url)
        try:
            self._job = self._client.submit(
                JobRequest(
                    name=f"engine-{self.name}-{random.randrange(16**6):06x}",
                    entrypoint=Command(launch.command, launch.arguments),
                    resources=self._config.resource_config.model_copy(update={"replicas": 1}),
                    environment=create_environment(env_vars=dict(launch.variables)),
                    max_retries_preemption=0,  # a restart must prove its model again, so it is decided here
                )
            )
            self._wait_until_answers(self._job, engine, checkpoint.name, launch)
            self.prompt_logprobs = engine.has_prompt_logprobs(checkpoint.name)
            self.max_model_len = engine.max_model_len(checkpoint.name)
            self.engine_version = engine.version()
            self._canary = engine.canary(checkpoint.name, prompt_logprobs=self.prompt_logprobs)
        except BaseException as error:
            self._end_job()
            self.failure = error.found if isinstance(error, AssayError) else str(error)
            self._become("dead", checkpoint)
            raise
        self._become("ready", checkpoint)

    def _wait_until_answers(self, job: JobHandle, engine: EngineClient, model: str, launch: Launch) -> None:
        deadline = time.monotonic() + self._config.startup_timeout_seconds
        refusals = 0
        found = f"it did not answer within {self._config.startup_timeout_seconds:g} s"
        while time.monotonic() < deadline:
            if self._stopping:
                found = "it was stopped while starting"
                break
            if job.status().finished:
                found = "it ended before its model answered"
                break
            if engine.healthy():
                try:
                    return engine.prove_it_answers(model)
                except EndpointUnusable as error:
                    refusals += 1
                    if refusals == _REFUSALS_AT_START:
                        found = f"its port is open, but the model does not answer: {error.found}"
                        break
            time.sleep(_POLL_SECONDS)
        raise EngineStartFailed(
            expected=f"the engine of {self.name} to answer for {model}",
            found=f"{found}. {_explained(job.logs(max_lines=_SEARCHED_LINES))}",
            remedy=f"read the log; to see it by hand:\n{launch.by_hand()}",
        )

    def revive_if_dead(self) -> None:
        """Starts the engine again if its process ended by itself; gives up after the configured restarts."""
        if self._stopping or self._job is None or self.state != "ready" or not self._job.status().finished:
            return
        with self._changing:
            if self._stopping or self.state != "ready" or not self._job.status().finished:
                return
            checkpoint = self.checkpoint
            assert checkpoint is not None
            last_words = _explained(self._job.logs(max_lines=_SEARCHED_LINES))
            if self.restarts >= self._config.max_replica_restarts:
                self.failure = f"its engine died {self.restarts + 1} times. {last_words}"
                self._become("dead", checkpoint)
                return
            self.restarts += 1
            try:
                self._start(checkpoint)
            except AssayError:
                return  # the replica is dead now, and says why

    def stop(self) -> None:
        """Ends the engine's whole process tree; safe to call twice, and while it starts."""
        self._stopping = True
        self._end_job()
        with self._changing:
            self._end_job()  # a start that was under way has submitted its job by now
            self.state = "dead"

    def _end_job(self) -> None:
        if self._job is not None:
            self._job.terminate()

    def _become(self, state: ReplicaState, checkpoint: ServedCheckpoint | None) -> None:
        self.state = state
        self.checkpoint = checkpoint
        self._on_change()


def _explained(log: str) -> str:
    """The end of an engine's log, behind the first exception in it: later ones only say that the first one happened."""
    cause = _EXCEPTION.search(log)
    tail = "\n".join(log.rstrip().splitlines()[-_SHOWN_LINES:])
    first = f"First error in its log: {cause.group(1)}\n" if cause else ""
    return f"{first}Last lines of its log:\n{tail}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
