"""Answers of external endpoints, validated against their requests inside a harness."""

from __future__ import annotations

import runpy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import tasks
from fakes.engine_answers import chat_prompt, completions_of, prompts_of
from fakes.malformed import KINDS, malformed

PROGRAM = runpy.run_path(str(Path(tasks.__path__[0]) / "evaluators" / "programs" / "valid_answers.py"))
check, Malformed, LostInARow = PROGRAM["check"], PROGRAM["Malformed"], PROGRAM["LostInARow"]

refusal_of = PROGRAM["refusal_of"]

SCORED = {"prompt": "Once upon", "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
GENERATION = {"prompt": "Once", "max_tokens": 9, "n": 2, "logprobs": 1, "temperature": 0}
CONVERSATION = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "max_tokens": 9}
OF_CHOICES = ("aborted", "unknown finish", "indices repeated", "no choices", "a choice too few", "too many")
OF_ROWS = ("too few rows", "only the last row", "positive", "not a number", "infinite", "no log-probabilities")


def answered(asked: dict[str, Any], *, turned: bool = False) -> dict[str, Any]:
    """Returns the fake engine's answer, or its answer to the reversed prompt."""
    chat = "messages" in asked
    prompts = [chat_prompt(asked["messages"])] if chat else prompts_of(asked["prompt"])
    asked = {**asked, "prompt": None}
    made = completions_of("w", [prompt[::-1] if turned else prompt for prompt in prompts], asked, chat=chat)
    usage = {"prompt_tokens": made[0].prompt_tokens, "completion_tokens": sum(len(choice.made) for choice in made)}
    return {"choices": [choice.choice for choice in made], "usage": usage}


@pytest.mark.parametrize(
    "asked", [SCORED, {**SCORED, "max_tokens": 1}, GENERATION, CONVERSATION, {**GENERATION, "n": 1}]
)
def test_right_answer_passes(asked: dict[str, Any]) -> None:
    check(asked, answered(asked))
    check(asked, {"choices": list(reversed(answered(asked)["choices"]))})


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        *((SCORED, kind) for kind in KINDS if kind not in ("indices swapped", "indices repeated")),
        *((GENERATION, kind) for kind in (*OF_CHOICES, *OF_ROWS, "no text")),
        *((CONVERSATION, kind) for kind in OF_CHOICES),
    ],
)
def test_malformed_answer_is_an_error(asked: dict[str, Any], kind: str) -> None:
    answer = malformed(kind, answered(asked), other=answered(asked, turned=True))
    with pytest.raises((Malformed, ValueError, TypeError, AttributeError, LookupError)):
        check(asked, answer)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            '{"error": {"message": "stop cannot contain an empty string", "code": 400}}',
            "stop cannot contain an empty string",
        ),
        ({"message": "too long", "code": 400}, "too long"),
        ('{"detail": [{"msg": "no"}, {"msg": "too long", "input": "the prompt"}]}', "no; too long"),
        ("not json" * 99, ("not json" * 99)[:300]),
        ("[" * 9, "[" * 9),
    ],
)
def test_refusal_quotes_the_endpoint_but_no_prompt(body: Any, words: str) -> None:
    assert refusal_of(body) == words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ReadTimeout("timed out"), "ReadTimeout: timed out"),
        (ConnectionResetError("reset"), "ConnectionResetError: reset"),
        (KeyError("the prompt"), "KeyError"),
        (ValueError("no verdict in: the answer"), "ValueError"),
    ],
)
def test_description_of_an_error_quotes_neither_prompt_nor_answer(error: Exception, words: str) -> None:
    assert PROGRAM["described"](error) == words


@pytest.mark.parametrize(
    ("body", "text", "halves"),
    [
        (rb'{"text": "\ud83d\ude00"}', "\U0001f600", 0),
        (rb'{"text": "\ud83d x \uDE00"}', "\ufffd x \ufffd", 2),
        (b'{"text": "\xed\xa0\xbd"}', "\ufffd", 1),  # bytes of half a character, as some servers write it
    ],
)
def test_halves_of_surrogate_pairs_are_replaced(body: bytes, text: str, halves: int) -> None:
    assert PROGRAM["parsed"](body) == ({"text": text}, halves)


def test_row_of_lost_requests_goes_on_after_late_answers_and_ends_with_those_to_later_requests() -> None:
    row = LostInARow()
    early, other = row.begin(), row.begin()
    assert [row.lose(), row.lose()] == [1, 2]
    row.answered(early)
    assert row.lose() == 3, "its request was sent before the first loss"
    later = row.begin()
    row.answered(later)
    assert row.lose() == 1
    for mark in (other, later):  # sent before this row, too
        row.answered(mark)
    assert row.lose() == 2


def test_losses_of_several_threads_are_each_counted_once() -> None:
    row = LostInARow()

    def trace(*_: Any) -> Any:
        time.sleep(0.0)  # lets another thread go on between any two lines
        return trace

    with ThreadPoolExecutor(4, initializer=sys.settrace, initargs=(trace,)) as executor:
        counts = list(executor.map(lambda _: row.lose(), range(400)))
    assert sorted(counts) == list(range(1, 401))
