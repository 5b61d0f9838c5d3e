"""A model with a prefix cache that answers as vLLM does: token log-probs of cached tokens are missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

VOCABULARY = 400


class CachedEngine:
    """Scores each token by all tokens before it; `ask` answers requests of both kinds.

    `wrong` is an error in nats of scores behind cached tokens; `tells` adds the number of cached tokens to answers.
    """

    def __init__(self, *, block: int = 16, wrong: float = 0.0, tells: bool = True, refuses: int | None = None) -> None:
        self.block = block
        self.wrong = wrong
        self.tells = tells
        self.refuses = refuses
        self.cached: set[tuple[int, ...]] = set()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.computed = 0
        self.echoed: list[tuple[int, ...]] = []
        self.batches: list[int] = []
        self.at_once = self.most_at_once = 0

    async def ask(self, path: str, body: dict[str, Any], read: Callable[[Any], Any]) -> Any:
        self.asked.append((path, body))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        answer = self._labels(body) if path.endswith("completions") else self._rows(body)
        return read(answer)

    def rows(self, tokens: Sequence[int], start: int) -> list[tuple[float, float]]:
        """Returns the token log-probs of an echo from `start` on."""
        tokens = tuple(tokens)
        return [(value_of(tokens[:at], tokens[at]), likeliest(tokens[:at])[1]) for at in range(start, len(tokens))]

    def read(self, tokens: Sequence[int], *, from_cache: bool = True) -> int:
        """Computes a prompt and caches its whole blocks; returns the number of tokens found in the cache."""
        tokens = tuple(tokens)
        ends = range(self.block, len(tokens) + 1, self.block)
        cached_tokens = 0
        for end in ends if from_cache else ():
            if end >= len(tokens) or tokens[:end] not in self.cached:
                break
            cached_tokens = end
        self.cached.update(tokens[:end] for end in ends)
        self.computed += len(tokens) - cached_tokens
        return cached_tokens

    def _labels(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = tuple(body["prompt"])
        cached = self.read(prompt)
        token, value = likeliest(prompt)
        top = {label: value_of(prompt, label) - self.wrong for label in body["logprob_token_ids"]}
        named = {f"token_id:{key}": number for key, number in {token: value, **top}.items()}
        return {"choices": [{"index": 0, "logprobs": {"top_logprobs": [named]}}], **self._usage(cached)}

    def _rows(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = tuple(body["token_ids"])
        assert body["sampling_params"]["skip_reading_prefix_cache"] is False
        cached = self.read(tokens)
        rows: list[dict[str, Any] | None] = [None]
        for at in range(cached + 1, len(tokens)):
            best, value = likeliest(tokens[:at])
            row = {str(tokens[at]): {"logprob": value_of(tokens[:at], tokens[at]) - self.wrong, "rank": 7}}
            rows.append({**row, str(best): {"logprob": value, "rank": 1}})
        return {"prompt_logprobs": rows, **self._usage(cached)}

    def _usage(self, cached: int) -> dict[str, Any]:
        return {"usage": {"prompt_tokens_details": {"cached_tokens": cached} if self.tells else None}}


def value_of(context: tuple[int, ...], token: int) -> float:
    best, value = likeliest(context)
    return value if token == best else value - 0.1 - hash((context, token)) % 1009 / 300


def likeliest(context: tuple[int, ...]) -> tuple[int, float]:
    """Returns the likeliest token and its log-probability, the same in every run, as hashes of numbers are."""
    number = hash(context)
    return number % VOCABULARY, -(number % 1013 + 1) / 300
