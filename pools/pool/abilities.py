"""Capabilities of the engines that hold a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pools.endpoint import Scoring
from pools.protocol import ReplicaStatus


@dataclass(frozen=True)
class Abilities:
    """Capabilities that engines have proved, for checkpoints of the same architecture and tokenizer."""

    prompt_logprobs: bool
    max_model_len: int | None
    scoring: Scoring

    @classmethod
    def shared(cls, holding: Sequence[ReplicaStatus], *, engine: str) -> Abilities:
        """Returns the capabilities shared by all replicas that hold a checkpoint; `engine` is their engine's digest."""
        engines = [replica.announcement for replica in holding]
        scoring = [announced.scoring for announced in engines]
        return cls(
            prompt_logprobs=all(announced.prompt_logprobs for announced in engines),
            max_model_len=min((known for announced in engines if (known := announced.max_model_len)), default=None),
            scoring=Scoring(
                scores_from_cache=all(way.scores_from_cache for way in scoring),
                kv_cache_tokens=min((way.kv_cache_tokens for way in scoring if way.kv_cache_tokens), default=None),
                engine=engine,
                architecture="/".join(sorted({way.architecture for way in scoring})),
                dtype="/".join(sorted({way.dtype for way in scoring})),
            ),
        )
