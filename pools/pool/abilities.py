"""Abilities of the engines that hold a checkpoint, as a user of the pool may count on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pools.endpoint import Scoring
from pools.protocol import ReplicaStatus


@dataclass(frozen=True)
class Abilities:
    """Abilities that engines have proved, for checkpoints of one architecture and tokenizer."""

    prompt_logprobs: bool
    max_model_len: int | None
    scoring: Scoring

    @classmethod
    def shared(cls, holding: Sequence[ReplicaStatus], *, engine: str) -> Abilities:
        """Those that all replicas have which hold a checkpoint; `engine` is the digest of theirs."""
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
