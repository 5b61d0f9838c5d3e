"""Answers of the fake engine: texts and log-probabilities as functions of weights and prompt."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_ALPHABET = b" etaoinshrdlu.,\nABCD0123456789"
_BEST = -0.01


@dataclass(frozen=True)
class Completion:
    """One choice: the prompt's bytes where they are echoed, those made, and how to write it down."""

    index: int
    number: int
    """Its number among a prompt's `n` choices."""
    chat: bool
    label: str
    prompt: bytes
    prompt_tokens: int
    made: bytes
    finish_reason: str
    echo: bool
    top: int | None
    """Alternatives per token in the log-probabilities; none for no log-probabilities."""
    state: int
    """Of the text so far, before the prompt."""
    ids: tuple[int, ...] | None = None
    """Tokens of the prompt by which they are named in the log-probabilities; none to name them by their text."""
    labels: tuple[int, ...] = ()
    """Tokens whose log-probabilities stand beside that of each token that was made, in place of the best ones."""

    @property
    def text(self) -> str:
        """The text of the choice."""
        return ((self.prompt if self.echo else b"") + self.made).decode("utf-8", "replace")

    @property
    def choice(self) -> dict[str, Any]:
        """An element of `choices`."""
        if self.chat:
            message = {"role": "assistant", "content": self.text}
            return {"index": self.index, "message": message, **self._end(self.chat_logprobs)}
        return {"index": self.index, "text": self.text, **self._end(self.logprobs)}

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Elements of `choices` of a stream, one per token or two; an echoed prompt comes in the first."""
        logprobs = None if self.chat else self.logprobs
        if self.chat:
            yield {"index": self.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        rows = len(self.prompt) if self.echo else 0
        for start, end in [(0, rows), *((at, at + 2) for at in range(rows, rows + len(self.made), 2))]:
            if start < end:
                piece = ((self.prompt if self.echo else b"") + self.made)[start:end].decode("utf-8", "replace")
                content: dict[str, Any] = {"delta": {"content": piece}} if self.chat else {"text": piece}
                shown = logprobs and {name: column[start:end] for name, column in logprobs.items()}
                yield {"index": self.index, **content, "logprobs": shown, "finish_reason": None}
        content = {"delta": {}} if self.chat else {"text": ""}
        yield {"index": self.index, **content, "logprobs": None, "finish_reason": self.finish_reason}

    def _end(self, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"logprobs": logprobs, "finish_reason": self.finish_reason, "stop_reason": None}

    @property
    def logprobs(self) -> dict[str, Any] | None:
        """Log-probabilities as `/v1/completions` of vLLM writes them."""
        if self.top is None:
            return None
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
        for position, (token, alternatives) in enumerate(self.scored()):
            unknowable = self.echo and position == 0
            found["tokens"].append(self._named(token, position))
            found["token_logprobs"].append(None if unknowable else alternatives[token])
            tops = {
                self._named(alternative, position if alternative == token else None): score
                for alternative, score in alternatives.items()
            }
            found["top_logprobs"].append(None if unknowable else tops)
            found["text_offset"].append(offset)
            offset += len(token_text(token)) if token < 128 else 0
        return found

    def _named(self, token: int, position: int | None) -> str:
        if self.ids is None:
            return token_text(token % 256)
        known = self.echo and position is not None and position < len(self.ids)
        return f"token_id:{self.ids[position] if known and position is not None else token}"

    @property
    def chat_logprobs(self) -> dict[str, Any] | None:
        """Log-probabilities as `/v1/chat/completions` writes them."""
        if self.top is None:
            return None
        content = []
        for token, alternatives in self.scored():
            tops = [_chat_token(alternative, score) for alternative, score in alternatives.items()]
            content.append({**_chat_token(token, alternatives[token]), "top_logprobs": tops})
        return {"content": content}

    def scored(self) -> Iterator[tuple[int, dict[int, float]]]:
        """Each token, with its log-probability and those of its alternatives."""
        state = self.state if self.echo else zlib.crc32(self.prompt, self.state)
        for token in (self.prompt if self.echo else b"") + self.made:
            best = best_byte(state)
            ranked = [best, *(byte for byte in _ALPHABET if byte != best)][: max(self.top or 0, 1)]
            if self.labels:
                ranked = [token, *self.labels]
            if token not in ranked:
                ranked.append(token)
            yield token, {candidate: logprob_of(state, candidate % 256) for candidate in ranked}
            state = zlib.crc32(bytes([token]), state)


def completions_of(label: str, prompts: list[bytes], fields: dict[str, Any], *, chat: bool) -> list[Completion]:
    """Every choice that a request asks for, in the order of an answer."""
    n = fields.get("n") or 1
    given = fields.get("max_completion_tokens", fields.get("max_tokens"))
    length = 16 if given is None else given
    stops = fields.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    top = (fields.get("top_logprobs") or 0) if chat and fields.get("logprobs") else fields.get("logprobs")
    greedy = not fields.get("temperature")
    choices = (fields.get("structured_outputs") or {}).get("choice")
    found: list[Completion] = []
    for prompt, ids in zip(prompts, _token_ids(fields.get("prompt"), prompts), strict=True):
        for number in range(n):
            seed = "" if greedy and number == 0 else f"|{number}|{fields.get('seed')}"
            if fields.get("fresh_samples"):
                seed += f"|{len(found)}"
            state = zlib.crc32(f"{label}{seed}|".encode())
            made, reason = _continue(zlib.crc32(prompt, state), length, stops)
            if forced := fields.get("allowed_token_ids"):
                made, reason = bytes(token % 256 for token in forced[:length]), "length"
            if choices:
                made, reason = choices[zlib.crc32(prompt, state) % len(choices)].encode()[:length], "stop"
            found.append(
                Completion(
                    index=len(found),
                    number=number,
                    chat=chat,
                    label=label,
                    prompt=prompt,
                    prompt_tokens=len(prompt),
                    made=made,
                    finish_reason=reason,
                    echo=bool(fields.get("echo")) and not chat,
                    top=None if top is None or top is False else int(top),
                    state=state,
                    ids=ids if fields.get("return_tokens_as_token_ids") else None,
                    labels=tuple(fields.get("logprob_token_ids") or ()),
                )
            )
    return found


def _token_ids(sent: Any, prompts: list[bytes]) -> list[tuple[int, ...]]:
    """The token ids of each prompt, as they were sent where they were."""
    if not isinstance(sent, list) or isinstance(sent[0], int):
        sent = [sent]
    return [tuple(part if isinstance(part, list) else made) for part, made in zip(sent, prompts, strict=True)]


def prompts_of(prompt: Any, vocabulary_size: int | None = None) -> list[bytes]:
    """The prompts of a completion request: a text, texts, token ids, or lists of token ids.

    Raises:
        TypeError: it is none of these.
        ValueError: it is empty, or a token id is below 0 or not in the vocabulary.
    """
    if isinstance(prompt, str):
        return [prompt.encode("utf-8", "replace")]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("prompt must be a text, texts, token ids, or lists of token ids")
    ids = (token for part in prompt for token in (part if isinstance(part, list) else [part]) if isinstance(token, int))
    if vocabulary_size is not None and max(ids, default=0) >= vocabulary_size:
        raise ValueError(f"a token id is not in the vocabulary of {vocabulary_size}")
    if isinstance(prompt[0], int):
        return [bytes(token % 256 for token in prompt)]
    return [part.encode() if isinstance(part, str) else bytes(token % 256 for token in part) for part in prompt]


def chat_prompt(messages: list[dict[str, Any]]) -> bytes:
    """A conversation as the model would see it."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        parts.append(f"<|{message['role']}|>{content}")
    return ("\n".join(parts) + "\n<|assistant|>").encode()


def token_text(token: int) -> str:
    """A token as vLLM writes it: bytes that are no text by themselves by their number."""
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


def _chat_token(token: int, score: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": score, "bytes": [token]}


def best_byte(state: int) -> int:
    """The token that is most likely after a text."""
    return _ALPHABET[state % len(_ALPHABET)]


def logprob_of(state: int, token: int) -> float:
    """The log-probability of a byte after a text."""
    if token == best_byte(state):
        return _BEST
    return -1.0 - (zlib.crc32(bytes([token]), state) % 997) / 100


def _continue(state: int, length: int, stops: list[str]) -> tuple[bytes, str]:
    made = b""
    for _ in range(length):
        made += bytes([best_byte(state)])
        state = zlib.crc32(made[-1:], state)
        for stop in stops:
            at = made.find(stop.encode())
            if at >= 0:
                return made[:at], "stop"
    return made, "length"
