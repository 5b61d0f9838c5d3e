"""Log-probabilities of continuations for the price of one reading of what they have in common.

An echo with log-probabilities makes an engine read each choice whole, past its prefix cache. Here each *context* is
asked once, for the log-probabilities of the first tokens of all its choices, which leaves it in the cache; then the
rest of each longer choice is read from there: `choice_plan.py` says in which order.

An engine that reads its cache has no rows for what it finds there: they are missing at the beginning. So a row counts
by its distance from the prompt's end, behind the tokens that the answer names as cached, if it holds its token with a
value that can be one. A choice that lacks one is echoed. A share of contexts is asked both ways: see `Trust`.

For programs that drive harnesses, each in its own environment: standard library only.
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

CACHED, ECHO = "prefix cache", "echo"
"""The ways of asking, as records name them."""
LEAST_CONTEXT = 64
"""Tokens of a context for which a longer choice is asked by way of the cache, where several are echoed at once.

A shorter one is read again with each of its choices, many in one request, for less than a request of its own costs.
"""
TOO_SHORT = f"choices of several tokens behind fewer than {LEAST_CONTEXT} cost less to echo"
CACHE_SHARE = 2
"""Requests in flight together add at most this part of the cache to it, since what they share lies there as well."""
ROUNDING = 1e-6
"""A log-probability may be above 0 by this much."""
TOKEN_ID = "token_id:"
FIRST_AUDITED, AUDITED_LATER = 20, 100
"""Contexts that are asked both ways where an engine is new, and afterwards one in so many."""
LARGEST_DIFFERENCES = {"float32": 1e-4, "float16": 0.03125, "bfloat16": 0.25}
"""Largest difference in nats of a token's log-probability that is rounding, by the type that the engine computes in.

