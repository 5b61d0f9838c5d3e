"""Trust in reloading weights in place, for one engine and one architecture.

An engine can take new weights, answer differently from before, and still be wrong: vLLM on a CPU, for one, kept the
packed output layer of a model with tied embeddings from its cold start. So reloads of an architecture are compared with
a cold start of the same checkpoint, until a comparison has proved them right; that is remembered on this machine. A
small share of later ones is compared as well.

A comparison that could not have failed proves nothing: what is stale shows only where the two checkpoints differ. So it
counts if every tensor differs between them, and if the change is large, 0.1 nats, on the canaries and on the output
layer by itself, which is shown fixed random numbers in the engine and so hides behind no other layer. Then the reloaded
engine must compute with the very bytes that the cold start computes with, packed copies included, and answer alike
within rounding. One that disagrees is remembered whatever it proves.
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
"""Between the two checkpoints of a comparison that proves something."""
ROUNDING_NATS = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}
"""Largest difference between two answers of the same weights, by the dtype that the engine computes in."""
_SHOWN_NAMES = 3


@dataclass(frozen=True)
class Reading:
    """One engine with one checkpoint, as far as it can be compared.

    `canary` and `output_layer` are log-probabilities, of the whole model and of its output layer by itself. `weights`
    are digests of what it computes with, by name; not every reading has them.
    """

    dtype: str
    canary: Sequence[float] = field(repr=False)
    output_layer: Sequence[float] = field(repr=False)
    weights: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison with a cold start.

    `difference` is the largest one between the two, and `change` that between the two checkpoints, of canaries or of
    the output layer, whichever is smaller; both in nats. `stale` names what was not computed with the same bytes.
    """

    agrees: bool
    difference: float
    change: float
    stale: Sequence[str] = ()

    @property
    def proves(self) -> bool:
        """True if it agrees and could have failed to."""
        return self.agrees and self.change >= LEAST_CHANGE_NATS

    @property
    def found(self) -> str:
        """The outcome in words."""
        if not self.agrees:
            stale = f", stale: {shown(self.stale)}" if self.stale else ""
            return f"they differ ({self.difference:.2g} nats{stale})"
        if not self.proves:
            return f"they agree, which proves nothing: the two checkpoints differ by {self.change:.2g} nats only"
        return f"they agree ({self.difference:.2g} nats)"


@dataclass(frozen=True)
class ReloadTrust:
    """The memory of verdicts for one engine (environment, version, arguments) and one architecture."""

    path: Path

    @classmethod
    def for_engine(cls, *, engine: Mapping[str, Any], architecture: Sequence[str]) -> ReloadTrust:
        """The memory for an engine as described, and digests of a model's config and of its tensors' names."""
        described = json.dumps([SCHEMA_VERSION, dict(engine), list(architecture)], sort_keys=True, default=str)
        return cls(settings().cache_dir / "reloads" / f"{hashlib.sha256(described.encode()).hexdigest()[:24]}.json")

    def recall(self) -> Verdict | None:
        """The verdict of an earlier comparison, None if there was none or it cannot be read."""
        try:
            return Verdict(**json.loads(read_cached(self.path)))
        except (OSError, ValueError, TypeError):
            return None

    def audits(self, weights: str, *, share: float) -> bool:
        """True if a reload of weights of this digest is among those compared with a cold start again.

        The choice follows from the digest, so that it is a fair sample and the same in every run.
        """
        chance = int.from_bytes(hashlib.sha256(weights.encode()).digest()[:8], "big") / 2**64
        return chance < share

    def judge(self, *, before: Reading, reloaded: Reading, cold: Reading) -> Verdict:
        """Compares readings, and remembers the verdict if it proves that reloads are right, or that they are not.

        Args:
            before: of the checkpoint that the engine held first.
            reloaded: of the next one, of which every tensor differs, after reloading in place.
            cold: of the same one after a cold start.
        """
        verdict = compare(before=before, reloaded=reloaded, cold=cold)
        if verdict.proves or not verdict.agrees:
            storage.write_bytes(str(self.path), json.dumps(asdict(verdict)).encode())
        return verdict


def compare(*, before: Reading, reloaded: Reading, cold: Reading) -> Verdict:
    """The verdict on three readings, see `ReloadTrust.judge`; a dtype without a bound has to agree exactly."""
    difference = max(
        largest_difference(reloaded.canary, cold.canary),
        largest_difference(reloaded.output_layer, cold.output_layer),
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
    """The names of what is not the same in both."""
    return sorted(name for name in {*digests, *others} if digests.get(name) != others.get(name))


def shown(names: Sequence[str]) -> str:
    """The first of some names."""
    return ", ".join(names[:_SHOWN_NAMES])


def largest_difference(values: Sequence[float], others: Sequence[float], *, unlike: float = math.inf) -> float:
    """The largest of all differences; `unlike` where there is none, or not as many of these as of those."""
    if len(values) != len(others) or not values:
        return unlike
    return max(abs(a - b) for a, b in zip(values, others, strict=True))
