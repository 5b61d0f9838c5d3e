"""A replica's loads with their phases, the weights in its engines' memory, and the deaths of its engines."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from pools.config import InferencePoolConfig
from pools.engine.engine_client import EngineClient
from pools.engine.engine_log import computing_process_ended, explained, first_error
from pools.engine.launch import ServedCheckpoint
from pools.engine.reload_trust import differing, shown
from pools.jobs import Restarts
from pools.protocol import LoadedHow, ReplicaState
from resources.errors import EndpointUnusable, EngineDied, EngineStartFailed
from resources.jobs.jobs import JobHandle

DIED = "died"
_KILLED = ("from outside", "out of memory")  # in the reason of a job's end
_REMEMBERED = 100
"""Checkpoints with remembered digests, about 100 kB each."""
WITHOUT_PREFIX_CACHE = "it has a state, and its engine ended with a prefix cache, so it runs without"
"""Part of a load's reason: vLLM dies on a CPU if layers of Mamba 2 and of attention share a prefix cache."""


def may_end_of_its_cache(error: BaseException, log: str, config: InferencePoolConfig) -> bool:
    """Returns True if a failed start is worth a retry without a prefix cache: single host, Mamba model by its log."""
    ended = isinstance(error, EndpointUnusable | EngineStartFailed) and "mamba" in log.lower()
    chosen = "enable_prefix_caching" in config.model.engine_kwargs
    return ended and not chosen and config.resource_config.hosts_per_replica == 1


class Standing(NamedTuple):
    """State of a replica, and the checkpoint that it refers to."""

    state: ReplicaState
    checkpoint: ServedCheckpoint | None


class Loading:
    """A load of a checkpoint: wall seconds by phase, and the reason if it could not be reloaded in place."""

    def __init__(self) -> None:
        self.how: LoadedHow = "cold start"
        self.reason: str | None = None
        self.phases: dict[str, float] = {}
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = round(self.phases.get(name, 0.0) + time.monotonic() - began, 4)


class WeightsInMemory:
    """Digests of the weights in the memory of a replica's engines, by the checkpoint that they held."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, str]] = {}

    def started(self, engine: EngineClient, checkpoint: ServedCheckpoint) -> None:
        engine.name_weights(checkpoint.digests.checkpoint)
        self._remember(checkpoint, engine.weights_in_memory())

    def why_wrong(self, engine: EngineClient, checkpoint: ServedCheckpoint) -> str | None:
        """Returns the reason that a reloaded engine does not hold a checkpoint; None if nothing contradicts it."""
        named, digest = engine.weights_name(), checkpoint.digests.checkpoint
        if named not in (None, digest):
            return f"the engine said that it holds {named}, not {digest}"
        now = engine.weights_in_memory()
        if other := differing(self._known.get(digest, now), now):
            return f"the engine's memory differed from what the same files gave before: {shown(other)}"
        self._remember(checkpoint, now)
        return None

    def _remember(self, checkpoint: ServedCheckpoint, digests: Mapping[str, str]) -> None:
        self._known[checkpoint.digests.checkpoint] = digests
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]


class Deaths:
    """The deaths of a replica's engines; deaths without an error allow `most` restarts in ten minutes."""

    def __init__(self, replica: str, most: int) -> None:
        self.revived = 0
        """Engines restarted because an engine died."""
        self.last: str | None = None
        """The first error in the log of the engine that died last."""
        self.of_errors: Counter[str] = Counter()
        """Engines that died of an error, by the digest of the checkpoint held."""
        self._replica = replica
        self._restarts = Restarts(most)

    def count(self, why: str, *, log: str, job: JobHandle | None, held: str) -> EngineDied | None:
        """Counts a death; returns the replica's failure if no restart is allowed. `why` completes "it …".

        A death by an error always allows a restart: the pool withdraws a checkpoint that killed two engines.
        """
        error = first_error(log)
        self.last = error or f"none in its log; it {why}"
        if error is not None and why == DIED:
            self.of_errors[held] += 1
        elif not self._restarts.allow():
            reason = (job.details().reason if job else None) or ""
            killed = any(word in reason for word in _KILLED) or computing_process_ended(log)
            hint = "; it was killed, as for want of memory: give the replicas more with --ram" if killed else ""
            return EngineDied(
                expected=f"the engine of {self._replica} to live",
                found=f"it {why}, {self._restarts.last}{hint if why == DIED else ''}. {explained(log)}",
                remedy="read the log above, and run again",
            )
        self.revived += 1
        return None