Two steps of a logit between 16 and 32, where those of real models lie, for the two short types: parts of a prompt that
are read in other batches are added up in another order, which moves a logit to its neighbour. Steps of a float32 are
2e-6 there, and sums over some thousand products differ by more; 2e-6 was measured. A row of another text differs by
whole nats, as a rule. A type without a bound has to agree exactly.
"""
SCHEMA_VERSION = 1
"""Verdicts of other versions were reached by other rules, and are not read."""

Row = tuple[float, float]
"""Log-probability of a token that is weighed, and of the likeliest one in its place."""


class UnreadableAnswerError(Exception):
    """An answer that is none to what was asked; says what is wrong with it, and quotes nothing."""


class NotTakenError(Exception):
    """A way of asking that the endpoint refuses; says how."""


class Differing(Exception):
    """A context that weighs something else where it is echoed."""

    def __init__(self, difference: float) -> None:
        super().__init__(f"{difference:.2g}")
        self.difference = difference


def weight_of(rows: Sequence[Row]) -> tuple[float, bool]:
    """Log-probability of a continuation, and whether each of its tokens is the likeliest."""
    return sum(value for value, _ in rows), all(value == likeliest for value, likeliest in rows)


def largest_difference(rows: Sequence[Row], others: Sequence[Row]) -> float:
    """The largest difference between two readings, of tokens or of the likeliest ones; infinite for other lengths."""
    if len(rows) != len(others):
        return math.inf
    return max((abs(a - b) for row, other in zip(rows, others, strict=True) for a, b in zip(row, other, strict=True)))


def labelled_rows(answer: Any, labels: Sequence[int]) -> dict[int, Row]:
    """Rows of labels behind a context, by token."""
    top = _at(answer, "choices", 0, "logprobs", "top_logprobs", 0)
    values = [top.get(f"{TOKEN_ID}{label}") for label in labels] if isinstance(top, dict) else []
    others = list(top.values()) if isinstance(top, dict) else []
    if not values or not all(map(_is_log_probability, (*values, *others))):
        raise UnreadableAnswerError("a label without a log-probability")
    likeliest = max(others)
    return {label: (value, likeliest) for label, value in zip(labels, values, strict=True)}


def prompt_rows(answer: Any, tokens: Sequence[int], start: int) -> list[Row] | None:
    """Rows of the tokens from `start` on; None where the engine did not compute each of them."""
    rows = _at(answer, "prompt_logprobs")
    cached = _at(answer, "usage", "prompt_tokens_details", "cached_tokens")
    if not isinstance(rows, list) or (isinstance(cached, int) and cached >= start):
        return None
    if len(rows) > len(tokens):
        raise UnreadableAnswerError("more rows than the prompt has tokens")
    found: list[Row] = []
    for place in range(start, len(tokens)):
        row = rows[place - len(tokens)] if len(tokens) - place <= len(rows) else None
        entries = row if isinstance(row, dict) else {}
        values = [_at(entry, "logprob") for entry in entries.values()]
        value = _at(entries, str(tokens[place]), "logprob")
        if value is None or not all(map(_is_log_probability, values)):
            return None
        found.append((value, max(values)))
    return found


def _at(found: Any, *keys: str | int) -> Any:
    for key in keys:
        try:
            found = found[key]
        except (LookupError, TypeError):
            return None
    return found


def _is_log_probability(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value <= ROUNDING


@dataclass(frozen=True)
class Trust:
    """The memory of audits, for one build of an engine, one architecture and one type that it computes in.

    Where nothing is remembered, the first contexts of an evaluation are asked both ways, before the others, and later
    one in a hundred. A difference beyond rounding is remembered for good: that engine is asked by echo.
    """

    path: Path | None
    dtype: str

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> Trust:
        """The memory that a job names; without digests of engine and architecture, nothing is remembered."""
        about = [SCHEMA_VERSION, job["engine"], job["architecture"], job["dtype"]]
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]
        known = job["engine"] and job["architecture"] and job["trust_folder"]
        return cls(Path(job["trust_folder"]) / f"{name}.json" if known else None, job["dtype"])

    @property
    def bound(self) -> float:
        """Largest difference that is rounding, in nats."""
        return LARGEST_DIFFERENCES.get(self.dtype, 0.0)

    def recall(self) -> dict[str, Any]:
        """The number of contexts `audited`, and the `reason` not to trust, if there is one."""
        try:
            found = json.loads(self.path.read_bytes()) if self.path else {}
            return {"audited": int(found.get("audited", 0)), "reason": found.get("reason")}
        except (OSError, ValueError, TypeError, AttributeError):
            return {"audited": 0, "reason": None}

    def remember(self, audited: int, reason: str | None) -> None:
        """Adds what an evaluation has found. A folder that cannot be written to costs the next one an audit."""
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
    """The way in which choices were asked: for records."""

    way: str = ECHO
    audited: int = 0
    largest_difference: float | None = None
    reason: str | None = None


@dataclass
class Scorer:
    """Weighs choices by way of the cache; raises `NotTakenError` and `Differing` where they have to be echoed.

    `ask` sends a body to a path and reads the answer, as often as the program tries, and `echo` weighs choices as the
    harness does, `echoed_at_once` in a request. `kv_cache_tokens` is the cache's size, None where it is not known.
    """

    model: str
    ask: Callable[[str, dict[str, Any], Callable[[Any], Any]], Awaitable[Any]]
    echo: Callable[[Sequence[Choice]], Awaitable[Sequence[Sequence[Row]]]]
    most_requests: int
    kv_cache_tokens: int | None
    trust: Trust
    longest_prompt: int
    echoed_at_once: int = 1
    on_weighed: Callable[[int], None] = lambda count: None
    outcome: Outcome = field(default_factory=Outcome)
    _remembered: int = 0
    """Audits of this evaluation that the memory knows by now: choices may be weighed in several batches."""

    async def weigh(self, choices: Sequence[Choice]) -> list[Sequence[Row]] | None:
        """Rows of all choices, in their order; None if they all have to be echoed, for the reason in `outcome`."""
        known, self._remembered = self.trust.recall(), self.outcome.audited
        if known["reason"]:
            self.outcome.reason = known["reason"]
            return None
        rows: list[Sequence[Row]] = [()] * len(choices)
        short = {choice.context for choice in choices if self._costs_less_to_echo(choice)}
        fitting = [p for p, choice in enumerate(choices) if choice.context not in short and self._fits(choice)]
        if short and not fitting:
            self.outcome.reason = TOO_SHORT
            return None
        contexts = list(dict.fromkeys(choices[place].context for place in fitting))
        first = set(contexts[: max(0, FIRST_AUDITED - known["audited"])])
        later = {context for context in contexts if context not in first and is_audited_later(context)}
        odd = sorted(set(range(len(choices))).difference(fitting))
        try:
            for part in (True, False):
                places = [place for place in fitting if (choices[place].context in first) is part]
                await self._weigh(choices, places, rows, audited=first if part else later)
            await self._echo(choices, odd, rows)
        except (Differing, NotTakenError) as finding:
            self._distrust(finding)
            return None
        self.trust.remember(self.outcome.audited - self._remembered, None)
        self.outcome.way = CACHED
        return rows

    def _fits(self, choice: Choice) -> bool:
        read = len(choice.context) + (len(choice.continuation) if len(choice.continuation) > 1 else 0)
        return bool(choice.context and choice.continuation) and read <= self.longest_prompt

    def _costs_less_to_echo(self, choice: Choice) -> bool:
        several = self.echoed_at_once > 1
        return several and len(choice.continuation) > 1 and len(choice.context) < LEAST_CONTEXT

    async def _weigh(
        self,
        choices: Sequence[Choice],
        places: Sequence[int],
        rows: list[Sequence[Row]],
        *,
        audited: set[tuple[int, ...]],
    ) -> None:
        first: dict[int, Row] = {}
        missing: list[int] = []

        async def ask(step: Step) -> None:
            path, body = step.request(self.model)
            if step.labels:
                labelled = await self.ask(path, body, lambda answer: labelled_rows(answer, step.labels))
                for place in step.choices:
                    first[place] = labelled[choices[place].continuation[0]]
                    if len(choices[place].continuation) == 1:
                        self._set(rows, place, [first[place]])
                return
            tokens, start = (*step.context, *step.continuation), len(step.context) + 1
            found = await self.ask(path, body, lambda answer: prompt_rows(answer, tokens, start))
            if found is None:
                missing.extend(step.choices)
                return
            for place in step.choices:
                self._set(rows, place, [first[place], *found])

        most_added = self.kv_cache_tokens // CACHE_SHARE if self.kv_cache_tokens else None
        await in_order(plan(choices, places), ask, most_requests=self.most_requests, most_added=most_added)
        await self._echo(choices, missing, rows)
        compared = [place for place in places if choices[place].context in audited]
        self.outcome.audited += len({choices[place].context for place in compared})
        await self._each_echo(choices, compared, lambda place, echoed: self._compare(rows[place], echoed))

    async def _echo(self, choices: Sequence[Choice], places: Sequence[int], rows: list[Sequence[Row]]) -> None:
        await self._each_echo(choices, places, lambda place, echoed: self._set(rows, place, echoed))

    async def _each_echo(
        self, choices: Sequence[Choice], places: Sequence[int], take: Callable[[int, Sequence[Row]], None]
    ) -> None:
        async def ask(step: Step) -> None:
            echoed = await self.echo([choices[place] for place in step.choices])
            for place, found in zip(step.choices, echoed, strict=True):
                take(place, found)

        starts = range(0, len(places), self.echoed_at_once)
        together = [tuple(places[start : start + self.echoed_at_once]) for start in starts]
        steps = [Step((), (), (), batch, None, 0) for batch in together]
        await in_order(steps, ask, most_requests=self.most_requests, most_added=None)

    def _set(self, rows: list[Sequence[Row]], place: int, found: Sequence[Row]) -> None:
        rows[place] = found
        self.on_weighed(1)

    def _compare(self, found: Sequence[Row], echoed: Sequence[Row]) -> None:
        difference = largest_difference(found, echoed)
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


def is_audited_later(context: Sequence[int]) -> bool:
    """Tells if a context is among those that are asked both ways for good: by its tokens, so the same in every run."""
    digest = hashlib.sha256(json.dumps(list(context)).encode()).digest()
    return int.from_bytes(digest[:8], "big") % AUDITED_LATER == 0
