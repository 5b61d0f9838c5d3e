"""Plans and sends the requests that score choices through an engine's prefix cache, for `choice_scoring.py`.

The order is that of a tree, depth first: a context waits for another context with the same beginning, so that the
shared part is computed once, and used before it is evicted. Standard library only.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
LEAST_SHARED = 64
"""Minimum shared tokens for a context to wait for another: computing fewer costs less than waiting."""
MOST_LABELS = 128  # tokens that vLLM scores by id in a request


@dataclass(frozen=True)
class Choice:
    """Tokens to score, and the tokens before them."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A request: a context with labels to score behind it, or a whole choice without labels.

    Scores the choices at indexes `choices`, follows the step `after`, and adds `added` tokens to the cache.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    labels: tuple[int, ...]
    choices: tuple[int, ...]
    after: int | None
    added: int

    def request(self, model: str) -> tuple[str, dict[str, Any]]:
        """Returns path and body; resets default penalties, so that the generated token is the most likely."""
        plain = {"temperature": 0, "max_tokens": 1, "repetition_penalty": 1.0}
        plain |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        if self.labels:
            labels = {"logprobs": len(self.labels), "logprob_token_ids": list(self.labels)}
            whole = {"model": model, "prompt": list(self.context), "return_tokens_as_token_ids": True}
            return COMPLETIONS, {**whole, **plain, **labels}
        rows = {"prompt_logprobs": 1, "skip_reading_prefix_cache": False, "detokenize": False}
        tokens = [*self.context, *self.continuation]
        return GENERATE, {"model": model, "token_ids": tokens, "sampling_params": {**plain, **rows}}


def plan(choices: Sequence[Choice], places: Iterable[int]) -> list[Step]:
    """Returns the requests that score the choices at these indexes, in the order of sending if none waits."""
    by_context: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for place in places:
        by_context[choices[place].context][choices[place].continuation].append(place)
    contexts = sorted(by_context)
    steps: list[Step] = []
    first_steps: list[int] = []
    for context, (leader, shared) in zip(contexts, _leaders(contexts), strict=True):
        continuations = by_context[context]
        labels = sorted({continuation[0] for continuation in continuations})
        after, added = None if leader is None else first_steps[leader], len(context) - shared
        first_steps.append(len(steps))
        for start in range(0, len(labels), MOST_LABELS):
            weighed = tuple(labels[start : start + MOST_LABELS])
            of = tuple(place for name, each in continuations.items() if name[0] in weighed for place in each)
            steps.append(Step(context, (), weighed, of, after, added))
            after, added = first_steps[-1], 1
        for continuation, each in continuations.items():
            if len(continuation) > 1:
                steps.append(Step(context, continuation, (), tuple(each), first_steps[-1], len(continuation)))
    return steps


def _leaders(contexts: Sequence[tuple[int, ...]]) -> list[tuple[int | None, int]]:
    leaders: list[tuple[int | None, int]] = [(None, 0)] if contexts else []
    open_runs: list[tuple[int, int]] = []  # depth that a run's contexts share, and its first context
    for place, (before, context) in enumerate(pairwise(contexts), start=1):
        shared = _shared(before, context)
        depth, leader = shared // LEAST_SHARED, place - 1
        while open_runs and open_runs[-1][0] >= depth:
            leader = open_runs.pop()[1]
        if depth:
            open_runs.append((depth, leader))
        leaders.append((leader, shared) if depth else (None, 0))
    return leaders


def _shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    low, high = 0, min(len(tokens), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens[low:middle] == others[low:middle] else (low, middle - 1)
    return low


async def in_order(
    steps: Sequence[Step], ask: Callable[[Step], Awaitable[None]], *, most_requests: int, most_added: int | None
) -> None:
    """Sends all steps, each after the step that it depends on, lower indexes first.

    Args:
        ask: sends a step; its exception ends all.
        most_requests: in flight together.
        most_added: tokens that requests in flight may add to the cache together; a single request may add more.
    """
    waiting: dict[int | None, list[int]] = defaultdict(list)
    for place, step in enumerate(steps):
        waiting[step.after].append(place)
    ready = waiting.pop(None, [])
    running: dict[asyncio.Future[None], int] = {}
    try:
        while ready or running:
            adding = sum(steps[place].added for place in running.values())
            while ready and len(running) < most_requests:
                added = steps[ready[0]].added
                if running and most_added is not None and adding + added > most_added:
                    break
                adding += added
                place = heapq.heappop(ready)
                running[asyncio.ensure_future(ask(steps[place]))] = place
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = running.pop(task)
                task.result()
                for follower in waiting.pop(place, ()):
                    heapq.heappush(ready, follower)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
