"""Trust in reloading weights in place, per engine and architecture.

An engine can load new weights, change its answers, and still be wrong: vLLM on a CPU, for example, kept the packed
output layer of a model with tied embeddings from its cold start. So reloads of an architecture are compared with a cold
start of the same checkpoint, until a comparison has proved them right; the verdict is stored on this machine. A small
share of later reloads is compared as well.

Stale weights show only if the two checkpoints differ. So a comparison counts only if every tensor differs between them,
and if the change is large, 0.1 nats, on the canaries and on the output layer by itself, which gets fixed random numbers
in the engine, so that no other layer hides it. Then the reloaded engine must compute with exactly the bytes of the cold
start, packed copies included, and give the same answers within rounding. A disagreement is always stored.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from resources.settings import settings
from resources.storage import storage
from resources.storage.regular_files import read_cached

SCHEMA_VERSION = 2
"""Verdicts of other versions were reached by other rules, and are not read."""
LEAST_CHANGE_NATS = 0.1
"""Minimal difference between the two checkpoints of a comparison that proves something."""
ROUNDING_NATS = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}
"""Largest difference between two answers of the same weights, by the dtype that the engine computes in."""
_SHOWN_NAMES = 3


@dataclass(frozen=True)
class Reading:
    """Comparable values of an engine with a checkpoint.

    `canary` and `output_layer` are log-probabilities, of the whole model and of its output layer by itself. `weights`
    are digests of the tensors that it computes with, by name; empty if not requested.
    """

    dtype: str
    canary: Sequence[float] = field(repr=False)
    output_layer: Sequence[float] = field(repr=False)
    weights: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison with a cold start.

    `difference` is the largest difference from the cold start. `change` is the difference between the two checkpoints,
    in canaries or output layer, the smaller of the two. Both are in nats. `stale` names tensors with different bytes.
    """

    agrees: bool
    difference: float
    change: float
    stale: Sequence[str] = ()

    @property
    def proves(self) -> bool:
        return self.agrees and self.change >= LEAST_CHANGE_NATS

    @property
    def outcome(self) -> str:
        if not self.agrees:
            stale = f", stale: {shown(self.stale)}" if self.stale else ""
            return f"they differ ({self.difference:.2g} nats{stale})"
        if not self.proves:
            return f"they agree, which proves nothing: the two checkpoints differ by {self.change:.2g} nats only"
        return f"they agree ({self.difference:.2g} nats)"


@dataclass(frozen=True)
class ReloadTrust:
    """Stored verdicts for an engine (environment, version, arguments) and an architecture."""

    path: Path

    @classmethod
    def for_engine(cls, *, engine: Mapping[str, Any], architecture: Sequence[str]) -> ReloadTrust:
        """Returns the store for an engine's description, and digests of a model's config and of its tensors' names."""
        described = json.dumps([SCHEMA_VERSION, dict(engine), list(architecture)], sort_keys=True, default=str)
        return cls(settings().cache_dir / "reloads" / f"{hashlib.sha256(described.encode()).hexdigest()[:24]}.json")

    def recall(self) -> Verdict | None:
        """Returns the verdict of an earlier comparison; None if there was none or it cannot be read."""
        try:
            return Verdict(**json.loads(read_cached(self.path)))
        except (OSError, ValueError, TypeError):
            return None

    def audits(self, weights: str, *, share: float) -> bool:
        """Returns True if a reload of weights of this digest is sampled for another comparison with a cold start.

        The choice depends on the digest, so it is a fair sample and the same in every run.
        """
        chance = int.from_bytes(hashlib.sha256(weights.encode()).digest()[:8], "big") / 2**64
        return chance < share

    def judge(self, *, before: Reading, reloaded: Reading, cold: Reading) -> Verdict:
        """Compares readings; stores the verdict if it proves that reloads are right or wrong.

        Args:
            before: of the checkpoint that the engine held first.
            reloaded: of the next checkpoint, in which every tensor differs, after reloading in place.
            cold: of the next checkpoint after a cold start.
        """
        verdict = compare(before=before, reloaded=reloaded, cold=cold)
        if verdict.proves or not verdict.agrees:
            storage.write_bytes(str(self.path), json.dumps(asdict(verdict)).encode())
        return verdict


def compare(*, before: Reading, reloaded: Reading, cold: Reading) -> Verdict:
    """Returns the verdict on three readings, see `ReloadTrust.judge`; a dtype without a bound must agree exactly."""
    difference = max(
        largest_difference(reloaded.canary, cold.canary), largest_difference(reloaded.output_layer, cold.output_layer)
    )
    change = min(
        largest_difference(before.canary, cold.canary, unlike=0.0),
        largest_difference(before.output_layer, cold.output_layer, unlike=0.0),
    )
    stale = differing(reloaded.weights, cold.weights)
    same_dtype = before.dtype == reloaded.dtype == cold.dtype
    agrees = same_dtype and bool(cold.weights) and not stale and difference <= ROUNDING_NATS.get(cold.dtype, 0.0)
    return Verdict(agrees, difference, change, stale)


def differing(digests: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Returns the names with different or missing digests."""
    return sorted(name for name in {*digests, *others} if digests.get(name) != others.get(name))


def shown(names: Sequence[str]) -> str:
    """Returns the first few names, formatted."""
    return ", ".join(names[:_SHOWN_NAMES])


def largest_difference(values: Sequence[float], others: Sequence[float], *, unlike: float = math.inf) -> float:
    """Returns the largest difference of paired values; `unlike` if there are none, or the lengths differ."""
    if len(values) != len(others) or not values:
        return unlike
    return max(abs(a - b) for a, b in zip(values, others, strict=True))
