"""Shards and their progress; few imports, since the queue's process needs no more."""

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
        """True if it can be read only from the start."""
        return self.uri.endswith(".gz")


@dataclass(frozen=True)
class Shard:
    """Prompts with answers in the same file: consecutive rows of a source."""

    number: int
    source: Source
    first_prompt: int
    """Number of its first prompt among all."""
    prompts: int
    first_row: int
    start: int | None = None
    end: int | None = None
    """Byte range in the source, if known."""


@dataclass
class ShardProgress:
    """Answers of a shard so far."""

    rows: int = 0
    tokens: int = 0
    errors: int = 0
    last_error: str | None = None
