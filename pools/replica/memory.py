"""Compares the weights in an engine's memory, tensor by tensor, with an earlier load of the same files."""

from __future__ import annotations

from collections.abc import Mapping

from pools.engine.engine_client import EngineClient
from pools.engine.launch import ServedCheckpoint
from pools.engine.reload_trust import differing, shown

_REMEMBERED = 100
"""Checkpoints with remembered digests, about 100 kB each."""


class WeightsInMemory:
    """Digests of the weights in the memory of a replica's engines, by the checkpoint that they held."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, str]] = {}

    def started(self, engine: EngineClient, checkpoint: ServedCheckpoint) -> None:
        """Names the weights of a newly started engine, and remembers their digests.

        Raises:
            ReloadUnavailable: the engine has no such calls.
            SwapRefused: it failed to answer them.
        """
        engine.name_weights(checkpoint.digests.checkpoint)
        self._remember(checkpoint, engine.weights_in_memory())

    def why_wrong(self, engine: EngineClient, checkpoint: ServedCheckpoint) -> str | None:
        """Returns the reason that a reloaded engine does not hold a checkpoint; None if nothing contradicts it.

        Raises:
            EndpointUnusable, ReloadUnavailable, SwapRefused: the engine does not report its weights.
        """
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
