"""Validates an endpoint's answers against their requests, for harnesses that use OpenAI's client.

An answer that does not fit becomes a protocol error of that client, which retries it like any other. The pool's proxy
checks more; these checks are for external endpoints. Standard library only.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
from typing import Any

KNOWN_FINISHES = ("stop", "length", "tool_calls", "function_call", "content_filter", "repetition")
"""Known finish reasons; any other, such as an abort, means that the text was cut."""
ROUNDING = 1e-6  # a log-probability may be above 0 by this much
COLUMNS = ("tokens", "token_logprobs", "top_logprobs")
IN_PLACE_OF_TEXT = ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal")
"""Fields of a message that may replace a text: calls, or reasoning that reached the length limit."""
MOST_SHOWN = 300
CLIENTS = ("httpcore", "httpcore2", "httpx", "httpx2", "openai")
REQUESTS_FAULT = (400, 413, 422)
"""Statuses by which an endpoint rejects a request; any other error status is a failure of the endpoint."""

_HALF = re.compile("[\ud800-\udfff]")
_MAYBE_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_replaced: list[int] = []  # surrogate halves per changed answer; several threads append


class Malformed(Exception):
    """An answer with status 200 that does not fit its request; the message does not quote it."""


def hooks() -> dict[str, list[Any]]:
    """Returns event hooks for a synchronous HTTP client."""
    return {"response": [lambda reply: _check_reply(reply) if _concerns(reply) and reply.read() else None]}


def later_hooks() -> dict[str, list[Any]]:
    """Returns event hooks for an asynchronous HTTP client."""

    async def check(reply: Any) -> None:
        if _concerns(reply) and await reply.aread():
            _check_reply(reply)

    return {"response": [check]}


def parsed(body: bytes) -> tuple[Any, int]:
    """Returns an answer's JSON with U+FFFD in place of halves of surrogate pairs, and the number of these halves.

    Files cannot hold such halves. Answers that had any are counted in `Unanswered.as_values`. Other bodies than JSON
    raise `ValueError`.
    """
    answer = json.loads(body)
    if not _MAYBE_HALF.search(body):  # saves encoding echoes of long texts again
        return answer, 0
    text, halves = _HALF.subn("\ufffd", json.dumps(answer, ensure_ascii=False))
    if halves:
        _replaced.append(halves)
    return json.loads(text), halves


class Unanswered:
    """Counts requests without an answer: `refused` by the endpoint, or `failed` in it."""

    def __init__(self) -> None:
        self.refused = self.failed = 0
        self.first = self.first_refusal = ""

    def note(self, error: BaseException | str) -> None:
        if getattr(error, "status_code", None) in REQUESTS_FAULT:
            self.refused += 1
            self.first_refusal = self.first_refusal or refusal_of(getattr(error, "body", None) or str(error))
            return
        self.failed += 1
        self.first = self.first or described(error)

    def as_values(self) -> dict[str, Any]:
        counts = {"refused": self.refused, "failed": self.failed}
        counts["replaced"] = len(_replaced)
        return {**counts, "first_failure": self.first, "first_refusal": self.first_refusal}


class LostInARow:
    """Counts requests of several threads that were lost in a row.

    An answer ends the row only if its request was sent after the first loss: a late answer to an earlier request does
    not show that the endpoint still answers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost = self._lost_before_row = 0

    def begin(self) -> int:
        """Returns the mark of a request that is sent now, to be given to `answered`."""
        return self._lost

    def lose(self) -> int:
        """Counts a lost request; returns the length of the row."""
        with self._lock:
            self._lost += 1
            return self._lost - self._lost_before_row

    def answered(self, mark: int) -> None:
        """Ends the row if the request with this mark was sent after the first loss of the row."""
        with self._lock:
            if mark > self._lost_before_row:
                self._lost_before_row = self._lost


