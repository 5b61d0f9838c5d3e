"""Scores continuations (log-likelihoods) through an engine's prefix cache: a shared context is computed once.

An echo with log-probabilities computes each choice whole, past the prefix cache. Here each *context* is sent once, for
the log-probabilities of the first tokens of all its choices, and stays in the cache; the rest of each longer choice is
computed from there, in the order of `choice_plan.py`. An engine returns no log-probabilities for the cached beginning
of a prompt, so token log-probs are aligned at the prompt's end; they count only behind the tokens that the answer
reports as cached, and if they hold the token with a valid value. Choices that lack them are echoed. For harness
programs: standard library only.

Smooth scores of a question come from log-likelihoods that are requested anyway. While a small model learns, accuracy
stays constant for long and moves by whole questions. These two scores move with each probability. Both are Marin's.
Bytes are those of lm-eval's own `acc_bytes`: the choice without the text before it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from choice_plan import Choice, Step, in_order, plan
from valid_answers import ROUNDING, Malformed

CACHED, ECHO = "prefix cache", "echo"  # scoring methods in records
LEAST_CONTEXT = 64
"""Minimum context, in tokens, to score longer choices through the cache; below it, echoing many at once is cheaper."""
TOO_SHORT = f"choices of several tokens behind fewer than {LEAST_CONTEXT} cost less to echo"
CACHE_SHARE = 2
"""Requests in flight together add at most this fraction (1/2) of the cache, since shared contexts need room as well."""
TOKEN_ID = "token_id:"  # prefix of tokens in answers with `return_tokens_as_token_ids`
FIRST_AUDITED, AUDITED_LATER = 20, 100
"""Contexts scored both ways: the first 20 of a new engine, afterwards 1 in 100."""
LARGEST_DIFFERENCES = {"float32": 1e-4, "float16": 0.03125, "bfloat16": 0.25}
"""Largest difference of a token's log-probability, in nats, that is rounding, by the engine's compute type.

