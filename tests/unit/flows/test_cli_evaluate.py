"""The lines that `assay evaluate` ends with."""

from __future__ import annotations

import pytest

from flows.cli.evaluate import show_series
from flows.console.running import SeriesResult


@pytest.mark.parametrize(
    ("evaluated", "recorded", "message"),
    [
        (0, 18, "Nothing to evaluate: 18 cells recorded already."),
        (0, 1, "Nothing to evaluate: 1 cell recorded already."),
        (2, 16, "Evaluated 2, already recorded 16."),
    ],
)
def test_series_says_how_much_of_it_was_recorded_already(
    capsys: pytest.CaptureFixture[str], evaluated: int, recorded: int, message: str
) -> None:
    show_series(SeriesResult([], evaluated, recorded, report=None, error=None), as_json=False)
    assert message in capsys.readouterr().out
