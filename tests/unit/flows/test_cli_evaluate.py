"""`assay evaluate`: effects of its options on the evaluation, and the lines at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes.cli import invoke
from fakes.models import write_run
from flows.cli import evaluate as command
from flows.cli.evaluate import show_series
from flows.cli.options.evaluations import EvaluationOptions, evaluation_from_options
from flows.console.running import SeriesResult
from resources.errors import BadInput
from resources.settings import settings


@pytest.mark.parametrize(
    ("given", "allowed"), [((), 1.5), (("--max-egress-usd", "7"), 7), (("--max-egress-usd", "0"), 0)]
)
def test_egress_that_is_allowed_holds_while_the_checkpoints_are_evaluated_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], allowed: float
) -> None:
    seen: list[float] = []

    def run_series(*_: Any, **__: Any) -> SeriesResult:
        seen.append(settings().max_egress_usd)
        return SeriesResult([], 0, 0, report=None, error=None)

    monkeypatch.setenv("ASSAY_MAX_EGRESS_USD", "1.5")
    settings.cache_clear()
    monkeypatch.setattr(command, "run_series", run_series)
    run = write_run(tmp_path / "run", [1])
    line = ["evaluate", "--model", str(run), "--eval", "demo_facts", "--output", str(tmp_path / "out"), *given]
    done = invoke(line)
    assert done.exit_code == 0, (done.output, done.exception)
    assert (seen, settings().max_egress_usd) == ([allowed], 1.5)


def test_key_of_a_pool_at_an_address_may_be_in_a_block() -> None:
    options = {"model": "runs/a", "evals": ("piqa",), "pool_key_block": "kept-pool"}
    config = evaluation_from_options(EvaluationOptions(**options, pool="https://pool.test"))
    assert (config.pool_name, config.pool_key_block) == ("https://pool.test", "kept-pool")
    with pytest.raises(BadInput, match="--pool with --pool-key-block"):
        evaluation_from_options(EvaluationOptions(**options))


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
    show_series(SeriesResult([], evaluated, recorded, report=None, error=None, alerts=("Alert: x",)))
    output = capsys.readouterr().out
    assert message in output and "Alert: x\n" in output
