"""A request for an engine as the proxy knows it: all of its bytes, and two of its fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from pools.endpoint import GENERATE as _GENERATE
from pools.journal.terms import NO_TERMS, Terms, TokenTerms, terms_of, token_terms_of
from pools.proxy.connections.messages import Header, Request
from pools.proxy.connections.replies import OURS_TO_KEEP, Refusal, passed_on
from pools.proxy.connections.room import AnswerShare

COMPLETIONS, CHAT, RESPONSES, TOKENIZE = b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/tokenize"
GENERATE = _GENERATE.encode()
"""Paths of engines that clients may request."""
_MOST_VALUES = 2**22
"""Maximum of commas and brackets, a bracket counts as four: parsing them blocks the loop for 0.3 s at most."""
_SLOWLY_PARSED_BYTES = 2**20
"""Limit for json's parser, which takes 22 ms for this size, and 0.4 s for 16 MiB."""
_ODD = "NaN, Infinity or half of a surrogate pair"


@dataclass(slots=True, eq=False)
class Asked:
    """A client's request. `target` is its path; `headers` are those for the replica."""

    target: bytes
    headers: Sequence[Header]
    body: bytes = field(repr=False)
    model: str
    stream: bool
    fields: dict[str, Any] = field(repr=False)
    """The parsed body."""
    share: AnswerShare = field(repr=False)
    """Part of the room for bodies that its answer takes."""
    tries_after: int | None = None
    """Number of the pool's failures before the request; None if it must not make the pool try again."""

    @property
    def terms(self) -> Terms | TokenTerms:
        """Terms that it sets for its answer; parsed from the body, since `fields` may be gone by then."""
        try:
            fields = orjson.loads(self.body)
        except orjson.JSONDecodeError:  # a body that only json parses is not parsed twice
            return NO_TERMS
        return token_terms_of(fields) if self.target == GENERATE else terms_of(fields, chat=self.target == CHAT)

    @property
    def is_completion(self) -> bool:
        """True if the journal keeps answers to such requests."""
        return self.target in (COMPLETIONS, CHAT, GENERATE)


def asked_in(request: Request, *, target: bytes, trace: bytes | None = None) -> Asked:
    """Parses a request for an engine, for the path `target`; `trace` is the `traceparent` if the request has none.

    Raises:
        Refusal: it is not JSON, has too many values, or names no model.
    """
    fields = _parsed(request.body)
    model = fields.get("model") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(model, str):
        raise Refusal(400, "The body must be a JSON object with the name of a model.", param="model")
    headers = passed_on(request.head.headers, dropped=OURS_TO_KEEP)
    if trace is not None and request.head.header(b"traceparent") is None:
        headers = [*headers, (b"traceparent", trace)]
    return Asked(target, headers, request.body, model, bool(fields.get("stream")), fields, request.share)


def _parsed(body: bytes) -> Any:
    if len(body) > _MOST_VALUES // 4 and body.count(b",") + 4 * sum(map(body.count, (b"[", b"{"))) > _MOST_VALUES:
        raise Refusal(
            413, f"The body has more than {_MOST_VALUES} commas and brackets, where a bracket counts as four."
        )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    if len(body) > _SLOWLY_PARSED_BYTES:
        raise Refusal(
            400, f"The body is not valid JSON, or is larger than {_SLOWLY_PARSED_BYTES} bytes and has {_ODD}."
        )
    try:
        return json.loads(body)  # accepts the same as engines: NaN, unbounded numbers, lone surrogates
    except (ValueError, RecursionError):
        raise Refusal(400, "The body is not valid JSON.") from None
