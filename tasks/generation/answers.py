"""Answers as rows of Parquet or lines of JSON."""

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
    """A sample of a prompt. `text` is unset if the model only called tools, or on errors."""

    prompt_index: int
    """Number of the prompt over all shards, from 0."""
    prompt_id: str
    """Content of `id_column`, else the number."""
    sample: int
    """Number among the samples of the prompt, from 0."""
    prompt: str
    """The prompt as sent: a text, or messages as JSON."""
    text: str | None
    tool_calls: str | None
    """Tool calls, as JSON."""
    finish_reason: str | None
    """stop, length or tool_calls."""
    prompt_tokens: int | None
    """Tokens of the prompt, as counted by the engine."""
    completion_tokens: int | None
    seed: int | None
    checkpoint: str
    checkpoint_digest: str
    """Digest over its weights, tokenizer and config."""
    pool: str
    """Name of the kept pool that answered."""
    parameters: str
    """Hash of all parameters that determine the requests; the manifest has them in full."""
    columns: str | None
    """Kept columns, as JSON."""
    error: str | None
    """Reason for a missing answer: refused, or too long for the context."""


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
    """Encodes rows as a file; deterministic."""
    if form == "jsonl":
        return b"".join(orjson.dumps(row) + b"\n" for row in rows)
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    target = io.BytesIO()
    pq.write_table(pa.table(columns, schema=SCHEMA), target, compression="zstd")
    return target.getvalue()


def decoded(content: bytes, form: Format) -> list[dict[str, Any]]:
    """Decodes the rows of a file."""
    if form == "jsonl":
        return [orjson.loads(line) for line in content.splitlines()]
    return pq.read_table(io.BytesIO(content)).to_pylist()
