"""Answers of the fake engine to `/inference/v1/generate`: token ids in, token ids out, as vLLM 0.32.0 writes them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fakes.engine_answers import Completion, best_byte, logprob_of, token_text

GENERATE = "/inference/v1/generate"


@dataclass
class PrefixCache:
    """Whole blocks of texts read so far, keyed by all text before them; keeps everything until it is cleared."""

    block_size: int = 16
    _known: set[int] = field(default_factory=set)

    def read(self, text: bytes) -> int:
        """Returns the number of cached tokens; the last token is always computed."""
        held = 0
        for number, name in enumerate(self._blocks(text), 1):
            if name not in self._known or number * self.block_size == len(text):
                break
            held = number * self.block_size
        return held

    def keep(self, text: bytes) -> None:
        self._known.update(self._blocks(text))

    def _blocks(self, text: bytes) -> Iterator[int]:
        name = 0
        for end in range(self.block_size, len(text) + 1, self.block_size):
            name = hash((name, text[end - self.block_size : end]))
            yield name

    def clear(self) -> None:
        self._known.clear()


def completion_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Converts a request for tokens into a completion request, as far as the fake engine supports it.

    Raises:
        KeyError, TypeError, ValueError: the request is malformed.
    """
    ids, sampling = fields["token_ids"], dict(fields["sampling_params"])
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError("token_ids must be numbers from 0 on, at least 1")
    if sampling.get("max_tokens", 16) < 1:
        raise ValueError("max_tokens must be at least 1")
    named = {name: fields[name] for name in ("model", "stream", "stream_options") if name in fields}
    return {**sampling, **named, "prompt": ids, "echo": False, "return_tokens_as_token_ids": True}


def token_answer(
    asked: dict[str, Any], completions: list[Completion], *, cached: int, version: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the head of an answer, and its choices; `cached` is the number of cached tokens of the prompt."""
    prompt, made = len(asked["prompt"]), sum(len(completion.made) for completion in completions)
    head: dict[str, Any] = {
        **{"request_id": "generate-tokens-0", "model": asked.get("model"), "created": 0},
        "usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made},
        "prompt_logprobs": None,
        "output_mode": "tokens",
    }
    top, skips = asked.get("prompt_logprobs"), asked.get("skip_reading_prefix_cache") is not False
    if top is not None:
        rows = list(_prompt_rows(completions[0], asked["prompt"], top=top))
        head["prompt_logprobs"] = [None, *rows[0 if skips else cached :]]
    choices = [
        {
            "index": completion.index,
            "finish_reason": completion.finish_reason,
            "stop_reason": None,
            "token_ids": list(completion.made),
            "weight_versions": [{"version": version, "start": 0, "end": len(completion.made)}],
            "logprobs": _logprobs(completion),
        }
        for completion in completions
    ]
    return head, choices


def token_pieces(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields elements of `choices` of a stream, a token each; the last holds the finish reason."""
    tokens, content = choice["token_ids"], (choice["logprobs"] or {}).get("content")
    for at, token in enumerate(tokens):
        last = at == len(tokens) - 1
        logprobs = {"content": content[at : at + 1]} if content else None
        finish = choice["finish_reason"] if last else None
        yield {**choice, "token_ids": [token], "logprobs": logprobs, "finish_reason": finish}
    if not tokens:
        yield choice


def _prompt_rows(completion: Completion, ids: list[int], *, top: int) -> Iterator[dict[str, Any]]:
    state = zlib.crc32(completion.prompt[:1], completion.state)
    for token, byte in zip(ids[1:], completion.prompt[1:], strict=True):
        best = best_byte(state)
        row = {str(token): _row(state, byte)}
        if top:
            row.setdefault(str(best), _row(state, best))
        yield row
        state = zlib.crc32(bytes([byte]), state)


def _row(state: int, byte: int) -> dict[str, Any]:
    rank = 1 if byte == best_byte(state) else 2
    return {"logprob": logprob_of(state, byte), "rank": rank, "decoded_token": token_text(byte)}


def _logprobs(completion: Completion) -> dict[str, Any] | None:
    if completion.top is None:
        return None
    content = []
    for token, alternatives in completion.scored():
        tops = [{"token_id": other, "logprob": score, "rank": None} for other, score in alternatives.items()]
        tops.sort(key=lambda row: row["token_id"] != token)  # the sampled token first
        row = {"token_id": token, "logprob": alternatives[token], "rank": 1}
        content.append({**row, "top_logprobs": tops[: max(completion.top, 1)]})
    return {"content": content}
