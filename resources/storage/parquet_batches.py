"""Parquet rows in batches of bounded size: a dictionary can repeat a value of megabytes at a few bits per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:  # importing it takes 0.25 s
    import pyarrow as pa
    from pyarrow import parquet

_BATCH_BYTES = 2**28
_HEADER_BYTES = 32
_DICTIONARY_PAGE = 2


def bounded_batches(
    table: parquet.ParquetFile, file: BinaryIO, *, rows: int, columns: Sequence[str] | None = None, group: int
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a row group, `rows` at a time, or fewer if their values might exceed 256 MiB.

    Raises:
        pyarrow.ArrowInvalid: a column may hold a value of more than 256 MiB.
    """
    import pyarrow as pa

    chunks = table.metadata.row_group(group)
    row_bytes = 1
    for chunk in map(chunks.column, range(chunks.num_columns)):
        if columns is None or chunk.path_in_schema.partition(".")[0] in columns:
            value_bytes = _largest_value(file, chunk)
            if value_bytes > _BATCH_BYTES:
                name = chunk.path_in_schema
                raise pa.ArrowInvalid(
                    f"column {name} repeats values of up to {value_bytes:,} bytes, over {_BATCH_BYTES:,}"
                )
            row_bytes += value_bytes * -(-chunk.num_values // max(1, chunks.num_rows))
    most = max(1, min(rows, _BATCH_BYTES // row_bytes))
    yield from table.iter_batches(most, row_groups=[group], columns=list(columns) if columns is not None else None)


def _largest_value(file: BinaryIO, chunk: parquet.ColumnChunkMetaData) -> int:
    if "DELTA_BYTE_ARRAY" in chunk.encodings:  # repeats a prefix
        return chunk.total_uncompressed_size
    before = file.tell()
    file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
    header = file.read(_HEADER_BYTES)
    file.seek(before)
    kind, size = _first_two(header)
    return size if kind == _DICTIONARY_PAGE else 0


def _first_two(header: bytes) -> tuple[int, int]:
    values, at = [0, 0], 0
    for number in range(2):
        at += 1  # the field's own byte
        shift = 0
        while at < len(header):
            values[number] |= (header[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if header[at - 1] < 0x80:
                break
    return values[0] >> 1, values[1] >> 1
