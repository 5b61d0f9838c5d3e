"""Assay's errors on their way to other processes, as pickles and as values."""

from __future__ import annotations

import json
import pickle

import pytest

import tasks.errors  # noqa: F401 registers its classes
from resources.errors import AssayError, error_of, unknown

OURS = ("resources.errors", "pools.errors", "tasks.errors")
KINDS = [AssayError, *(kind for kind in AssayError.kinds.values() if kind.__module__ in OURS)]
EXPECTED = "a clause\nFound:    what only looks like the next part"
FOUND = "it ended. Its last lines:\nBadInput: Expected: another\nTo do:    nothing"
REMEDY = "read the log\nand its last line"


@pytest.mark.parametrize("kind", KINDS)
def test_error_of_ours_is_the_same_in_another_process(kind: type[AssayError]) -> None:
    error = kind(expected=EXPECTED, found=FOUND, remedy=REMEDY)
    for again in (error_of(json.loads(json.dumps(error.as_values()))), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind
        assert (again.expected, again.found, again.remedy) == (EXPECTED, FOUND, REMEDY)


@pytest.mark.parametrize("name", ["Path", "error_of", "OfALaterVersion"])
def test_error_of_a_class_that_is_not_ours_keeps_its_parts(name: str) -> None:
    error = error_of({"kind": name, "expected": EXPECTED, "found": FOUND, "remedy": REMEDY})
    assert type(error) is AssayError
    assert (error.expected, error.found, error.remedy) == (EXPECTED, FOUND, REMEDY)


def test_unknown_name_offers_the_nearest_names_or_all() -> None:
    assert unknown("a color", "gren", ["blue", "green"], "correct it").found == "'gren'; did you mean green?"
    assert unknown("a color", "xyz", ["red", "green"], "correct it").found == "'xyz'; there: green, red"
    assert unknown("a color", "xyz", [f"c{i}" for i in range(30)], "correct it").found == "'xyz'; there: 30 others"
