"""Names of merged checkpoints: their parts, and the weights that follow from them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pools.weights.merges import Merge, Source, locations_of, merge_of, with_each_location
from resources.errors import BadInput

KINDS = (("mean", ""), ("ema", "0.9"), ("wsm", "linear"), ("wsm", "cosine"), ("wsm", "sqrt"))


@pytest.mark.parametrize(
    ("name", "sources", "parameter"),
    [
        ("mean(runs/a@8000..10000)", [Source("runs/a", "8000..10000")], ""),
        ("mean(gs://b/runs/a@last:5)", [Source("gs://b/runs/a", "last:5")], ""),
        ("ema(a@..10000,0.9)", [Source("a", "..10000")], "0.9"),
        ("wsm(a@1+2+3)", [Source("a", "1+2+3")], "linear"),
        ("interpolate(a@1000, b@2000, 0.3)", [Source("a", "1000"), Source("b", "2000")], "0.3"),
        ("mean(models:/llama@prod, a/step-3)", [Source("models:/llama@prod"), Source("a/step-3")], ""),
        ("ema(a@last:5, 00.90)", [Source("a", "last:5")], "0.9"),
        ("mean(a, b, 10+1.0)", [Source("a"), Source("b")], "10+1"),
        ("mean(a/x%2Cy@2, ./3, 1+3)", [Source("a/x,y", "2"), Source("./3")], "1+3"),
    ],
)
def test_merge_name_of_every_form_says_what_goes_in(name: str, sources: list[Source], parameter: str) -> None:
    merge = merge_of(name)
    assert merge is not None
    assert (list(merge.sources), merge.parameter) == (sources, parameter)
    assert merge_of(str(merge)) == merge


@pytest.mark.parametrize(
    ("text", "taken"),
    [("last:2", [3, 4]), ("2..3", [2, 3]), ("..2", [1, 2]), ("3..", [3, 4]), ("..", [1, 2, 3, 4]), ("4+1", [4, 1])],
)
def test_steps_of_a_name_come_from_the_known_steps(text: str, taken: list[int]) -> None:
    assert Source("a", text).taken({4, 2, 1, 3}) == taken


@pytest.mark.parametrize("location", ["runs/a", "gs://b/mean/step-1", "/r/(a)", "median(a@1)", "./mean(a)"])
def test_merge_name_of_a_plain_location_is_none(location: str) -> None:
    assert merge_of(location) is None
    assert locations_of(location) == (location,)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean()", "mean(RUN@8000..10000)"),
        ("mean(a@1,,b)", "mean(RUN@8000..10000)"),
        ("mean(a(b)@3)", "mean(RUN@8000..10000)"),
        ("ema(a@last:5)", "a decay from 0 to 1"),
        ("ema(a@last:5, 1.5)", "a decay from 0 to 1"),
        ("wsm(a@last:5, steep)", "linear, cosine, sqrt"),
        ("interpolate(a, b)", "a share from 0 to 1"),
        ("interpolate(a, b, c, 0.3)", "two checkpoints"),
        ("mean(a, b, 1+2+3)", "a share for each checkpoint"),
        ("mean(a, b, 0+0)", "not all 0"),
    ],
)
def test_merge_name_that_cannot_be_right_is_refused_with_what_is_expected(name: str, expected: str) -> None:
    with pytest.raises(BadInput) as refused:
        merge_of(name)
    assert expected in refused.value.expected


@given(st.sampled_from(KINDS), st.integers(2, 40))
def test_weights_of_every_kind_are_positive_and_sum_to_1(kind: tuple, count: int) -> None:
    weights = Merge(kind[0], (), kind[1]).weights(count)
    assert len(weights) == count
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)
    assert min(weights) > 0


@given(st.sampled_from(["linear", "cosine", "sqrt"]), st.lists(st.floats(-1, 1), min_size=2, max_size=12))
def test_wsm_weights_average_to_updates_scaled_by_the_decay(decay: str, updates: list[float]) -> None:
    # Merged checkpoints of a constant learning rate equal the last checkpoint of a training with decayed updates.
    count = len(updates)
    scale = {
        "linear": lambda passed: 1 - passed,
        "cosine": lambda passed: (1 + math.cos(math.pi * passed)) / 2,
        "sqrt": lambda passed: 1 - math.sqrt(passed),
    }[decay]
    checkpoints = [math.fsum(updates[: at + 1]) for at in range(count)]
    merged = math.fsum(w * c for w, c in zip(Merge("wsm", (), decay).weights(count), checkpoints, strict=True))
    assert merged == pytest.approx(math.fsum(scale(at / count) * updates[at] for at in range(count)), abs=1e-9)


def test_ema_weights_are_those_of_the_running_average() -> None:
    values, average = [3.0, 1.0, 4.0, 1.5], 3.0
    for value in values[1:]:
        average = 0.9 * average + 0.1 * value
    weights = Merge("ema", (), "0.9").weights(4)
    assert math.fsum(w * v for w, v in zip(weights, values, strict=True)) == pytest.approx(average)


@given(st.lists(st.text("/ab,()@%1:", min_size=1), min_size=2, max_size=4))
def test_merge_name_survives_any_letters_of_locations(folders: list[str]) -> None:
    folders = [f"/{folder}" for folder in folders]
    name = str(Merge.of_folders("mean", folders))
    assert locations_of(name) == tuple(folders)
    assert with_each_location(name, lambda location: f"gs:/{location}") == str(
        Merge.of_folders("mean", [f"gs:/{folder}" for folder in folders])
    )