def refusal_of(body: object) -> str:
    """Returns the endpoint's message, at most 300 characters, from the body (text or parsed) of a rejection.

    Of a list of faults only their messages, since FastAPI puts the request's content next to each.
    """
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            return body[:MOST_SHOWN]
    message = body
    for name in ("error", "message", "detail"):
        message = message.get(name, message) if isinstance(message, dict) else message
    if isinstance(message, list):
        message = "; ".join(str(fault["msg"]) for fault in message if isinstance(fault, dict) and "msg" in fault)
    return (message if isinstance(message, str) else json.dumps(message))[:MOST_SHOWN]


def described(error: BaseException | str) -> str:
    """Formats an error; quotes its message only if that can hold neither prompts nor answers."""
    if isinstance(error, str):
        return error
    if status := getattr(error, "status_code", None):
        return f"{type(error).__name__} {status}"
    cause = error.__cause__ or error
    plain = isinstance(cause, OSError) or type(cause).__module__.partition(".")[0] in CLIENTS
    return f"{type(cause).__name__}: {cause}" if plain else type(cause).__name__


def _concerns(reply: Any) -> bool:
    return reply.status_code == 200 and reply.request.url.path.endswith("/completions")


def _check_reply(reply: Any) -> None:
    try:
        answer, halves = parsed(reply.content)
        check(json.loads(reply.request.content), answer)
        if halves:
            reply._content = json.dumps(answer).encode()  # httpx has no public way to change an answer
    except (Malformed, ValueError, TypeError, AttributeError, LookupError) as error:
        problem = str(error) if isinstance(error, Malformed) else f"{type(error).__name__} in it"
        logging.getLogger("assay").warning("malformed answer: %s", problem)
        library = sys.modules[type(reply).__module__.partition(".")[0]]
        raise library.RemoteProtocolError(f"malformed answer: {problem}", request=reply.request) from None


def check(asked: dict[str, Any], answer: dict[str, Any]) -> None:
    """Checks that an answer has the choices that its prompt or conversation requested; raises Malformed if not.

    Other structures raise `ValueError`, `TypeError`, `AttributeError` or `LookupError`.
    """
    choices = answer["choices"]
    if sorted(choice["index"] for choice in choices) != list(range(asked.get("n") or 1)):
        raise Malformed("not the choices that were asked for")
    for choice in choices:
        if choice["finish_reason"] not in KNOWN_FINISHES:
            raise Malformed("it ended for no known reason")
        if "messages" in asked:
            message = choice["message"]
            if not isinstance(message["content"], str) and not any(message.get(name) for name in IN_PLACE_OF_TEXT):
                raise Malformed("no text")
            _check_values([token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or ()])
            continue
        if not isinstance(choice["text"], str):
            raise Malformed("no text")
        if asked.get("logprobs") is not None:
            _check_columns(choice["logprobs"], echo=bool(asked.get("echo")))
        if asked.get("echo") and isinstance(asked["prompt"], str) and not choice["text"].startswith(asked["prompt"]):
            raise Malformed("not the prompt that was sent")
    usage = answer.get("usage")
    if "messages" not in asked and asked.get("logprobs") is not None and isinstance(usage, dict):
        rows = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
        shown = usage["completion_tokens"] if asked.get("max_tokens") != 0 else 0
        if rows != shown + (usage["prompt_tokens"] * len(choices) if asked.get("echo") else 0):
            raise Malformed("not a log-probability for each token")


def _check_columns(logprobs: dict[str, Any], *, echo: bool) -> None:
    columns = [logprobs[name] for name in COLUMNS if logprobs.get(name) is not None]
    values = list(logprobs["token_logprobs"])
    if {len(column) for column in columns} != {len(values)}:
        raise Malformed("columns of different lengths")
    if echo and values.pop(0) is not None:
        raise Malformed("a log-probability of the first token, which has no context")
    _check_values(values)
    if echo and len(values) > 1 and not any(values):
        raise Malformed("log-probabilities that are all 0")


def _check_values(values: list[float]) -> None:
    if values and not (math.isfinite(sum(values)) and max(values) <= ROUNDING):
        raise Malformed("log-probabilities that are none")
