"""Validation of an engine's answers: complete and valid, or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pools.journal.answers import AnswerFacts, judge, judge_response, judge_tokens
from pools.journal.terms import NO_TERMS, Terms, terms_of

JSON = "application/json"
SSE = "text/event-stream; charset=utf-8"


def choice(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "text": "a", "finish_reason": "stop", **fields}


def whole(**fields: Any) -> bytes:
    answer = {"id": "1", "choices": [choice()], "usage": {"prompt_tokens": 3, "completion_tokens": 5}, **fields}
    return json.dumps(answer).encode()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [choice(finish_reason=None)], **fields}).encode() + b"\n\n"


FINISH = event(choices=[choice(finish_reason="length")])
DONE = b"data: [DONE]\n\n"
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})


def test_judge_whole_answer_gives_its_counts_and_finishes() -> None:
    body = whole(choices=[choice(), choice(index=1, finish_reason="length")], unknown={"a": [1]})
    assert judge(JSON, body) == AnswerFacts(3, 5, ("stop", "length"))


@pytest.mark.parametrize(
    "usage", [None, [], {}, {"prompt_tokens": "3"}, {"prompt_tokens": -1}, {"prompt_tokens": True}]
)
def test_judge_answer_without_counts_gives_zero(usage: Any) -> None:
    assert judge(JSON, whole(usage=usage)) == AnswerFacts(0, 0, ("stop",))


ECHOED = terms_of({"prompt": [[7, 8]], "max_tokens": 1, "echo": True, "logprobs": 1})
"""Terms of a request with three rows of token log-probs in its answer."""


def echoed(*values: float | None, **usage: int) -> bytes:
    columns = {"tokens": ["a"] * len(values), "token_logprobs": values, "top_logprobs": [None] * len(values)}
    counts = {"prompt_tokens": 2, "completion_tokens": 1, **usage}
    return whole(choices=[choice(logprobs=columns)], usage=counts)


@pytest.mark.parametrize("values", [(None, -9999.0, 0.0), (None, 9e-7, -1), (None, -0.0, -1e-300)])
def test_judge_log_probabilities_within_rounding_are_valid(values: tuple[float | None, ...]) -> None:
    assert judge(JSON, echoed(*values), terms=ECHOED) is not None


@pytest.mark.parametrize(
    "body",
    [
        echoed(),
        echoed(None, -1),
        echoed(None, -1, -1, -1),
        echoed(None, -1, -1, prompt_tokens=3),
        echoed(None, -1, -1, completion_tokens=2),
        echoed(-1, -1, -1),
        echoed(None, None, -1),
        echoed(None, -1, 2e-6),
        echoed(None, 0.0, 0.0),
        echoed(None, -1, float("nan")),
        echoed(None, float("-inf"), -1),
        echoed(None, -1, float("-inf")).replace(b"-Infinity", b"-1e999"),
        echoed(None, -1, -1).replace(b"-1", b'"-1"'),
        echoed(None, -1, -1).replace(b'"tokens"', b'"other"'),
        echoed(None, -1, -1).replace(b'["a", "a", "a"]', b'["a", "a"]'),
    ],
)
def test_judge_log_probabilities_that_cannot_be_gives_none(body: bytes) -> None:
    assert judge(JSON, echoed(None, -1, -1), terms=ECHOED) is not None
    assert judge(JSON, body, terms=ECHOED) is None


LABELLED = terms_of({"prompt": [1], "logprobs": 2, "logprob_token_ids": [7, 8], "return_tokens_as_token_ids": True})


@pytest.mark.parametrize(
    ("top", "valid"),
    [
        ({"token_id:3": -1, "token_id:7": -2, "token_id:8": -9999.0}, True),
        ({"token_id:7": -2, "token_id:8": -3}, True),
        ({"token_id:3": -1, "token_id:7": -2}, False),
        ({"token_id:7": -2, "token_id:8": 0.5}, False),
        ({"token_id:7": -2, "token_id:8": None}, False),
        ({"token_id:7": -2, "token_id:8": float("nan")}, False),
        ({}, False),
        (None, False),
    ],
)
def test_answer_without_a_label_that_was_asked_for_is_not_valid(top: dict[str, float] | None, valid: bool) -> None:
    columns = {"tokens": ["token_id:3"], "token_logprobs": [-1.0], "top_logprobs": [top]}
    body = whole(choices=[choice(logprobs=columns)], usage={"prompt_tokens": 1, "completion_tokens": 1})
    assert (judge(JSON, body, terms=LABELLED) is not None) is valid


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": [1, 2], "n": "2"},
        {"prompt": ["a", "b"], "use_beam_search": True},
        {"prompt_embeds": ["x"]},
        {"prompt": {"odd": 1}},
    ],
)
def test_terms_of_an_odd_request_demand_next_to_nothing(fields: dict[str, Any]) -> None:
    assert judge(JSON, whole(), terms=terms_of(fields)) is not None
    assert judge(JSON, whole(choices=[choice(index=1)]), terms=terms_of(fields)) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"nul",
        b"{}",
        whole()[:-1],
        whole(choices=[]),
        whole(choices=None),
        whole(choices={}),
        whole(choices=["a"]),
        whole(choices=[choice(finish_reason=None)]),
        whole(choices=[{"index": 0, "text": "a"}]),
        whole(choices=[choice(finish_reason="abort")]),
        whole(choices=[choice(finish_reason="error")]),
        whole(choices=[choice(finish_reason="")]),
        whole(choices=[choice(finish_reason="because")]),
        whole(choices=[choice(index=None)]),
        whole(choices=[choice(), choice(index=1, finish_reason="abort")]),
        whole(error={"message": "no"}),
        b"[" * 100_000,
        b'{"choices":' + b"[" * 5000 + b"NaN",
    ],
)
def test_judge_invalid_answer_gives_none(body: bytes) -> None:
    assert judge(JSON, body) is None


def test_judge_whole_stream_gives_its_counts_and_finishes() -> None:
    body = event() + b": still here\n\n" + FINISH + USAGE + DONE
    assert judge(SSE, body) == AnswerFacts(7, 2, ("length",))
    assert judge(SSE, body.replace(b"\n", b"\r\n")) == AnswerFacts(7, 2, ("length",))


@pytest.mark.parametrize(
    "body",
    [
        FINISH,
        event() + DONE,
        DONE,
        USAGE + DONE,
        FINISH + DONE + FINISH,
        FINISH + b"data: {\n\n" + DONE,
        FINISH + b'data: {"error": {"message": "no"}}\n\n' + DONE,
        FINISH + b"event: error\ndata: {}\n\n" + DONE,
        event(choices=[choice(finish_reason="abort")]) + DONE,
        FINISH + event(choices=[choice(index=1, finish_reason=None)]) + DONE,
        event(choices=[choice(index="0")]) + DONE,
        whole(),
    ],
)
def test_judge_incomplete_stream_gives_none(body: bytes) -> None:
    assert judge(SSE, body) is None


def test_judge_stream_cut_anywhere_gives_none() -> None:
    body = event() + FINISH + USAGE + DONE
    assert [cut for cut in range(len(body)) if judge(SSE, body[:cut]) is not None] == []


def test_judge_answer_cut_anywhere_gives_none() -> None:
    body = whole()
    assert [cut for cut in range(len(body)) if judge(JSON, body[:cut]) is not None] == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["choices", "error", "index"]), inner),
)
COLUMNS = st.dictionaries(st.sampled_from(["tokens", "token_logprobs", "top_logprobs", "content"]), VALUES)
CHOICES = st.lists(
    st.dictionaries(
        st.sampled_from(["index", "finish_reason", "text", "error", "logprobs"]),
        VALUES | COLUMNS | st.just("stop") | st.just(0),
    )
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine generates inputs slowly
@given(
    st.binary()
    | st.fixed_dictionaries({"choices": CHOICES, "usage": VALUES}).map(lambda value: json.dumps(value).encode()),
    st.sampled_from([JSON, SSE, ""]),
    st.booleans(),
    st.sampled_from([ECHOED, terms_of({"prompt": "a"}), terms_of({"logprobs": True}, chat=True), NO_TERMS]),
)
def test_judge_any_bytes_never_raises(body: bytes, content_type: str, stream: bool, terms: Terms) -> None:
    for given_body in (body, b"data: " + body + b"\n\n" + DONE):
        facts = judge(content_type, given_body, stream=stream, terms=terms)
        assert facts is None or facts.finish_reasons


@pytest.mark.parametrize(
    ("body", "whole"),
    [
        (b'{"status": "completed", "output": [], "usage": {"input_tokens": 3, "output_tokens": 2}}', True),
        (b'{"status": "incomplete", "output": []}', True),
        (b'{"status": "failed", "output": []}', False),
        (b'{"status": "in_progress", "output": []}', False),
        (b'{"status": "completed"}', False),
        (b'{"status": "completed", "output": []', False),
        (b'{"error": {"code": 1}, "status": "completed", "output": []}', False),
        (b"[]", False),
        (b"", False),
    ],
)
def test_response_is_judged_by_its_status_and_output(body: bytes, whole: bool) -> None:
    assert (judge_response(body) is not None) == whole
    event = b'event: response.completed\ndata: {"response": %b}\n\n' % body.replace(b"\n", b"")
    assert (judge_response(event, stream=True) is not None) == (whole or b'"error"' in body)
    assert judge_response(event[:-20], stream=True) is None


@pytest.mark.parametrize(("body", "whole"), [(b'{"tokens": [1]}', True), (b'{"count": 1}', False), (b"{", False)])
def test_tokens_are_judged_by_their_list(body: bytes, whole: bool) -> None:
    assert (judge_tokens(body) is not None) == whole
