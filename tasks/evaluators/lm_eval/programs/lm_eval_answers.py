"""Validates an endpoint's answers for `lm_eval_model.py`, and reads how each ended. Standard library only.

lm-eval itself would score too few token log-probs, those of another prompt, or choices without an index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from typing import Any

from choice_scoring import TOKEN_ID
from valid_answers import COLUMNS, Malformed

ENDS = ("stop", "length", "content_filter", "tool_calls", "function_call", "eos", "eos_token", "stop_sequence")
"""Finish reasons of a whole answer; with others, such as abort and error, it was cut."""
REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<reasoning>", "</reasoning>"))
MOST_ABOVE_ZERO = 1e-4  # rounding: float32 resolves logits of 1000 to 6e-5
FEWEST_ZEROS = 3  # fewer tokens may all be certain
BUILD = ("datasets", "torch", "transformers")
Choice = dict[str, Any]
Reader = Callable[[list[int]], Iterable[str]]


@dataclass(frozen=True)
class Written:
    """A generated answer; `text` is None if there is none."""

    text: str | None
    finish: str | None
    closed: bool = True  # False if reasoning began and never ended
    tokens: int | None = None  # None if the endpoint counts those of several answers together


def choices_of(answer: Any, count: int) -> list[Choice]:
    """Returns the choices of an answer in the order of the prompts."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise Malformed("no list of choices")
    indices = [choice.get("index") for choice in choices]
    if any(type(index) is not int for index in indices) or sorted(indices) != list(range(count)):
        raise Malformed(f"choices {indices}, where {count} prompts were asked")
    return sorted(choices, key=lambda choice: choice["index"])


def _check_end(choice: Choice) -> None:
    if (end := choice.get("finish_reason")) not in ENDS:
        raise Malformed(f"a finish_reason {str(end)[:40]!r}")


def generated_tokens(answer: Any) -> int | None:
    """Returns the tokens generated for all choices of an answer; None if it does not report them."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int else None


def weighed_rows(
    choice: Choice, asked: Sequence[int], start: int, *, sent: int, read: Reader
) -> list[tuple[float, float]]:
    """Returns the log-probability of each token of `asked[start:]`, with that of the most likely token at its position.

    Args:
        choice: echo of a prompt, with a generated token.
        asked: tokens to score, with those before them.
        start: index of the first token that counts.
        sent: tokens in the prompt; the last token of `asked` may have been forced instead.
        read: texts of tokens, with and without special tokens, for endpoints that echo texts.
    """
    _check_end(choice)
    rows = choice.get("logprobs")
    columns = [rows.get(name) if isinstance(rows, dict) else None for name in COLUMNS]
    tokens, values, tops = [column if isinstance(column, list) else [] for column in columns]
    if not len(tokens) == len(values) == len(tops) == sent + 1:
        raise Malformed(f"{len(values)} log-probabilities, where a prompt of {sent} tokens was sent")
    if not all(isinstance(value, int | float) for value in values[1:]):
        raise Malformed("a token without a log-probability")
    if any(value > MOST_ABOVE_ZERO and math.isfinite(value) for value in values[1:]):
        raise Malformed("a log-probability above 0")
    if sent >= FEWEST_ZEROS and not any(values[1:]):
        raise Malformed("log-probabilities that are all 0")
    _check_tokens(choice, [str(token) for token in tokens], asked, sent=sent, read=read)
    scored = list(zip(values, tops, strict=True))[start : len(asked)]
    likeliest = [max(top.values()) if isinstance(top, dict) and top else None for _, top in scored]
    if None in likeliest:
        raise Malformed("a position without its most likely token")
    return [(value, best) for (value, _), best in zip(scored, likeliest, strict=True) if best is not None]


def _check_tokens(choice: Choice, tokens: list[str], asked: Sequence[int], *, sent: int, read: Reader) -> None:
    if all(token.startswith(TOKEN_ID) for token in tokens):
        if tokens[: len(asked)] != [f"{TOKEN_ID}{token}" for token in asked]:
            raise Malformed("an echo of other tokens than were sent")
        return
    if sent < len(asked):
        raise Malformed("no ids of tokens, so that the generated token is unknown")
    echoed = choice.get("text")
    if isinstance(echoed, str) and not any(_plain(echoed).startswith(_plain(text)) for text in read(list(asked))):
        raise Malformed("an echo of another text than was sent")


def _plain(text: str) -> str:
    return "".join(character for character in text if character.isascii() and character.isalnum())


def written(choice: Choice, *, prompt: str, stops: Sequence[str]) -> Written:
    """Returns the text of a choice of either endpoint, up to the first of all stop strings.

    Args:
        prompt: text before it, or its end; it may have opened reasoning.
        stops: all stop strings; the endpoint may have received only some.
    """
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    reasoned = message.get("reasoning_content") or message.get("reasoning") if isinstance(message, dict) else None
    end = choice.get("finish_reason")
    text = "" if text is None and reasoned else text  # an answer that is all reasoning
    if not isinstance(text, str):
        return Written(None, end if isinstance(end, str) else None, closed=not reasoned)
    _check_end(choice)
    places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    whole = _is_closed(text, prompt) and not (reasoned and not text)
    return Written(text[: min(places)], "stop", whole) if places else Written(text, end, whole)


def _is_closed(text: str, prompt: str) -> bool:
    for begin, end in REASONING:
        begun = text.rfind(begin) if begin in text else 0 if prompt.rstrip().endswith(begin) else -1
        if begun >= 0 and end not in text[begun:]:
            return False
    return True


def installed() -> dict[str, str]:
    """Returns versions of libraries that a score can depend on, besides the harness itself."""
    versions = {name: distribution.version for name in BUILD for distribution in Distribution.discover(name=name)}
    return dict(sorted(versions.items()))
