"""Wrong answers with status 200: each kind is a function that changes a completion response."""

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
    return (choice["message"]["content"] if "message" in choice else choice["text"]) or ""


def set_text(choice: Choice, text: str | None) -> None:
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
"""Kinds that change each choice independently."""
OF_ANSWERS = ("another prompt", "indices swapped", "indices repeated", "no choices", "a choice too few", "too many")
KINDS = (*OF_CHOICES, *OF_ANSWERS)


def malformed(kind: str, answer: dict[str, Any], *, other: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer with a kind of malformation.

    Args:
        answer: a right answer, changed in place.
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
        case "a choice too few":
            choices = choices[:-1]
        case "too many":
            choices = [*choices, {**choices[-1], "index": len(choices)}]
        case _:
            for choice in choices:
                OF_CHOICES[kind](choice)
    return {**answer, "choices": choices}


def _each_row(change: Callable[[float], float | None]) -> Callable[[dict[str, Any]], None]:
    def changed(answer: dict[str, Any]) -> None:
        for row in filter(None, answer["prompt_logprobs"]):
            for alternative in row.values():
                alternative["logprob"] = change(alternative["logprob"])

    return changed


def _other_tokens(answer: dict[str, Any]) -> None:
    rows = answer["prompt_logprobs"]
    rows[1:] = [{str(int(token) + 1): value for token, value in row.items()} for row in rows[1:]]


def _of_each_choice(change: Callable[[Choice], Any]) -> Callable[[dict[str, Any]], None]:
    def changed(answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            change(choice)

    return changed


OF_TOKENS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "last row missing": lambda answer: answer["prompt_logprobs"].pop(),
    "row in the middle missing": lambda answer: answer["prompt_logprobs"].pop(len(answer["prompt_logprobs"]) // 2 + 1),
    "row too many": lambda answer: answer["prompt_logprobs"].extend(answer["prompt_logprobs"][-1:]),
    "rows of other tokens": _other_tokens,
    "no rows": lambda answer: answer.update(prompt_logprobs=None),
    "empty rows": lambda answer: answer.update(prompt_logprobs=[]),
    "a row of the first token": lambda answer: answer["prompt_logprobs"].__setitem__(0, {}),
    "positive rows": _each_row(lambda value: -value),
    "all rows zero": _each_row(lambda value: 0.0),
    "rows of nothing": _each_row(lambda value: None),
    "no numbers": _each_row(lambda value: math.nan),
    "no tokens": _of_each_choice(lambda choice: choice.update(token_ids=None)),
    "token too few": _of_each_choice(lambda choice: choice["token_ids"].pop()),
    "cut off": _of_each_choice(lambda choice: choice.update(finish_reason="abort")),
    "choice too many": lambda answer: answer["choices"].append({**answer["choices"][-1], "index": 1}),
    "prompt of another length": lambda answer: answer["usage"].update(prompt_tokens=1),
}
"""Kinds that change an answer of token ids."""


def malformed_tokens(kind: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Changes an answer of token ids into a kind of `OF_TOKENS`."""
    OF_TOKENS[kind](answer)
    return answer
