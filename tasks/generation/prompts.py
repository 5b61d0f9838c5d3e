"""The prompts of a generation: split into shards in a single pass over their sources, and read by shard.

Prompts themselves are not kept in memory: ten million prompts are ten thousand shards. Of a source, only the rows of a
shard are read, if that is cheap.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from resources.errors import BadInput
from resources.storage import storage
from resources.storage.parquet_batches import bounded_batches
from tasks.generation.config import PromptsConfig, UnusableRow, prompt_maker
from tasks.generation.queue import Kind, PromptSource, Shard

Row = dict[str, Any]

_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson.gz": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # as in `datasets.save_to_disk`
_ROWS_AT_ONCE = 1024
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class PlannedSource:
    """A source when it was planned."""

    uri: str
    prompts: int
    sha256: str


@dataclass(frozen=True)
class PromptPlan:
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


def plan_prompts(config: PromptsConfig, *, prompts_per_shard: int) -> PromptPlan:
    """Splits the prompts into shards. Every line of JSON is parsed; of tables only row counts are read."""
    shards: list[Shard] = []
    sources: list[PlannedSource] = []
    left = config.limit
    for source in dict.fromkeys(source for place in config.files for source in _sources(place)):
        if left == 0:
            break
        digest = hashlib.sha256()
        before = sum(planned.prompts for planned in sources)
        first_of_source = len(shards)
        cut = _cut_lines if source.kind == "jsonl" else _cut_table
        for first_row, rows, start, end in cut(source, digest, most=prompts_per_shard, limit=left):
            shards.append(Shard(len(shards), source, before + first_row, rows, first_row, start, end))
        prompts = sum(shard.prompts for shard in shards[first_of_source:])
        sources.append(PlannedSource(source.uri, prompts, digest.hexdigest()))
        if prompts:
            _check_first(config, shards[first_of_source])
        left = None if left is None else left - prompts
    if not shards:
        raise BadInput(expected=f"prompts in {', '.join(config.files)}", found="none", remedy="name files with rows")
    return PromptPlan(tuple(shards), tuple(sources))


_Cut = tuple[int, int, int | None, int | None]
"""First row, number of rows, and their byte range."""


def _cut_lines(source: PromptSource, digest: hashlib._Hash, *, most: int, limit: int | None) -> Iterator[_Cut]:
    first_row = rows = start = end = 0
    with _opened_lines(source) as lines:
        for number, line in enumerate(lines, start=1):
            digest.update(line)
            end += len(line)
            if not line.strip():
                continue
            _parsed_line(source, line, number)
            rows += 1
            at_limit = limit is not None and first_row + rows == limit
            if rows == most or at_limit:
                yield (first_row, rows, None, None) if source.compressed else (first_row, rows, start, end)
                first_row, rows, start = first_row + rows, 0, end
            if at_limit:
                return
    if rows:
        yield (first_row, rows, None, None) if source.compressed else (first_row, rows, start, end)


def _cut_table(source: PromptSource, digest: hashlib._Hash, *, most: int, limit: int | None) -> Iterator[_Cut]:
    with storage.opened(source.uri) as file:
        while block := file.read(_BUFFER_BYTES):
            digest.update(block)
    rows = _table_rows(source)
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
        raise _unreadable(shard.source, "the first row", str(error)) from None


def _sources(place: str) -> list[PromptSource]:
    if (kind := _kind_of(place)) is not None and not any(sign in place for sign in "*?["):
        if not storage.exists(place):
            raise _nothing(place, "nothing there")
        return [PromptSource(storage.absolute(place), kind)]
    if storage.exists(storage.join(place, _STATE)):
        return _saved_data_set(place)
    if storage.exists(storage.join(place, _SPLITS)):
        splits = json.loads(storage.read_bytes(storage.join(place, _SPLITS)))["splits"]
        if len(splits) == 1:
            return _saved_data_set(storage.join(place, splits[0]))
        raise _nothing(place, f"a data set with the splits {', '.join(splits)}", f"name a split: {place}/{splits[0]}")
    sources = [PromptSource(uri, kind) for uri in storage.matching_files(place) if (kind := _kind_of(uri)) is not None]
    if not sources:
        raise _nothing(place, "no such file")
    return sources


def _saved_data_set(folder: str) -> list[PromptSource]:
    state = json.loads(storage.read_bytes(storage.join(folder, _STATE)))
    if state.get("_indices_data_files"):
        raise _nothing(folder, "a data set with rows chosen by indices", "save it after flatten_indices()")
    files = [storage.join(storage.absolute(folder), file["filename"]) for file in state["_data_files"]]
    return [PromptSource(uri, "arrow") for uri in files]


def _kind_of(uri: str) -> Kind | None:
    return next((kind for suffix, kind in _KINDS.items() if uri.endswith(suffix)), None)


def _nothing(place: str, problem: str, remedy: str = "check the path, and what the files are called") -> BadInput:
    return BadInput(
        expected=f"prompts at {place}: {', '.join(_KINDS)}, a folder of such, or a data set saved to disk",
        found=problem,
        remedy=remedy,
    )


def _unreadable(source: PromptSource, place: str, problem: str) -> BadInput:
    return BadInput(
        expected=f"rows of a table in {source.uri}", found=f"{place}: {problem}", remedy="correct or remove it"
    )


def _parsed_line(source: PromptSource, line: bytes, number: int, *, unit: str = "line") -> Row:
    try:
        row = orjson.loads(line)
    except ValueError as error:
        raise _unreadable(source, f"{unit} {number}", str(error)) from None
    if not isinstance(row, dict):
        raise _unreadable(source, f"{unit} {number}", f"{type(row).__name__}, not an object with columns")
    return row


@contextmanager
def _opened_lines(source: PromptSource) -> Iterator[BinaryIO]:
    with storage.opened(source.uri) as file:
        raw = gzip.GzipFile(fileobj=file) if source.compressed else file
        try:
            yield cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, raw), _BUFFER_BYTES))
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise _unreadable(source, "as a whole", str(error)) from None


def table_batches(source: PromptSource, *, from_row: int = 0) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a table in small batches, starting at `from_row`."""
    with storage.opened(source.uri) as file:
        try:
            skip = from_row
            for batch in _parquet(file, from_row) if source.kind == "parquet" else _arrow(file):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                for start in range(skip, batch.num_rows, _ROWS_AT_ONCE):
                    yield batch.slice(start, _ROWS_AT_ONCE)
                skip = 0
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(source, "as a whole", str(error)) from None


