"""Keys of requests: digests of the weights, the engine, the path and the whole body."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from pools.endpoint import GENERATE

_LARGE_NUMBER = b"e+"
"""Part of every number beyond 64 bits in orjson's output; it may have been an integer that became a float."""
_READ_TWICE_BYTES = 64 * 1024
"""A larger body that only json could parse is hashed unparsed: json would block the loop for 0.5 s at 16 MiB."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Digests of the weights, of tokenizer and chat template, and of the engine with its arguments."""

    weights: str
    tokenizer: str
    engine: str


@dataclass(slots=True)
class Question:
    """A request as the journal knows it. Never modified; not frozen, which would take a microsecond more per instance.

    `key` (32 bytes) identifies it. `deterministic` is True if every engine with this subject gives the same answer.
    """

    key: bytes
    deterministic: bool
    subject: Subject
    target: str
    model: str
    body: bytes = field(repr=False)


def question(subject: Subject, target: str, *, body: bytes, fields: Mapping[str, Any]) -> Question:
    """Returns the `Question` of a request to a path without a prefix that names a cell.

    `fields` are the body, parsed by orjson or by json. White space and the order of the fields do not matter. Within a
    field the order does: engines write the keys of a schema, and show tools, in the given order. Of a repeated key the
    last value counts, as for engines.
    """
    content = _begun(subject, target).copy()
    content.update(_canonical(body, fields))
    model = fields.get("model")
    return Question(
        key=content.digest(),
        deterministic=is_deterministic(_sampling(fields, target)),
        subject=subject,
        target=target,
        model=model if isinstance(model, str) else "",
        body=body,
    )


def is_deterministic(fields: Mapping[str, Any]) -> bool:
    """Returns True if nothing in the answer is drawn at random; `fields` are the sampling parameters.

    This holds at temperature 0, which must be given, and for log-probabilities of a prompt without generated tokens. A
    seed does not count: its effect depends on the other requests of the batch.
    """
    if _is_zero(fields.get("temperature"), (int, float)):
        return True
    generates_nothing = _is_zero(fields.get("max_tokens"), (int,)) and not fields.get("max_completion_tokens")
    return generates_nothing and (fields.get("echo") is True or type(fields.get("prompt_logprobs")) is int)


def _sampling(fields: Mapping[str, Any], target: str) -> Mapping[str, Any]:
    if target.partition("?")[0] != GENERATE:
        return fields
    given = fields.get("sampling_params")
    return given if isinstance(given, dict) else {}


def _is_zero(value: Any, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds and value == 0


@lru_cache(maxsize=1024)
def _begun(subject: Subject, target: str) -> hashlib.blake2b:
    parts = (subject.weights, subject.tokenizer, subject.engine, target)
    encoded = [part.encode(errors="surrogatepass") for part in parts]
    prefix = b"".join(len(part).to_bytes(8, "big") + part for part in encoded)
    return hashlib.blake2b(prefix, digest_size=32)


def _canonical(body: bytes, fields: Mapping[str, Any]) -> bytes:
    try:
        text = orjson.dumps(_sorted(fields))
        if not _has_non_finite(text, body) and _LARGE_NUMBER not in text:
            return b"o" + text
    except orjson.JSONEncodeError:
        pass
    if len(body) <= _READ_TWICE_BYTES:
        try:
            return b"j" + json.dumps(_sorted(json.loads(body))).encode()
        except (ValueError, RecursionError):
            pass
    return b"b" + body


def _sorted(fields: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(fields.items()))


def _has_non_finite(text: bytes, body: bytes) -> bool:
    if b"null" not in text:
        return False
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return True
    return False
