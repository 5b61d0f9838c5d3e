"""Shards: what the queue lends, and what is known of each; light, since the queue's process imports no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["jsonl", "parquet", "arrow"]


@dataclass(frozen=True)
class Source:
    """A file with prompts."""

    uri: str
    kind: Kind

    @property
    def compressed(self) -> bool:
        """True if it can be read from its beginning only."""
        return self.uri.endswith(".gz")


@dataclass(frozen=True)
class Shard:
    """Prompts whose answers are written together: some rows of a source, one after another."""

    number: int
    source: Source
    first_prompt: int
    """Number of its first prompt among all."""
    prompts: int
    first_row: int
    """Number of its first row in the source."""
    start: int | None = None
    end: int | None = None
    """Bytes of the source that hold it, where that is known."""


@dataclass
class ShardProgress:
    """Answers of a shard so far."""

    rows: int = 0
    tokens: int = 0
    errors: int = 0
    last_error: str | None = None