def _parquet(file: BinaryIO, from_row: int) -> Iterator[pa.RecordBatch]:
    table = pq.ParquetFile(file)
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if from_row >= rows:  # skipped unread, but counted
            from_row -= rows
            yield pa.record_batch([pa.nulls(rows)], names=["skipped"])
            continue
        yield from bounded_batches(table, file, rows=_ROWS_AT_ONCE, group=group)
        from_row = 0


def _arrow(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    try:
        stream = pa.ipc.open_stream(file)
    except pa.ArrowInvalid:
        file.seek(0)
        whole = pa.ipc.open_file(file)
        yield from (whole.get_batch(number) for number in range(whole.num_record_batches))
        return
    yield from stream


def _table_rows(source: PromptSource) -> int:
    with storage.opened(source.uri) as file:
        try:
            if source.kind == "parquet":
                return pq.ParquetFile(file).metadata.num_rows
            return sum(batch.num_rows for batch in _arrow(file))
        except (pa.ArrowException, OSError) as error:
            raise _unreadable(source, "as a whole", str(error)) from None


def rows_of(shard: Shard) -> Sequence[Row]:
    """Returns the rows of a shard."""
    rows = list(islice(_rows(shard), shard.prompts))
    if len(rows) != shard.prompts:
        available = f"{len(rows)} from row {shard.first_row} on"
        raise BadInput(
            expected=f"{shard.prompts} rows in {shard.source.uri}, as when they were counted",
            found=available,
            remedy="leave the prompts as they are while they are answered; start again in another output folder",
        )
    return rows


def _rows(shard: Shard) -> Iterator[Row]:
    source = shard.source
    if source.kind != "jsonl":
        for batch in table_batches(source, from_row=shard.first_row):
            yield from batch.to_pylist()
    elif shard.start is not None:
        content = storage.read_bytes(source.uri, start=shard.start, end=shard.end, within="/")
        yield from _objects(shard, (line for line in content.split(b"\n") if line.strip()))
    else:
        with _opened_lines(source) as lines:
            filled = (line for line in lines if line.strip())
            yield from _objects(shard, islice(filled, shard.first_row, None))


def _objects(shard: Shard, lines: Iterable[bytes]) -> Iterator[Row]:
    for number, line in enumerate(lines, start=shard.first_row + 1):
        yield _parsed_line(shard.source, line, number, unit="row")
