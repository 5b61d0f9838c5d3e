"""Answers as read by the client of lm-eval: each malformed answer used to be scored."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

import tasks
from fakes.engine_answers import completions_of, prompts_of
from fakes.malformed import KINDS, malformed

with pytest.MonkeyPatch.context() as patch:
    for folder in ("programs", "lm_eval/programs"):
        patch.syspath_prepend(Path(tasks.__path__[0]) / "evaluators" / folder)
    program: Any = importlib.import_module("lm_eval_answers")
COUNTED_LATER = ("no text", "not a number", "infinite")
PROMPTS = [[*b"A triangle has three"], [*b"A triangle has seven"]]
START = len(b"A triangle has")


def answer(*, ids: bool = True, prompts: list[list[int]] = PROMPTS) -> dict[str, Any]:
    """Returns an engine's answer to a request for log-probabilities of prompts."""
    fields = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    fields["return_tokens_as_token_ids"] = ids
    return {"choices": [made.choice for made in completions_of("w0", prompts_of(prompts), fields, chat=False)]}


def weigh_rows(*given: Any, **options: Any) -> tuple[float, bool]:
    rows = program.weighed_rows(*given, **options)
    return sum(value for value, _ in rows), all(value == best for value, best in rows)


def weigh(content: Any, *, prompts: list[list[int]] = PROMPTS) -> list[tuple[float, bool]]:
    def read(tokens: list[int]) -> list[str]:
        return [bytes(tokens).decode()]

    choices = program.choices_of(content, len(prompts))
    return [
        weigh_rows(choice, asked, START, sent=len(asked), read=read)
        for choice, asked in zip(choices, prompts, strict=True)
    ]


def rows_of(content: dict[str, Any]) -> dict[str, list[Any]]:
    return content["choices"][0]["logprobs"]


@pytest.mark.parametrize("ids", [True, False], ids=["named by ids", "named by texts"])
@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind not in COUNTED_LATER), "no likeliest tokens"])
def test_malformed_log_probabilities_are_no_answer(kind: str, ids: bool):
    content = answer(ids=ids)
    assert all(weight < 0 for weight, _ in weigh(content))
    if kind == "no likeliest tokens":
        rows_of(content)["top_logprobs"] = [None] * len(rows_of(content)["tokens"])
    else:
        content = malformed(kind, content, other=answer(ids=ids, prompts=PROMPTS[::-1]))
    with pytest.raises(program.Malformed):
        weigh(content)


@pytest.mark.parametrize("content", [None, [], {}, {"choices": None}, {"choices": [None, None]}])
def test_malformed_answer_without_choices_is_no_answer(content: Any):
    with pytest.raises(program.Malformed, match="choices"):
        weigh(content)


def test_numbers_that_are_none_pass_as_such_and_are_counted_later():
    for number in (math.nan, -math.inf):
        content = answer()
        rows_of(content)["token_logprobs"][START] = number
        (weight, _), _ = weigh(content)
        assert not math.isfinite(weight)


def test_log_probability_rounded_above_zero_is_accepted():
    content = answer()
    rows_of(content)["token_logprobs"][START] = 1e-6
    weigh(content)


def test_token_that_was_generated_by_order_is_weighed_like_one_of_the_prompt():
    whole = answer(prompts=PROMPTS[:1])
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "return_tokens_as_token_ids": True}
    shorter = [PROMPTS[0][:-1]]
    fields |= {"prompt": shorter, "allowed_token_ids": PROMPTS[0][-1:]}
    [made] = completions_of("w0", prompts_of(shorter), fields, chat=False)
    asked = PROMPTS[0]
    forced = weigh_rows(made.choice, asked, START, sent=len(asked) - 1, read=lambda tokens: [])
    assert [forced] == weigh(whole, prompts=PROMPTS[:1])
    unnamed = {**made.choice, "logprobs": {**made.choice["logprobs"], "tokens": ["a"] * len(asked)}}
    with pytest.raises(program.Malformed, match="generated"):
        weigh_rows(unnamed, asked, START, sent=len(asked) - 1, read=lambda tokens: [])


def written(choice: dict[str, Any], *, prompt: str = "", stops: tuple[str, ...] = ()) -> Any:
    return program.written(choice, prompt=prompt, stops=stops)


@pytest.mark.parametrize("end", ["abort", "error", None, "", 7])
def test_text_that_was_cut_is_no_answer(end: Any):
    with pytest.raises(program.Malformed, match="finish_reason"):
        written({"text": "four", "finish_reason": end})


def test_text_is_cut_at_the_first_of_all_stops_and_has_then_ended_by_itself():
    answer = written({"text": "first two three", "finish_reason": "length"}, stops=("three", " two", ""))
    assert (answer.text, answer.finish) == ("first", "stop")


def test_missing_text_stays_missing():
    assert written({"text": None}).text is None
    assert written({"message": {"content": None}, "finish_reason": "length"}).text is None


@pytest.mark.parametrize(
    ("text", "prompt", "closed"),
    [
        ("<think>because", "", False),
        ("<think>because</think> four", "", True),
        ("because", "assistant: <think>\n", False),
        ("because</think> four", "assistant: <think>\n", True),
        ("four", "<think>", False),
        ("four", "think", True),
        ("<think>a</think><think>b", "", False),
    ],
)
def test_reasoning_that_never_closes_is_reported(text: str, prompt: str, closed: bool):
    assert written({"text": text, "finish_reason": "stop"}, prompt=prompt).closed is closed


def test_reasoning_apart_from_an_empty_answer_never_closed():
    message = {"content": None, "reasoning_content": "because"}
    answer = written({"message": message, "finish_reason": "length"})
    assert (answer.text, answer.finish, answer.closed) == ("", "length", False)  # answered, though by reasoning alone
