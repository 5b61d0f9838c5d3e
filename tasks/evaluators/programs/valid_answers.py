"""Answers of an endpoint held against their requests, for harnesses that ask by OpenAI's client.

An answer that does not fit is an error of the protocol for that client: it asks again, as often as after any other.
The pool's proxy holds answers against more; these are the endpoints of others. Standard library only.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from typing import Any

KNOWN_FINISHES = ("stop", "length", "tool_calls", "function_call", "content_filter", "repetition")
"""Reasons to finish; after another, such as an abort, the text is cut."""
ROUNDING = 1e-6
"""A log-probability may be above 0 by this much."""
COLUMNS = ("tokens", "token_logprobs", "top_logprobs")
IN_PLACE_OF_TEXT = ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal")
"""Fields of a message that may stand without a text: calls, or reasoning that met the limit."""
MOST_SHOWN = 300
REQUESTS_FAULT = (400, 413, 422)
"""Statuses by which an endpoint refuses what it was asked; with any other one it fails."""

_HALF = re.compile("[\ud800-\udfff]")
_MAYBE_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
_replaced: list[int] = []  # threads append to it; halves of each answer that had some


class Malformed(Exception):
    """An answer with status 200 that is none."""


def hooks() -> dict[str, list[Any]]:
    """Returns hooks of an HTTP client that waits for its answers."""
    return {"response": [lambda reply: check_reply(reply) if concerns(reply) and reply.read() else None]}


def later_hooks() -> dict[str, list[Any]]:
    """Returns hooks of an asynchronous HTTP client."""

    async def check(reply: Any) -> None:
        if concerns(reply) and await reply.aread():
            check_reply(reply)

    return {"response": [check]}


def parsed(body: bytes) -> tuple[Any, int]:
    """Returns the JSON of an answer, with U+FFFD for each half of a surrogate pair, and the number of these halves.

    No file could hold them. Answers that had any are counted in `Unanswered.as_values`.

    Raises:
        ValueError: it is no JSON.
    """
    answer = json.loads(body)
    if not _MAYBE_HALF.search(body):  # an echo of long texts is not written once more
        return answer, 0
    text, halves = _HALF.subn("\ufffd", json.dumps(answer, ensure_ascii=False))
    if halves:
        _replaced.append(halves)
    return json.loads(text), halves


class Unanswered:
    """Requests that got no answer, by whose fault that was: `refused` ones, and those that the endpoint `failed`."""

    def __init__(self) -> None:
        self.refused = self.failed = 0
        self.first = self.first_refusal = ""

    def note(self, error: BaseException | str) -> None:
        """Counts a request that failed for good."""
        if getattr(error, "status_code", None) in REQUESTS_FAULT:
            self.refused += 1
            self.first_refusal = self.first_refusal or refusal_of(getattr(error, "body", None) or str(error))
            return
        self.failed += 1
        self.first = self.first or described(error)

    def as_values(self) -> dict[str, Any]:
        """Returns what a file of results says of them."""
        counts = {"refused": self.refused, "failed": self.failed}
        counts["replaced"] = len(_replaced)
        return {**counts, "first_failure": self.first, "first_refusal": self.first_refusal}


def refusal_of(body: object) -> str:
    """Returns the endpoint's own words, 300 characters at most, from the body of a refusal: text, or parsed."""
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            return body[:MOST_SHOWN]
    message = body
    for name in ("error", "message", "detail"):
        message = message.get(name, message) if isinstance(message, dict) else message
    return (message if isinstance(message, str) else json.dumps(message))[:MOST_SHOWN]


def described(error: BaseException | str) -> str:
    """Returns an error of OpenAI's client in a few words, which quote nothing that was asked or answered."""
    if isinstance(error, str):
        return error
    status, cause = getattr(error, "status_code", None), error.__cause__
    return f"{type(error).__name__} {status}" if status else f"{type(cause or error).__name__}: {cause or error}"


def concerns(reply: Any) -> bool:
    """Tells if a reply is an answer to a prompt or a conversation."""
    return reply.status_code == 200 and reply.request.url.path.endswith("/completions")


def check_reply(reply: Any) -> None:
    """Passes if the answer fits its request."""
    try:
        answer, halves = parsed(reply.content)
        check(json.loads(reply.request.content), answer)
        if halves:
            reply._content = json.dumps(answer).encode()  # httpx has no public way to change an answer
    except (Malformed, ValueError, TypeError, AttributeError, LookupError) as error:
        found = str(error) if isinstance(error, Malformed) else f"{type(error).__name__} in it"
        logging.getLogger("assay").warning("malformed answer: %s", found)
        library = sys.modules[type(reply).__module__.partition(".")[0]]
        raise library.RemoteProtocolError(f"malformed answer: {found}", request=reply.request) from None


def check(asked: dict[str, Any], answer: dict[str, Any]) -> None:
    """Passes if the choices are those that one prompt or conversation asks for.

    Raises:
        Malformed: they are not.
        ValueError, TypeError, AttributeError, LookupError: nor is it an answer of that kind.
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
            check_values([token["logprob"] for token in (choice.get("logprobs") or {}).get("content") or ()])
            continue
        if not isinstance(choice["text"], str):
            raise Malformed("no text")
        if asked.get("logprobs") is not None:
            check_columns(choice["logprobs"], echo=bool(asked.get("echo")))
        if asked.get("echo") and isinstance(asked["prompt"], str) and not choice["text"].startswith(asked["prompt"]):
            raise Malformed("not the prompt that was sent")
    usage = answer.get("usage")
    if "messages" not in asked and asked.get("logprobs") is not None and isinstance(usage, dict):
        rows = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
        shown = usage["completion_tokens"] if asked.get("max_tokens") != 0 else 0
        if rows != shown + (usage["prompt_tokens"] * len(choices) if asked.get("echo") else 0):
            raise Malformed("not a log-probability for each token")


def check_columns(logprobs: dict[str, Any], *, echo: bool) -> None:
    """Passes if there is a log-probability for each token: finite, and at most 0."""
    columns = [logprobs[name] for name in COLUMNS if logprobs.get(name) is not None]
    values = list(logprobs["token_logprobs"])
    if {len(column) for column in columns} != {len(values)}:
        raise Malformed("columns of different lengths")
    if echo and values.pop(0) is not None:
        raise Malformed("a log-probability of the first token, which nothing stands before")
    check_values(values)
    if echo and len(values) > 1 and not any(values):
        raise Malformed("log-probabilities that are all 0")


def check_values(values: list[float]) -> None:
    """Passes if all are log-probabilities."""
    if values and not (math.isfinite(sum(values)) and max(values) <= ROUNDING):
        raise Malformed("log-probabilities that are none")
