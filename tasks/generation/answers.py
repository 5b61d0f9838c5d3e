"""Answers: how each is written down, as a row of Parquet or a line of JSON."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

Format = Literal["parquet", "jsonl"]
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """One sample of one prompt. `text` is unset where the model called tools only, or where there is an error."""

    prompt_index: int
    """Number of the prompt among all, from 0."""
    prompt_id: str
    """Content of `id_column`, else the number."""
    sample: int
    """Number among the samples of the prompt, from 0."""
    prompt: str
    """The prompt as it was put: a text, or messages as JSON."""
    text: str | None
    """Text that the model wrote."""
    tool_calls: str | None
    """Calls of tools, as JSON."""
    finish_reason: str | None
    """End of the answer: stop, length, tool_calls."""
    prompt_tokens: int | None
    """Tokens of the prompt, as the engine counted."""
    completion_tokens: int | None
    """Tokens of the answer."""
    seed: int | None
    """Seed of the request."""
    checkpoint: str
    """Name of the checkpoint."""
    checkpoint_digest: str
    """Digest over its weights, tokenizer and config."""
    pool: str
    """Name of the kept pool that answered."""
    parameters: str
    """Hash of all that decides what is asked; the manifest has it whole."""
    columns: str | None
    """Columns that were kept, as JSON."""
    error: str | None
    """Reason that there is no answer: refused, too long for the context."""


_TYPES = {"int": pa.int64(), "str": pa.string()}


def _field(name: str, annotation: str) -> pa.Field:
    kind, _, optional = annotation.partition(" | ")
    return pa.field(name, _TYPES[kind], nullable=bool(optional))


SCHEMA = pa.schema(
    [_field(field.name, str(field.type)) for field in fields(AnswerRow)],
    metadata={"assay.schema_version": str(SCHEMA_VERSION)},
)
"""Columns of a Parquet file with answers."""


def encoded(rows: Sequence[AnswerRow], form: Format) -> bytes:
    """The content of a file with these rows; the same rows give the same bytes."""
    if form == "jsonl":
        return b"".join(orjson.dumps(row) + b"\n" for row in rows)
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    target = io.BytesIO()
    pq.write_table(pa.table(columns, schema=SCHEMA), target, compression="zstd")
    return target.getvalue()


def decoded(content: bytes, form: Format) -> list[dict[str, Any]]:
    """The rows of a file."""
    if form == "jsonl":
        return [orjson.loads(line) for line in content.splitlines()]
    return pq.read_table(io.BytesIO(content)).to_pylist()