For the two short types: two steps of a logit between 16 and 32, the range of real models. Parts of a prompt computed in
different batches are summed in a different order, which moves a logit to its neighbour. Steps of a float32 are 2e-6
there, and sums over some thousand products differ by more; 2e-6 was measured. Log-probabilities of another text usually
differ by whole nats. A type without a bound must agree exactly.
"""
SCHEMA_VERSION = 1  # stored verdicts of other versions followed other rules, and are ignored

Row = tuple[float, float]  # log-probability of a scored token, and of the most likely token there


class NotTakenError(Exception):
    """A kind of request that the endpoint rejects; the message describes the rejection."""


class Differing(Exception):
    """A difference between a context's log-probabilities and an echo's."""

    def __init__(self, difference: float) -> None:
        super().__init__(f"{difference:.2g}")
        self.difference = difference


def weight_of(rows: Sequence[Row]) -> tuple[float, bool]:
    """Returns the log-probability of a continuation, and True if each of its tokens is the most likely."""
    return sum(value for value, _ in rows), all(value == likeliest for value, likeliest in rows)


def largest_difference(rows: Sequence[Row], others: Sequence[Row]) -> float:
    """Returns the largest difference in nats between two results of a continuation; infinite if lengths differ."""
    if len(rows) != len(others):
        return math.inf
    return max((abs(a - b) for row, other in zip(rows, others, strict=True) for a, b in zip(row, other, strict=True)))


def labelled_rows(answer: Any, labels: Sequence[int]) -> dict[int, Row]:
    """Returns the token log-probs of labels behind a context, by token."""
    top = _at(answer, "choices", 0, "logprobs", "top_logprobs", 0)
    values: list[Any] = [top.get(f"{TOKEN_ID}{label}") for label in labels] if isinstance(top, dict) else []
    others = list(top.values()) if isinstance(top, dict) else []
    if not values or not all(map(_is_log_probability, (*values, *others))):
        raise Malformed("a label without a log-probability")
    likeliest = max(others)
    return {label: (value, likeliest) for label, value in zip(labels, values, strict=True)}


def prompt_rows(answer: Any, tokens: Sequence[int], start: int) -> list[Row] | None:
    """Returns the token log-probs from `start` on; None where the engine did not compute each of them."""
    rows = _at(answer, "prompt_logprobs")
    cached = _at(answer, "usage", "prompt_tokens_details", "cached_tokens")
    if not isinstance(rows, list) or (isinstance(cached, int) and cached >= start):
        return None
    if len(rows) > len(tokens):
        raise Malformed("more rows than the prompt has tokens")
    scored: list[Row] = []
    for place in range(start, len(tokens)):
        row = rows[place - len(tokens)] if len(tokens) - place <= len(rows) else None
        entries = row if isinstance(row, dict) else {}
        values = [_at(entry, "logprob") for entry in entries.values()]
        value = _at(entries, str(tokens[place]), "logprob")
        if value is None or not all(map(_is_log_probability, values)):
            return None
        scored.append((value, max(values)))
    return scored


def _at(value: Any, *keys: str | int) -> Any:
    for key in keys:
        try:
            value = value[key]
        except (LookupError, TypeError):
            return None
    return value


def _is_log_probability(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value <= ROUNDING


@dataclass(frozen=True)
class Trust:
    """Stored audits of an engine version, architecture and compute type.

    Without stored audits, the first contexts of an evaluation are scored both ways, before the others, and later 1 in
    100. A difference beyond rounding is stored for good: choices are scored by echo with that engine.
    """

    path: Path | None
    dtype: str

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> Trust:
        """Returns the store that a job names; nothing is stored without digests of engine and architecture."""
        about = [SCHEMA_VERSION, job["engine"], job["architecture"], job["dtype"]]
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
        known = job["engine"] and job["architecture"] and job["trust_folder"]
        return cls(Path(job["trust_folder"]) / f"{name}.json" if known else None, job["dtype"])

    @property
    def bound(self) -> float:
        return LARGEST_DIFFERENCES.get(self.dtype, 0.0)

    def recall(self) -> dict[str, Any]:
        """Returns the number of contexts `audited`, and the `reason` for distrust or None."""
        try:
            record = json.loads(self.path.read_bytes()) if self.path else {}
            return {"audited": int(record.get("audited", 0)), "reason": record.get("reason")}
        except (OSError, ValueError, TypeError, AttributeError):
            return {"audited": 0, "reason": None}

    def remember(self, audited: int, reason: str | None) -> None:
        """Adds the audits of an evaluation; if the folder is not writable, the next evaluation audits again."""
        before = self.recall()
        if self.path is None or before["reason"]:
            return
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps({"audited": before["audited"] + audited, "reason": reason}))
            unfinished.replace(self.path)
        except OSError:
            return


@dataclass
class Outcome:
    """The scoring method that was used for choices, for records."""

    way: str = ECHO
    audited: int = 0
    largest_difference: float | None = None
    reason: str | None = None


@dataclass
class Scorer:
    """Scores choices through the prefix cache, unless the endpoint rejects that or an audit fails.

    `ask` posts a body to a path and reads the answer, with retries; `echo` scores choices as the harness does,
    `echoed_at_once` per request. `kv_cache_tokens` is the cache's size, None if unknown.
    """

    model: str
    ask: Callable[[str, dict[str, Any], Callable[[Any], Any]], Awaitable[Any]]
    echo: Callable[[Sequence[Choice]], Awaitable[Sequence[Sequence[Row]]]]
    most_requests: int
    kv_cache_tokens: int | None
    trust: Trust
    longest_prompt: int
    echoed_at_once: int = 1
    on_weighed: Callable[[int], object] = lambda count: None
    outcome: Outcome = field(default_factory=Outcome)
    _remembered: int = 0  # audits of this evaluation that are already stored: batches add to them
    _choices: Sequence[Choice] = ()
    _rows: list[Sequence[Row]] = field(default_factory=list)

    async def weigh(self, choices: Sequence[Choice]) -> list[Sequence[Row]] | None:
        """Returns the token log-probs of all choices, in order; None, with a reason in `outcome`, to echo all."""
        known, self._remembered = self.trust.recall(), self.outcome.audited
        if known["reason"]:
            self.outcome.reason = known["reason"]
            return None
        self._choices, self._rows = choices, [()] * len(choices)
        short = {choice.context for choice in choices if self._costs_less_to_echo(choice)}
        fitting = [p for p, choice in enumerate(choices) if choice.context not in short and self._fits(choice)]
        if short and not fitting:
            self.outcome.reason = TOO_SHORT
            return None
        contexts = list(dict.fromkeys(choices[place].context for place in fitting))
        first = set(contexts[: max(0, FIRST_AUDITED - known["audited"])])
        later = {context for context in contexts if context not in first and _is_audited_later(context)}
        odd = sorted(set(range(len(choices))).difference(fitting))
        try:
            for part in (True, False):
                places = [place for place in fitting if (choices[place].context in first) is part]
                await self._weigh(places, audited=first if part else later)
            await self._each_echo(odd, self._set)
        except (Differing, NotTakenError) as finding:
            self._distrust(finding)
            return None
        self.trust.remember(self.outcome.audited - self._remembered, None)
        self.outcome.way = CACHED
        return self._rows

    def _fits(self, choice: Choice) -> bool:
        read = len(choice.context) + (len(choice.continuation) if len(choice.continuation) > 1 else 0)
        return bool(choice.context and choice.continuation) and read <= self.longest_prompt

    def _costs_less_to_echo(self, choice: Choice) -> bool:
        several = self.echoed_at_once > 1
        return several and len(choice.continuation) > 1 and len(choice.context) < LEAST_CONTEXT

    async def _weigh(self, places: Sequence[int], *, audited: set[tuple[int, ...]]) -> None:
        choices = self._choices
        first: dict[int, Row] = {}
        missing: list[int] = []

        async def ask(step: Step) -> None:
            path, body = step.request(self.model)
            if step.labels:
                labelled = await self.ask(path, body, lambda answer: labelled_rows(answer, step.labels))
                for place in step.choices:
                    first[place] = labelled[choices[place].continuation[0]]
                    if len(choices[place].continuation) == 1:
                        self._set(place, [first[place]])
                return
            tokens, start = (*step.context, *step.continuation), len(step.context) + 1
            rest = await self.ask(path, body, lambda answer: prompt_rows(answer, tokens, start))
            if rest is None:
                missing.extend(step.choices)
                return
            for place in step.choices:
                self._set(place, [first[place], *rest])

        most_added = self.kv_cache_tokens // CACHE_SHARE if self.kv_cache_tokens else None
        await in_order(plan(choices, places), ask, most_requests=self.most_requests, most_added=most_added)
        await self._each_echo(missing, self._set)
        compared = [place for place in places if choices[place].context in audited]
        self.outcome.audited += len({choices[place].context for place in compared})
        await self._each_echo(compared, self._compare)

    async def _each_echo(self, places: Sequence[int], take: Callable[[int, Sequence[Row]], None]) -> None:
        async def ask(step: Step) -> None:
            echoed = await self.echo([self._choices[place] for place in step.choices])
            for place, choice_rows in zip(step.choices, echoed, strict=True):
                take(place, choice_rows)

        starts = range(0, len(places), self.echoed_at_once)
        together = [tuple(places[start : start + self.echoed_at_once]) for start in starts]
        steps = [Step((), (), (), batch, None, 0) for batch in together]
        await in_order(steps, ask, most_requests=self.most_requests, most_added=None)

    def _set(self, place: int, choice_rows: Sequence[Row]) -> None:
        self._rows[place] = choice_rows
        self.on_weighed(1)

    def _compare(self, place: int, echoed: Sequence[Row]) -> None:
        difference = largest_difference(self._rows[place], echoed)
        self.outcome.largest_difference = max(self.outcome.largest_difference or 0.0, difference)
        if difference > self.trust.bound:
            raise Differing(difference)

    def _distrust(self, finding: Differing | NotTakenError) -> None:
        if isinstance(finding, NotTakenError):
            self.outcome.reason = f"the endpoint takes no requests to score from its prefix cache: {finding}"
            return
        kind = self.trust.dtype or "an unknown type"
        self.outcome.reason = (
            f"a log-probability from the prefix cache differed from an echo's by {finding} nats, "
            f"where {self.trust.bound:g} is rounding in {kind}"
        )
        self.trust.remember(self.outcome.audited - self._remembered, self.outcome.reason)


def _is_audited_later(context: Sequence[int]) -> bool:
    digest = hashlib.sha256(json.dumps(list(context)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % AUDITED_LATER == 0


BITS, PROBABILITY = "bpb", "choice_prob_norm"
HIGHER_IS_BETTER = {BITS: False, PROBABILITY: True}


def smooth_scores(log_likelihoods: Sequence[float], texts: Sequence[str], right: int) -> dict[str, float]:
    """Returns bits per byte of the right text, and its share of exp(-bits per byte) among all texts."""
    sizes = [max(1, len(text.encode())) for text in texts]
    bits = [-value / size / math.log(2) for value, size in zip(log_likelihoods, sizes, strict=True)]
    weights = [math.exp(min(bits) - value) for value in bits]
    return {BITS: bits[right], PROBABILITY: weights[right] / sum(weights)}
