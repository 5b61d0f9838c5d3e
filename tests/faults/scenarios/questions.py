"""The requests of the fault suite, and the check of their answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pools.endpoint import GENERATE
from pools.journal.answers import judge
from pools.journal.terms import NO_TERMS, token_terms_of

Kind = Literal["greedy", "logprobs", "sampled", "stream", "chat", "tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_WORDS = ("river", "seven", "copper", "winter", "orange", "engine", "harbour", "violet")
_LOGPROB_TOLERANCE = 0.05
"""Tolerance in nats. Kernels add in another order in another batch; wrong weights differ by far more."""


@dataclass(frozen=True)
class Question:
    """A request: `prompt` is a number, and requests with the same kind and prompt have the same answer.

    `mark`, in the field `user`, makes a request unique for a journal without changing its answer.
    """

    kind: Kind
    prompt: int
    mark: str
    model: str
    max_tokens: int

    @property
    def path(self) -> str:
        """Path below the endpoint's or a cell's address."""
        paths = {"chat": "/v1/chat/completions", "tokens": GENERATE}
        return paths.get(self.kind, "/v1/completions")

    @property
    def is_stream(self) -> bool:
        return self.kind == "stream"

    @property
    def is_repeatable(self) -> bool:
        """True if every answer to it is the same."""
        return self.kind != "sampled"

    @property
    def body(self) -> bytes:
        text = " ".join(_WORDS[(self.prompt + step * step) % len(_WORDS)] for step in range(6))
        fields: dict[str, Any] = {"model": self.model, "user": self.mark, "temperature": 0}
        text = f"{self.prompt}: {text}"
        match self.kind:
            case "chat":
                fields |= {"messages": [{"role": "user", "content": text}], "max_tokens": self.max_tokens}
            case "logprobs":
                fields |= {"prompt": text, "max_tokens": 1, "logprobs": 1, "echo": True}
            case "tokens":
                weighed = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0, "skip_reading_prefix_cache": False}
                fields |= {"token_ids": list(text.encode()), "sampling_params": weighed}
            case "sampled":
                fields |= {"prompt": text, "max_tokens": self.max_tokens, "temperature": 0.9}
            case "stream":
                fields |= {"prompt": text, "max_tokens": self.max_tokens, "stream": True}
            case "greedy":
                fields |= {"prompt": text, "max_tokens": self.max_tokens}
        return json.dumps(fields).encode()


@dataclass(frozen=True)
class Payload:
    """The text of an answer, and the log-probabilities of its tokens, if any.

    The first of them may be missing if an engine had cached their tokens.
    """

    text: str
    logprobs: tuple[float, ...] = ()
    from_cache: bool = False

    def agrees_with(self, other: Payload) -> bool:
        if self.from_cache and other.from_cache:
            pairs = zip(reversed(self.logprobs), reversed(other.logprobs), strict=False)
            return all(math.isclose(ours, theirs, abs_tol=_LOGPROB_TOLERANCE) for ours, theirs in pairs)
        if len(self.logprobs) != len(other.logprobs):
            return False
        if self.logprobs:  # a generated token may be a tie; the prompt's scores identify the weights
            pairs = zip(self.logprobs, other.logprobs, strict=True)
            return all(math.isclose(ours, theirs, abs_tol=_LOGPROB_TOLERANCE) for ours, theirs in pairs)
        return self.text == other.text


def payload_in(question: Question, content_type: str, body: bytes) -> Payload | None:
    """Returns the payload of an answer with status 200; None if it is not whole and valid."""
    terms = token_terms_of(json.loads(question.body)) if question.kind == "tokens" else NO_TERMS
    if judge(content_type, body, stream=question.is_stream, terms=terms) is None:
        return None
    if question.kind == "tokens":
        rows = json.loads(body)["prompt_logprobs"][1:]  # the terms guarantee that each holds its token alone
        return Payload("", tuple(weight["logprob"] for row in rows for weight in row.values()), from_cache=True)
    if not question.is_stream:
        return _payload(json.loads(body)["choices"][0])
    events = [line[len(b"data:") :].strip() for line in body.splitlines() if line.startswith(b"data:")]
    choices = [choice for event in events if event != b"[DONE]" for choice in json.loads(event)["choices"]]
    return Payload("".join(choice.get("text") or "" for choice in choices))


def is_broken_off(question: Question, body: bytes) -> bool:
    """Returns True if an answer is a stream that contains an error event and ends with an event."""
    events = [line[len(b"data:") :].strip() for line in body.splitlines() if line.startswith(b"data:")]
    try:
        documents = [json.loads(event) for event in events if event != b"[DONE]"]
    except ValueError:
        return False
    return question.is_stream and body.endswith(b"\n\n") and any("error" in document for document in documents)


def _payload(choice: Mapping[str, Any]) -> Payload:
    if "message" in choice:
        return Payload(choice["message"].get("content") or "")
    scores = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    return Payload(choice.get("text") or "", tuple(score for score in scores[:-1] if score is not None))
