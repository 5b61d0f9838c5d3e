"""Trust in reloading weights in place, for one engine and one architecture.

An engine can take new weights, answer differently from before, and still be wrong: vLLM on a CPU, for one, keeps the
packed output layer of a model with tied embeddings from its cold start. So the first reload of each architecture is
compared with a cold start of the same checkpoint, and the outcome is remembered on this machine. A small share of
later ones is compared as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resources.settings import settings
from resources.storage import storage

# The same engine on the same weights and prompts repeats itself exactly, or nearly so where threads sum in another
# order. Stale parameters show as a share of the change between two checkpoints.
_NOISE = 1e-4
_SHARE_OF_CHANGE = 0.02


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison with a cold start; `difference` is the largest one, in nats."""

    agrees: bool
    difference: float
    change: float


@dataclass(frozen=True)
class ReloadTrust:
    """The memory of verdicts for one engine (environment, version, arguments) and one architecture."""

    path: Path

    @classmethod
    def for_engine(cls, *, engine: Mapping[str, Any], architecture: str) -> ReloadTrust:
        """The memory for an engine as described, and the digest of a model config."""
        described = json.dumps([dict(engine), architecture], sort_keys=True, default=str)
        return cls(settings().cache_dir / "reloads" / f"{hashlib.sha256(described.encode()).hexdigest()[:24]}.json")

    def recall(self) -> Verdict | None:
        """The verdict of an earlier comparison, None if there was none or it cannot be read."""
        try:
            return Verdict(**json.loads(self.path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def audits(self, weights: str, *, share: float) -> bool:
        """True if a reload of weights of this digest is among those compared with a cold start again.

        The choice follows from the digest, so that it is a fair sample and the same in every run.
        """
        chance = int.from_bytes(hashlib.sha256(weights.encode()).digest()[:8], "big") / 2**64
        return chance < share

    def judge(self, *, before: Sequence[float], reloaded: Sequence[float], cold: Sequence[float]) -> Verdict:
        """Compares canaries and remembers the verdict.

        Args:
            before: of the checkpoint that the engine held first.
            reloaded: of the next one after reloading in place.
            cold: of the same one after a cold start.
        """
        difference = _largest_difference(reloaded, cold)
        change = _largest_difference(before, cold)
        verdict = Verdict(difference <= max(_NOISE, _SHARE_OF_CHANGE * change), difference, change)
        storage.write_bytes(str(self.path), json.dumps(asdict(verdict)).encode())
        return verdict


def _largest_difference(values: Sequence[float], others: Sequence[float]) -> float:
    if len(values) != len(others):
        return float("inf")
    return max((abs(a - b) for a, b in zip(values, others, strict=True)), default=0.0)
