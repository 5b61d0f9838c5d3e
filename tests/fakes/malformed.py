"""Answers with status 200 that are wrong: each kind is a function that changes an answer of completions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Choice = dict[str, Any]


def _each_value(change: Callable[[float], float | None]) -> Callable[[Choice], None]:
    def changed(choice: Choice) -> None:
        logprobs = choice.get("logprobs") or {}
        values = logprobs.get("token_logprobs") or []
        values[:] = [value if value is None else change(value) for value in values]
        for token in logprobs.get("content") or []:
            token["logprob"] = change(token["logprob"])

    return changed


def _rows(keep: slice) -> Callable[[Choice], None]:
    def changed(choice: Choice) -> None:
        for column in (choice.get("logprobs") or {}).values():
            column[:] = column[keep]

    return changed


def _last_row_twice(choice: Choice) -> None:
    for column in (choice.get("logprobs") or {}).values():
        column.extend(column[-1:])


def text_of(choice: Choice) -> str:
    """The text of a choice of a completion, or of a conversation."""
    return (choice["message"]["content"] if "message" in choice else choice["text"]) or ""


def set_text(choice: Choice, text: str | None) -> None:
    """Puts another text in its place."""
    if "message" in choice:
        choice["message"]["content"] = text
    else:
        choice["text"] = text


def _abort(choice: Choice) -> None:
    choice["finish_reason"] = "abort"
    set_text(choice, text_of(choice)[:-1])


OF_CHOICES: dict[str, Callable[[Choice], None]] = {
    "too few rows": _rows(slice(0, -1)),
    "too many rows": _last_row_twice,
    "only the last row": _rows(slice(-1, None)),
    "positive": _each_value(lambda value: -value),
    "all zero": _each_value(lambda value: 0.0),
    "null": _each_value(lambda value: None),
    "not a number": _each_value(lambda value: math.nan),
    "infinite": _each_value(lambda value: -math.inf),
    "no log-probabilities": lambda choice: choice.update(logprobs=None),
    "no text": lambda choice: set_text(choice, None),
    "aborted": _abort,
    "unknown finish": lambda choice: choice.update(finish_reason="because"),
    "no finish": lambda choice: choice.update(finish_reason=None),
}
"""Kinds that change each choice by itself."""
OF_ANSWERS = ("another prompt", "indices swapped", "indices repeated", "no choices", "one choice too few", "too many")
KINDS = (*OF_CHOICES, *OF_ANSWERS)


def malformed(kind: str, answer: dict[str, Any], *, other: dict[str, Any]) -> dict[str, Any]:
    """An answer of one kind of malformation.

    Args:
        kind: one of `KINDS`.
        answer: a right one, which is changed.
        other: the answer to other prompts of the same length.
    """
    choices = answer["choices"]
    match kind:
        case "another prompt":
            choices = other["choices"]
        case "indices swapped":
            for number, choice in enumerate(reversed(choices)):
                choice["index"] = number
        case "indices repeated":
            for choice in choices:
                choice["index"] = len(choices) - 1
        case "no choices":
            choices = []
        case "one choice too few":
            choices = choices[:-1]
        case "too many":
            choices = [*choices, {**choices[-1], "index": len(choices)}]
        case _:
            for choice in choices:
                OF_CHOICES[kind](choice)
    return {**answer, "choices": choices}
