"""The plan of a generation: the prompts, split into shards in a single pass over their sources, and their digest.

Prompts themselves are not kept in memory: ten million prompts are ten thousand shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from resources.errors import BadInput
from resources.storage import storage
from tasks.generation.config import PromptsConfig
from tasks.generation.prompts import (
    opened_lines,
    parsed_line,
    rows_of,
    sources_of,
    table_rows,
    unreadable,
)
from tasks.generation.shards import Shard, Source
from tasks.generation.templates import UnusableRow, prompt_maker

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class PlannedSource:
    """A source when it was planned."""

    uri: str
    prompts: int
    sha256: str


@dataclass(frozen=True)
class Plan:
    """Shards in order, with their sources."""

    shards: tuple[Shard, ...]
    sources: tuple[PlannedSource, ...]

    @property
    def prompts(self) -> int:
        return sum(shard.prompts for shard in self.shards)

    @property
    def digest(self) -> str:
        """Digest of the prompts by content and order, independent of their location."""
        content = "\n".join(f"{source.sha256} {source.prompts}" for source in self.sources)
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def plan_prompts(config: PromptsConfig, *, prompts_per_shard: int) -> Plan:
    """Splits the prompts into shards. Every line of JSON is parsed; of tables only row counts are read."""
    shards: list[Shard] = []
    sources: list[PlannedSource] = []
    left = config.limit
    for source in sources_of(config.files):
        if left == 0:
            break
        digest = hashlib.sha256()
        before = sum(planned.prompts for planned in sources)
        first_of_source = len(shards)
        cuts = _lines(source, digest, most=prompts_per_shard, limit=left)
        if source.kind != "jsonl":
            cuts = _table(source, digest, most=prompts_per_shard, limit=left)
        for first_row, rows, start, end in cuts:
            shards.append(Shard(len(shards), source, before + first_row, rows, first_row, start, end))
        prompts = sum(shard.prompts for shard in shards[first_of_source:])
        sources.append(PlannedSource(source.uri, prompts, digest.hexdigest()))
        if prompts:
            _check_first(config, shards[first_of_source])
        left = None if left is None else left - prompts
    if not shards:
        raise BadInput(expected=f"prompts in {', '.join(config.files)}", found="none", remedy="name files with rows")
    return Plan(tuple(shards), tuple(sources))


_Cut = tuple[int, int, int | None, int | None]
"""First row, number of rows, and their byte range."""


def _lines(source: Source, digest: hashlib._Hash, *, most: int, limit: int | None) -> Iterator[_Cut]:
    first_row = rows = start = end = 0
    with opened_lines(source) as lines:
        for number, line in enumerate(lines, start=1):
            digest.update(line)
            end += len(line)
            if not line.strip():
                continue
            parsed_line(source, line, number)
            rows += 1
            at_limit = limit is not None and first_row + rows == limit
            if rows == most or at_limit:
                yield (first_row, rows, None, None) if source.compressed else (first_row, rows, start, end)
                first_row, rows, start = first_row + rows, 0, end
            if at_limit:
                return
    if rows:
        yield (first_row, rows, None, None) if source.compressed else (first_row, rows, start, end)


def _table(source: Source, digest: hashlib._Hash, *, most: int, limit: int | None) -> Iterator[_Cut]:
    with storage.opened(source.uri) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    rows = table_rows(source)
    rows = rows if limit is None else min(rows, limit)
    for first_row in range(0, rows, most):
        yield first_row, min(most, rows - first_row), None, None


def _check_first(config: PromptsConfig, shard: Shard) -> None:
    first = rows_of(Shard(0, shard.source, 0, 1, shard.first_row, shard.start, shard.end))[0]
    missing = [name for name in (*config.keep, *filter(None, [config.id_column])) if name not in first]
    try:
        if missing:
            raise UnusableRow(f"expected a column {missing[0]}, found {', '.join(first)}")
        prompt_maker(config)(first)
    except UnusableRow as error:
        raise unreadable(shard.source, "the first row", str(error)) from None
