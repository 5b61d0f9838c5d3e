"""Requirements of a request on its answer: number of choices, and which log-probabilities of which tokens.

`TokenTerms` are those of `/inference/v1/generate`, which takes and returns token ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

ROUNDING = 1e-6
"""Tolerance by which a log-probability may be above 0."""
OF_TOKENS = ("tokens", "token_logprobs", "top_logprobs")
"""Columns of a completion's log-probabilities, with an entry for each token."""


class Broken(Exception):
    """The answer violates the terms."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Requirements of a request on its answer; empty fields require nothing.

    `prompts` are texts or lists of token ids, each of which gets `n` choices.
    """

    prompts: Sequence[Any] | None = field(default=None, repr=False)
    n: int = 1
    chat: bool = False
    logprobs: bool = False
    echo: bool = False
    most_tokens: int | None = None
    token_ids: bool = False
    """Tokens are named by their ids."""
    prompt_texts: bool = True
    """Echoed prompt text must start the text of its choices."""
    labels: frozenset[str] = frozenset()
    """Names of tokens that need a log-probability at each position, for every generated token."""

    @property
    def joins_rows(self) -> bool:
        """True if the token log-probs in the pieces of a stream are checked together."""
        return self.logprobs and not self.chat

    def check(self, choices: Sequence[dict[str, Any]], usage: Mapping[str, Any], *, whole: bool = True) -> None:
        """Raises `Broken` unless all choices, in the order of their indices, satisfy the terms.

        Choices joined from a stream (`whole` is False) may omit log-probabilities of chats.
        """
        if [choice.get("index") for choice in choices] != list(range(len(choices))):
            raise Broken
        if self.prompts is not None and len(choices) != len(self.prompts) * self.n:
            raise Broken
        if self.chat:
            if self.logprobs and whole:
                self._check_rows(sum(_check_chat(choice.get("logprobs")) for choice in choices), usage)
            return
        if self.prompts is None:
            return
        rows = 0
        for number, choice in enumerate(choices):
            text, prompt = choice.get("text"), self.prompts[number // self.n]
            if not isinstance(text, str):
                raise Broken
            if self.echo and self.prompt_texts and isinstance(prompt, str) and not text.startswith(prompt):
                raise Broken
            if self.logprobs:
                rows += self._check_completion(choice.get("logprobs"), prompt)
        if self.logprobs:
            self._check_rows(rows, usage)

    def _check_completion(self, logprobs: Any, prompt: Any) -> int:
        columns: list[Any] = [logprobs.get(name) for name in OF_TOKENS] if isinstance(logprobs, dict) else [None]
        if not all(isinstance(column, list) for column in columns) or len(set(map(len, columns))) != 1:
            raise Broken
        tokens, values, tops = columns
        if not self.echo:
            check_values(values)
            if self.labels:
                self._check_labels(tops)
            return len(values)
        if not values or values[0] is not None:  # the first token has no log-probability
            raise Broken
        known = values[1:]
        check_values(known)
        if len(known) > 1 and not any(known):
            raise Broken
        if isinstance(prompt, list):
            made = len(values) - len(prompt)
            if made < 0 or (self.most_tokens is not None and made > self.most_tokens):
                raise Broken
            if self.token_ids and _joined(tokens[: len(prompt)]) != orjson.dumps(prompt):
                raise Broken
        return len(values)

    def _check_labels(self, tops: list[Any]) -> None:
        for top in tops:
            if not isinstance(top, dict) or not self.labels <= top.keys():
                raise Broken
            check_values([top[label] for label in self.labels])

    def _check_rows(self, rows: int, usage: Mapping[str, Any]) -> None:
        asked, made = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not isinstance(asked, int) or not isinstance(made, int):
            return
        if self.echo:
            made = asked * self.n + (
                made if self.most_tokens != 0 else 0
            )  # for 0 a token is generated, and not returned
        if rows != made:
            raise Broken


NO_TERMS = Terms()


def terms_of(fields: Mapping[str, Any], *, chat: bool = False) -> Terms:
    """Returns the terms in a request's parsed body; omits requirements that no supported engine is known to satisfy."""
    n = fields.get("n")
    n = 1 if n is None else n
    if not fields or type(n) is not int or fields.get("use_beam_search") or fields.get("prompt_embeds"):
        return Terms(chat=chat)
    if chat:
        shown = fields.get("logprobs") is True and fields.get("include_reasoning") is not False
        return Terms([None], n, chat=True, logprobs=shown)
    most = fields.get("max_tokens", 16)
    cut = fields.get("truncate_prompt_tokens") is not None
    by_id = fields.get("return_tokens_as_token_ids") is True
    labels = fields.get("logprob_token_ids")
    return Terms(
        prompts=_prompts(fields.get("prompt"), cut=cut),
        n=n,
        logprobs=type(fields.get("logprobs")) is int,
        echo=fields.get("echo") is True,
        most_tokens=most if type(most) is int else None,
        token_ids=by_id,
        prompt_texts=not cut and not fields.get("return_token_ids"),
        labels=frozenset(f"token_id:{token}" for token in labels if by_id) if isinstance(labels, list) else frozenset(),
    )


def check_values(values: list[Any]) -> None:
    """Raises `Broken` unless all are log-probabilities."""
    try:
        if not values or (math.isfinite(sum(values)) and max(values) <= ROUNDING):
            return
    except (TypeError, OverflowError):
        pass
    raise Broken


def _joined(tokens: list[str]) -> bytes:
    try:
        return f"[{','.join(tokens).replace('token_id:', '')}]".encode()
    except (TypeError, UnicodeEncodeError):
        raise Broken from None


def _check_chat(logprobs: Any) -> int:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not all(isinstance(token, dict) for token in content):
        raise Broken
    check_values([token.get("logprob") for token in content])
    return len(content)


def _prompts(prompt: Any, *, cut: bool) -> list[Any] | None:
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) is int):
        prompt = [prompt]
    if not isinstance(prompt, list):
        return None
    return [None] * len(prompt) if cut else prompt


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Requirements of a request on its answer; empty fields require nothing."""

    prompt: Sequence[int] | None = field(default=None, repr=False)
    n: int = 1
    logprobs: bool = False
    prompt_rows: bool = False
    """True if log-probabilities of the prompt's tokens are requested."""
    from_cache: bool = False
    """True if tokens in the engine's cache are excluded: entries at the beginning may be missing."""
    joins_rows: bool = field(default=False, init=False)
    """Token log-probs in a stream are not checked."""

    def check(self, choices: Sequence[dict[str, Any]], usage: Mapping[str, Any], *, whole: bool = True) -> None:
        if self.prompt is None:
            return
        if [choice.get("index") for choice in choices] != list(range(self.n)):
            raise Broken
        if not whole:
            return
        made = sum(self._check_choice(choice) for choice in choices)
        for name, count in (("prompt_tokens", len(self.prompt)), ("completion_tokens", made)):
            if isinstance(usage.get(name), int) and usage[name] != count:
                raise Broken

    def _check_choice(self, choice: Mapping[str, Any]) -> int:
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list):
            raise Broken
        if self.logprobs:
            logprobs = choice.get("logprobs")
            rows = logprobs.get("content") if isinstance(logprobs, dict) else None
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise Broken
            if [row.get("token_id") for row in rows] != tokens:
                raise Broken
            check_values([row.get("logprob") for row in rows])
        return len(tokens)

    def check_prompt(self, rows: Any) -> None:
        """Raises `Broken` unless each of the prompt's tokens has log-probs, or each token that the cache did not hold.

        `rows` is `prompt_logprobs` of the answer: None for the first token, then token log-probs up to the last token.
        """
        prompt = self.prompt
        if prompt is None or not self.prompt_rows:
            return
        if not isinstance(rows, list) or not 1 <= len(rows) <= len(prompt) or rows[0] is not None:
            raise Broken
        if len(rows) < len(prompt) and not self.from_cache:
            raise Broken
        tokens = prompt[len(prompt) - len(rows) + 1 :]
        try:
            values = [row[str(token)]["logprob"] for row, token in zip(rows[1:], tokens, strict=True)]
        except (LookupError, TypeError):
            raise Broken from None
        check_values(values)
        if len(values) > 1 and not any(values):
            raise Broken


def token_terms_of(fields: Mapping[str, Any]) -> TokenTerms:
    """Returns the terms in a request's fields; omits requirements that no supported engine is known to satisfy."""
    prompt, sampling = fields.get("token_ids"), fields.get("sampling_params")
    if not isinstance(prompt, list) or not isinstance(sampling, dict) or {"features", "content_parts"} & fields.keys():
        return TokenTerms()
    n = sampling.get("n", 1)
    if type(n) is not int:
        return TokenTerms()
    return TokenTerms(
        prompt=prompt,
        n=n,
        logprobs=type(sampling.get("logprobs")) is int and fields.get("output_mode", "tokens") == "tokens",
        prompt_rows=type(sampling.get("prompt_logprobs")) is int,
        from_cache=sampling.get("skip_reading_prefix_cache") is False,
    )
