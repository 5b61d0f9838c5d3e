"""A timed load of a checkpoint, and the replica's state meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pools.config import InferencePoolConfig
from pools.engine.launch import ServedCheckpoint
from pools.protocol import LoadedHow, ReplicaState
from resources.errors import EndpointUnusable, EngineStartFailed

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
        """Adds the block's wall seconds to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = round(self.phases.get(name, 0.0) + time.monotonic() - began, 4)
