"""Names of checkpoints with options: their parts, and what looks through them."""

from __future__ import annotations

import pytest

from pools.weights.merges import locations_of, merge_of, with_each_location, with_options
from pools.weights.overrides import Override, override_of
from resources.errors import BadInput
from tasks.spec.names import name_of, place_of, run_folder_of

OF_TOKENIZER = Override("runs/a/step-3", tokenizer="t")


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("with(runs/a/step-3, tokenizer=t)", OF_TOKENIZER),
        (" with(runs/a/step-3,tokenizer= t) ", OF_TOKENIZER),
        ("with(a, tokenizer=t, template=c.jinja, base=b)", Override("a", "t", "c.jinja", "b")),
        ("with(a, template=c.jinja)", Override("a", template="c.jinja")),
        ("with(a, tokenizer=hf://o/n%40main)", Override("a", "hf://o/n@main")),
        ("with(a, tokenizer=hf://o/n@main)", Override("a", "hf://o/n@main")),
        ("with(/r/x%2Cy%28=1%29, base=b)", Override("/r/x,y(=1)", base="b")),
    ],
)
def test_override_name_of_every_form_says_location_and_options(name: str, override: Override) -> None:
    assert override_of(name) == override
    assert override_of(str(override)) == override


@pytest.mark.parametrize("location", ["runs/a", "without(a, tokenizer=t)", "./with(a, base=b)", "mean(a@1)", "with(a"])
def test_override_name_of_another_location_is_none(location: str) -> None:
    assert override_of(location) is None


@pytest.mark.parametrize(
    "options", ["", "tokenizer", "tokenizer=", "tokenizer=a, tokenizer=b", "base=b, tokenizer=t", "step=3"]
)
def test_override_name_that_cannot_be_right_is_refused_with_its_form(options: str) -> None:
    with pytest.raises(BadInput, match="tokenizer=FOLDER, template=FILE, base=LOCATION"):
        override_of(f"with(a, {options})")


def test_override_is_looked_through_by_places_and_names() -> None:
    name, plain = "with(/r/a/hf/step-3, tokenizer=t)", "/r/a/hf/step-3"
    assert name_of(name) == name_of(plain) == ("a", "a-3", 3)
    assert run_folder_of(name) == run_folder_of(plain) == "/r/a"
    assert place_of(name) == "with(/r/a/step-3, tokenizer=t)"
    assert locations_of(name) == (plain,)
    assert with_each_location(name, lambda each: each + "!") == "with(/r/a/hf/step-3!, tokenizer=t!)"


def test_override_within_a_merge_is_written_and_read_there() -> None:
    named = with_options("mean(/r/a@1+2, /r/b%2Cc@3)", tokenizer="t", template=None)
    assert named == "mean(with(/r/a, tokenizer=t)@1+2, with(/r/b%2Cc, tokenizer=t)@3)"
    assert str(merge_of(named)) == named
    assert with_options(named, base="b").startswith("mean(with(/r/a, tokenizer=t, base=b)@1+2")
    assert locations_of(named) == ("/r/a", "/r/b,c")
    assert with_each_location(named, str.upper) == "mean(with(/R/A, tokenizer=T)@1+2, with(/R/B%2CC, tokenizer=T)@3)"
    resolved = "ema(with(/r/a/step-1, base=b@2), with(/r/a/step-2, base=b@2), 0.9)"
    assert name_of(resolved) == name_of("ema(/r/a/step-1, /r/a/step-2, 0.9)")
