"""A load of a checkpoint as it is timed, and what a replica says of itself meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pools.engine.launch import ServedCheckpoint
from pools.protocol import LoadedHow, ReplicaState


class Standing(NamedTuple):
    """State of a replica, and the checkpoint that it is about."""

    state: ReplicaState
    checkpoint: ServedCheckpoint | None


class Loading:
    """One load of a checkpoint: wall seconds by phase, and why it could not be reloaded in place."""

    def __init__(self) -> None:
        self.how: LoadedHow = "cold start"
        self.reason: str | None = None
        self.phases: dict[str, float] = {}
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the block's wall seconds to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = round(self.phases.get(name, 0.0) + time.monotonic() - began, 4)
