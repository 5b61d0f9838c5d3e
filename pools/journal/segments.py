"""Segments: rows of the journal as compressed lines of JSON, for a folder that outlives the machine."""

from __future__ import annotations

import base64
import binascii
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from pools.journal import bodies
from pools.journal.answers import is_content_type
from pools.journal.schema import SCHEMA_VERSION, Row

LARGEST_ROW_BYTES = bodies.LARGEST_BYTES // 2
"""Largest row of a segment, as stored body plus request: in base64 they take a third more."""
_GZIP = 31  # zlib's window size with a gzip header
_BLOBS = ("key", "checksum", "body", "request")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "cell": (str, type(None)),
    "attempt": (str, type(None)),
    **dict.fromkeys(("target", "model", "weights", "tokenizer", "engine", "content_type", "finish_reasons"), str),
    **dict.fromkeys(("deterministic", "occurrence", "prompt_tokens", "completion_tokens", "created", "imported"), int),
    **dict.fromkeys(("key", "checksum", "body"), bytes),
    "request": (bytes, type(None)),
}
_LARGEST_INTEGER = 2**63 - 1


class SegmentCut(Exception):
    """A segment ends early, or is damaged; the rows before that are good."""


def encoded(rows: Iterable[Row]) -> bytes:
    """Returns a segment: gzip of a line with the schema's version and a line for each row, blobs in base64."""
    stream = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    parts = [stream.compress(orjson.dumps({"schema": SCHEMA_VERSION}, option=orjson.OPT_APPEND_NEWLINE))]
    parts.extend(stream.compress(_line(row)) for row in rows)
    parts.append(stream.flush())
    return b"".join(parts)


def decoded(content: bytes) -> Iterator[Row]:
    """Yields the rows of a segment, in their order, each marked as imported.

    Raises:
        SegmentCut: after the last readable row, if the segment does not end there.
    """
    lines = _lines(content)
    if (first := next(lines, None)) != {"schema": SCHEMA_VERSION}:
        raise SegmentCut(f"expected schema version {SCHEMA_VERSION} in its first line, found {first}")
    for fields in lines:
        yield _row(fields)


def _line(row: Row) -> bytes:
    fields: dict[str, Any] = row._asdict()
    del fields["imported"]
    for name in _BLOBS:
        if fields[name] is not None:
            fields[name] = base64.b64encode(fields[name]).decode()
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


def _lines(content: bytes) -> Iterator[Any]:
    with gzip.open(io.BytesIO(content)) as stream:
        try:
            while line := stream.readline(bodies.LARGEST_BYTES):
                if not line.endswith(b"\n"):
                    raise SegmentCut("a line has no end, or is too long")
                yield orjson.loads(line)
        except (OSError, EOFError, zlib.error, orjson.JSONDecodeError) as error:
            raise SegmentCut(str(error)) from None


def _row(fields: Any) -> Row:
    if not isinstance(fields, dict):
        raise SegmentCut("a line is not an object")
    try:
        blobs = {name: base64.b64decode(fields[name], validate=True) for name in _BLOBS if fields[name] is not None}
        row = Row(**{**fields, **blobs, "imported": 0})
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise SegmentCut(f"a row is not readable ({type(error).__name__})") from None
    for name, value in zip(Row._fields, row, strict=True):
        if not isinstance(value, _KINDS[name]) or (isinstance(value, int) and abs(value) > _LARGEST_INTEGER):
            raise SegmentCut(f"a row has no usable {name}")
    if not is_content_type(row.content_type):
        raise SegmentCut("a row has a content type that no header can have")
    if not bodies.is_whole(row):
        raise SegmentCut("a row has another checksum")
    return bodies.sealed(row._replace(imported=1))
