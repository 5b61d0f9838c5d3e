"""Keys of requests: all spellings of a request share a key, and no two different requests do."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pools.journal.keys import Question, Subject, is_deterministic, question

SUBJECT = Subject(weights="w1", tokenizer="t1", engine="e1")
PATH = "/v1/completions"
BODY = {
    "model": "run-100",
    "prompt": "Two and two is",
    "max_tokens": 16,
    "temperature": 0.7,
    "stop": ["\n"],
    "n": 1,
    "logprobs": None,
    "echo": False,
    "seed": 1,
    "response_format": {"type": "json_object", "schema": {"a": 1}},
    "user": "somebody",
}
LARGE_SEEDS = [BODY | {"seed": number} for number in (2**64, 2**64 + 2, -(2**63) - 3)]
"""Integers that convert to the same float."""


def asked(body: Any, *, subject: Subject = SUBJECT, target: str = PATH) -> Question:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError:
        fields = json.loads(text)
    return question(subject, target, body=text, fields=fields)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "run-200"},
        {"prompt": "Two and two are"},
        {"prompt": ["Two and two is"]},
        {"prompt": [1, 2]},
        {"prompt": [[1, 2]]},
        {"prompt": [[1], [2]]},
        {"max_tokens": 17},
        {"max_tokens": 16.0},
        {"max_tokens": "16"},
        {"temperature": 0.7000000000000001},
        {"stop": "\n"},
        {"stop": ["\n", "\n\n"]},
        {"stop": []},
        {"n": 2},
        {"n": 1.0},
        {"n": True},
        {"logprobs": 0},
        {"logprobs": float("nan")},
        {"echo": True},
        {"echo": 0},
        {"seed": 2},
        {"seed": 2**64},
        {"seed": 2**64 + 1},
        {"seed": float(2**64)},
        {"seed": -(2**63) - 1},
        {"seed": -(2**63) - 2},
        {"seed": None},
        {"response_format": {"type": "json_object", "schema": {"a": 2}}},
        {"response_format": {"type": "json_object", "schema": [{"a": 1}]}},
        {"response_format": {"schema": {"a": 1}, "type": "json_object"}},
        {"user": "another user"},
        {"messages": [{"role": "user", "content": "Two and two is"}]},
        {"stream": False},
        {"guided_regex": "a+"},
        {"prompt_logprobs": 1},
        {"an unknown field": None},
    ],
    ids=lambda changed: json.dumps(changed)[:40],
)
def test_question_with_a_changed_field_has_another_key(changed: dict[str, Any]) -> None:
    ours = asked(BODY | changed)
    others = [asked(other) for other in (BODY, *LARGE_SEEDS) if json.dumps(other) != json.dumps(BODY | changed)]
    assert ours.key not in {other.key for other in others}


@pytest.mark.parametrize(
    ("subject", "target"),
    [
        (Subject("w2", "t1", "e1"), PATH),
        (Subject("w1", "t2", "e1"), PATH),
        (Subject("w1", "t1", "e2"), PATH),
        (Subject("w1t1", "", "e1"), PATH),
        (Subject("t1", "w1", "e1"), PATH),
        (SUBJECT, "/v1/chat/completions"),
        (SUBJECT, f"{PATH}?a=1"),
    ],
)
def test_question_to_another_subject_or_path_has_another_key(subject: Subject, target: str) -> None:
    assert asked(BODY, subject=subject, target=target).key != asked(BODY).key


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(BODY, indent=3).encode(),
        json.dumps(dict(reversed(BODY.items()))).encode(),
        json.dumps(BODY | {"prompt": "x"}).encode()[:-1] + b', "prompt": "Two and two is"}',
        json.dumps(BODY).replace("Two", "\\u0054wo").encode(),
    ],
    ids=["white space", "order", "a key twice", "escapes"],
)
def test_question_spelt_otherwise_has_the_same_key(text: bytes) -> None:
    assert text != json.dumps(BODY).encode()
    assert asked(text).key == asked(BODY).key


@pytest.mark.parametrize(
    "text", [b'{"a": 1e400}', b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}"]
)
def test_question_that_orjson_cannot_write_has_a_key(text: bytes) -> None:
    assert asked(text).key == asked(text.replace(b": ", b":  ")).key != asked(b'{"a": null}').key


def test_question_does_not_show_its_text() -> None:
    ours = asked(BODY)
    assert "Two and two" not in repr(ours)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0, "use_beam_search": True}, True),
        ({"temperature": 0.0, "seed": 1}, True),
        ({}, False),
        ({"temperature": None}, False),
        ({"temperature": False}, False),
        ({"temperature": "0"}, False),
        ({"temperature": 1e-9}, False),
        ({"temperature": 1, "seed": 1}, False),
        ({"max_tokens": 0, "echo": True, "logprobs": 1}, True),
        ({"max_tokens": 0, "prompt_logprobs": 0}, True),
        ({"max_tokens": 0, "echo": True, "max_completion_tokens": 5}, False),
        ({"max_tokens": 0}, False),
        ({"max_tokens": False, "echo": True}, False),
        ({"max_tokens": 1, "echo": True, "logprobs": 1}, False),
        ({"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}, True),
    ],
)
def test_is_deterministic_only_where_nothing_is_drawn(fields: dict[str, Any], expected: bool) -> None:
    assert is_deterministic(fields) is expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sampling_params": {"temperature": 0, "max_tokens": 1}}, True),
        ({"sampling_params": {"temperature": 0.0, "skip_reading_prefix_cache": False}}, True),
        ({"sampling_params": {"temperature": 1.0}, "temperature": 0}, False),
        ({"sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}, False),
        ({"sampling_params": None, "temperature": 0}, False),
        ({"temperature": 0}, False),
    ],
)
def test_request_for_tokens_is_deterministic_by_its_sampling_parameters_alone(
    fields: dict[str, Any], expected: bool
) -> None:
    assert asked({"model": "m", **fields}, target="/inference/v1/generate").deterministic is expected
    assert asked({"model": "m", **fields}).deterministic is (fields.get("temperature") == 0)


NUMBERS = st.integers() | st.integers(2**62, 2**66) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=5)


generous = settings(
    suppress_health_check=[HealthCheck.too_slow], deadline=None
)  # a busy machine generates inputs slowly


def exactly(value: Any, *, top: bool = True) -> Any:
    """Returns a value that equals only the same JSON value of the same type, in the same order below the top level."""
    if isinstance(value, dict):
        items = [(name, exactly(item, top=False)) for name, item in value.items()]
        return "object", frozenset(items) if top else tuple(items)
    if isinstance(value, list):
        return "array", tuple(exactly(item, top=False) for item in value)
    return type(value).__name__, value, isinstance(value, float) and math.copysign(1, value)


def shuffled(value: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    items = list(value.items())
    rng.shuffle(items)
    return dict(items)


@generous
@given(OBJECTS, OBJECTS)
def test_question_of_two_different_objects_never_shares_a_key(first: dict[str, Any], other: dict[str, Any]) -> None:
    assume(exactly(first) != exactly(other))
    assert asked(first).key != asked(other).key


@generous
@given(OBJECTS, VALUES, VALUES)
def test_question_with_a_changed_value_never_shares_a_key(body: dict[str, Any], value: Any, other: Any) -> None:
    assume(exactly(value, top=False) != exactly(other, top=False))
    assert asked(body | {"field": value}).key != asked(body | {"field": other}).key


@generous
@given(OBJECTS, st.randoms(use_true_random=False))
def test_question_with_its_fields_in_another_order_always_shares_the_key(
    body: dict[str, Any], rng: random.Random
) -> None:
    text = json.dumps(shuffled(body, rng), indent=rng.choice([None, 1, 4]), ensure_ascii=rng.random() < 0.5)
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        assume(False)
        raise
    assert asked(encoded).key == asked(body).key


ORDERED_SCHEMA = {"reasoning": {"type": "string"}, "answer": {"type": "string"}}
TURNED_SCHEMA = dict(reversed(ORDERED_SCHEMA.items()))


@pytest.mark.parametrize("odd", [{}, {"seed": 2**70}, {"min_p": float("nan")}, {"user": "\ud800"}])
@pytest.mark.parametrize(
    "body_of",
    [
        lambda schema: {"response_format": {"json_schema": {"schema": {"properties": schema}}}},
        lambda schema: {"guided_json": schema},
        lambda schema: {"tools": [{"type": "function", "function": {"parameters": {"properties": schema}}}]},
    ],
    ids=["response_format", "guided_json", "tools"],
)
def test_question_with_a_schema_in_another_order_has_another_key(body_of: Any, odd: dict[str, Any]) -> None:
    keys = {asked({**BODY, **odd, **body_of(schema)}).key for schema in (ORDERED_SCHEMA, TURNED_SCHEMA)}
    assert len(keys) == 2


DISTINCT_VALUES = [
    *("1", "1.0", "true", "null", '"1"', "[1]", '{"1": 1}', "0", "0.0", "-0.0", "false", '""', "[]", "{}", "-1"),
    *("NaN", "Infinity", "-Infinity", "[NaN]", "[null]", '"NaN"', "9007199254740993", "9007199254740993.0"),
    *("18446744073709551615", "18446744073709551616", "1.8446744073709552e19", "-18446744073709551616", "5e-324"),
    *('"e+"', '"\\ud800"', '"\\ud801"', '"\\u0000"', '"\\\\u0000"', '"A"', '"\\\\u0041"', '"\u00e9"', '"e\u0301"'),
]


def test_question_has_another_key_for_each_value_that_engines_tell_apart() -> None:
    texts = [f'{{"prompt": "x", "field": {value}}}'.encode() for value in DISTINCT_VALUES]
    assert len({asked(text).key for text in texts}) == len(DISTINCT_VALUES)


SPELLINGS = [
    ('"A"', '"\\u0041"'),
    ('"\u00e9"', '"\\u00e9"'),
    ('"\U0001f600"', '"\\ud83d\\ude00"'),
    ('"/"', '"\\/"'),
    ("0.5", "5e-1"),
    ("[1,2]", "[1, 2]"),
]


@pytest.mark.parametrize(("value", "other"), SPELLINGS)
def test_question_has_the_same_key_for_two_spellings_of_a_value(value: str, other: str) -> None:
    assert asked(b'{"field": %b}' % value.encode()).key == asked(b'{"field": %b}' % other.encode()).key


def test_question_keeps_20000_large_integers_apart() -> None:
    numbers = [number for start in (2**53, 2**63, 2**64, 10**30) for number in range(start - 2500, start + 2500)]
    assert len({asked(b'{"seed": %d}' % number).key for number in numbers}) == len(numbers) == 20_000


def test_question_too_large_to_be_read_twice_has_the_key_of_its_bytes() -> None:
    text = b'{"prompt": "%b", "seed": %d}' % (b"x" * 100_000, 2**70)
    assert asked(text).key == asked(text).key
    assert len({asked(changed).key for changed in (text, text.replace(b": ", b":"), text[:-2] + b"5}")}) == 3
