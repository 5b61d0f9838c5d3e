"""Requirements of a request to `/inference/v1/generate`, which takes and returns token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pools.journal.terms import Broken, check_values


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Requirements of a request on its answer; empty fields require nothing.

    `prompt` are its token ids, `n` is the number of choices, `logprobs` is True if each token needs its log-probs.
    """

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
        """Raises `Broken` unless all choices, in the order of their indices, satisfy the terms."""
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
