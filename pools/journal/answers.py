"""Judges if an engine's answer is complete and valid: only such an answer is kept, counted or replayed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from pools.journal.terms import NO_TERMS, OF_TOKENS, Broken, Terms, TokenTerms

KNOWN_FINISHES = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "repetition"})
"""Reasons to finish that are due to the model or the request; after an abort or an error the text is cut."""

_DONE = b"[DONE]"
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_MOST_TOKENS = 2**53
_RESPONSE_ENDS = ("completed", "incomplete")
_CONTENT_TYPE = re.compile(r"[\t\x20-\x7e\x80-\xff]{0,1000}")


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """Facts of a valid answer; token counts are 0 if the engine returned none."""

    prompt_tokens: int
    completion_tokens: int
    finish_reasons: tuple[str, ...]


def is_content_type(text: str) -> bool:
    """Returns True if a text is valid in a header: no line ends, and only characters that HTTP allows."""
    return _CONTENT_TYPE.fullmatch(text) is not None


def judge(
    content_type: str, body: bytes, *, stream: bool = False, terms: Terms | TokenTerms = NO_TERMS
) -> AnswerFacts | None:
    """Returns the facts of a 200 answer to a completion or generation; None unless it is complete and valid.

    Never raises, for any bytes. `stream` is True if the request asked for a stream.
    """
    try:
        if stream or content_type.strip().lower().startswith("text/event-stream"):
            return _judge_stream(body, terms)
        return _judge_whole(_parsed(body), terms)
    except Broken:
        return None


def judge_response(body: bytes, *, stream: bool = False) -> AnswerFacts | None:
    """Returns the facts of a 200 answer of `/v1/responses`; None unless it is complete and valid."""
    try:
        if stream:
            *_, last = _event_payloads(body)
            return _judge_response(_parsed(last).get("response"))
        return _judge_response(_parsed(body))
    except (Broken, ValueError):
        return None


def judge_tokens(body: bytes) -> AnswerFacts | None:
    """Returns the facts of a 200 answer of `/tokenize`; None unless it is complete and valid."""
    try:
        return AnswerFacts(0, 0, ()) if isinstance(_parsed(body).get("tokens"), list) else None
    except Broken:
        return None


def _judge_response(document: Any) -> AnswerFacts:
    if not isinstance(document, dict) or document.get("status") not in _RESPONSE_ENDS:
        raise Broken
    if not isinstance(document.get("output"), list):
        raise Broken
    counts = _counts(document.get("usage"))
    return AnswerFacts(_count(counts.get("input_tokens")), _count(counts.get("output_tokens")), (document["status"],))


def _judge_whole(document: dict[str, Any], terms: Terms | TokenTerms) -> AnswerFacts:
    choices = _choices(document)
    if not choices:
        raise Broken
    terms.check(choices, _counts(document.get("usage")))
    if isinstance(terms, TokenTerms):
        terms.check_prompt(document.get("prompt_logprobs"))
    return _facts(document.get("usage"), tuple(_finish(choice.get("finish_reason")) for choice in choices))


def _judge_stream(body: bytes, terms: Terms | TokenTerms) -> AnswerFacts:
    if not body.endswith(_ENDS):
        raise Broken
    joined: dict[int, dict[str, Any]] = {}
    usage: Any = None
    done = False
    for payload in _event_payloads(body):
        if done:
            raise Broken
        if payload == _DONE:
            done = True
            continue
        document = _parsed(payload)
        usage = document.get("usage") or usage
        for choice in _choices(document):
            index = choice.get("index")
            if type(index) is not int:
                raise Broken
            joined[index] = _joined(joined.get(index), choice, terms)
    if not done or not joined:
        raise Broken
    choices = [joined[index] for index in sorted(joined)]
    terms.check(choices, _counts(usage), whole=False)
    return _facts(usage, tuple(_finish(choice.get("finish_reason")) for choice in choices))


def _joined(before: dict[str, Any] | None, piece: dict[str, Any], terms: Terms | TokenTerms) -> dict[str, Any]:
    if before is None:
        return piece
    if (finish := piece.get("finish_reason")) is not None:
        before["finish_reason"] = finish
    logprobs, more = before.get("logprobs"), piece.get("logprobs")
    if not terms.joins_rows:
        return before
    if isinstance(logprobs, dict) and isinstance(more, dict):
        for name in OF_TOKENS:
            if not isinstance(logprobs.get(name), list) or not isinstance(more.get(name), list):
                raise Broken
            logprobs[name] += more[name]
    elif isinstance(more, dict):
        before["logprobs"] = more
    return before


def _event_payloads(body: bytes) -> Iterator[bytes]:
    for event in _EVENT_END.split(body):
        lines = []
        for line in event.splitlines():
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                lines.append(value)
            elif name == b"event" and value == b"error":
                raise Broken
        if lines:
            yield b"\n".join(lines)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            document = json.loads(text.decode())  # accepts NaN and Infinity, which engines write as log-probabilities
        except (ValueError, RecursionError):
            raise Broken from None
    if not isinstance(document, dict) or document.get("error") is not None:
        raise Broken
    return document


def _choices(document: dict[str, Any]) -> list[dict[str, Any]]:
    choices = document.get("choices")
    if choices is None:
        return []
    if not isinstance(choices, list):
        raise Broken
    for choice in choices:
        if not isinstance(choice, dict) or choice.get("error") is not None:
            raise Broken
    return choices


def _finish(reason: Any) -> str:
    if not isinstance(reason, str) or reason not in KNOWN_FINISHES:
        raise Broken
    return reason


def _facts(usage: Any, finish_reasons: tuple[str, ...]) -> AnswerFacts:
    counts = _counts(usage)
    return AnswerFacts(_count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens")), finish_reasons)


def _counts(usage: Any) -> dict[str, Any]:
    return usage if isinstance(usage, dict) else {}


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else 0
