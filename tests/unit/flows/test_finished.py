"""Requests with nothing left to do: output and files without Prefect, and requests that still need a flow run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.cells import of_cell
from fakes.command import run_command
from fakes.models import write_run
from fakes.records import make_record
from flows.cli.options.evaluations import EvaluationOptions, evaluation_from_options
from flows.cli.options.pools import PoolOptions
from flows.console.running import records_if_finished, run_series
from resources.backends.current import set_current_client
from resources.backends.local.client import LocalClient
from tasks.checkpoints.discovery import find_checkpoints
from tasks.errors import GateRefused
from tasks.prefect_server.progress import Event, Judged, Update, listening
from tasks.records.cost import Cost
from tasks.records.record import Record, record_uri, write_record
from tasks.running.cells import Cell, as_served, plan_cells
from tasks.running.planning import Request, carrying_out, plan
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.verdicts.gate import Gate

NAMED = "from tasks.prefect_server.lazy import server_named; print(server_named())"
AT = "http://127.0.0.1:9/api"


def without_prefect(**variables: str) -> dict[str, str]:
    """Returns the variables of this process without Prefect's, updated with `variables`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | variables


def finished(config: EvaluationConfig, gate: Gate | None = None, **selected: Any) -> list[Record] | None:
    request = Request((config,), CheckpointSelection(**selected), gate)
    with carrying_out(request) as plan:
        return records_if_finished(request, plan)


@pytest.fixture
def config(tmp_path: Path) -> EvaluationConfig:
    return EvaluationConfig.model_validate(
        {
            "model_path": str(write_run(tmp_path / "run-a", [100, 200])),
            "evaluation_path": str(tmp_path / "out"),
            "evals": [{"name": "demo_facts"}],
            "base_url": "http://127.0.0.1:9/v1",
        }
    )


def planned(config: EvaluationConfig) -> list[Cell]:
    return plan_cells.fn([config], find_checkpoints(config.model_path))


@pytest.fixture
def recorded(config: EvaluationConfig) -> list[Cell]:
    cells = planned(config)
    for cell in cells:
        write_record(cell.uri, make_record(**of_cell(cell)))
    return cells


def test_evaluate_with_nothing_to_do_shows_all_and_leaves_the_report_without_prefect(
    config: EvaluationConfig, recorded: list[Cell], tmp_path: Path
) -> None:
    arguments = ["--model", config.model_path, "--output", config.evaluation_path, "--eval", "demo_facts"]
    arguments += ["--base-url", "http://127.0.0.1:9/v1"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "flows.cli.app", "evaluate", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=without_prefect(PREFECT_HOME=str(tmp_path / "prefect"), PYTHONPATH=os.pathsep.join(sys.path)),
    )
    assert done.returncode == 0, done.stderr
    assert "2 cells wanted, 2 recorded already, 0 to evaluate" in done.stderr
    assert "Results of run-a" in done.stdout and "Nothing to evaluate: 2 cells recorded already." in done.stdout
    assert (tmp_path / "out" / "run-a" / "report.html").is_file()
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "flows.console.running" in imported and "prefect" not in imported
    assert not (tmp_path / "prefect").exists()


def test_what_is_finished_needs_no_flow_run_and_a_cell_without_a_success_does(
    config: EvaluationConfig, recorded: list[Cell]
) -> None:
    result = run_series(
        lambda: pytest.fail("there is nothing to do"),
        evaluation_path=config.evaluation_path,
        run_name="run-a",
        request=Request((config,)),
    )
    assert (len(result.records), result.evaluated, result.already_recorded, result.error) == (2, 0, 2, None)
    Path(record_uri(recorded[0].uri)).unlink()
    assert finished(config) is None
    write_record(recorded[0].uri, make_record(**of_cell(recorded[0]), status="infra_failed"))
    assert finished(config) is None
    assert [record.checkpoint.step for record in finished(config, which="latest") or ()] == [200]


def test_records_that_a_sink_lacks_are_left_to_a_flow_run(config: EvaluationConfig, recorded: list[Cell]) -> None:
    sinks = [{"kind": "object_store", "url": f"{config.evaluation_path}-copies"}]
    assert finished(EvaluationConfig.model_validate({**config.model_dump(), "sinks": sinks})) is None


def test_report_that_cannot_be_written_is_left_to_a_flow_run_which_tries_again(
    config: EvaluationConfig, recorded: list[Cell]
) -> None:
    (Path(config.evaluation_path) / "run-a" / "report.html").mkdir()
    assert finished(config) is None


def test_gate_is_judged_without_a_flow_run(config: EvaluationConfig, recorded: list[Cell]) -> None:
    def gate(least: float) -> Gate:
        rule = {"benchmark": "demo_facts", "metric": "acc", "at_least": least}
        return Gate.model_validate({"name": "release", "rules": [rule]})

    heard: list[Update] = []
    with listening(heard.append):
        assert len(finished(config, gate(0.0)) or ()) == 2
        with pytest.raises(GateRefused):
            finished(config, gate(1.0))
    assert [update.verdict.go for update in heard if isinstance(update, Judged)] == [True, False]
    assert any(isinstance(update, Event) and "2 recorded already" in update.text for update in heard)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        pytest.param("variable", AT, id="variable"),
        pytest.param(
            "prefect/profiles.toml", f'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "{AT}"', id="profile"
        ),
        pytest.param("pyproject.toml", f'[tool.prefect.api]\nurl = "{AT}"', id="project"),
        pytest.param("prefect/profiles.toml", f'[profiles.other]\nPREFECT_API_URL = "{AT}"', id="another profile"),
        pytest.param("pyproject.toml", '[project]\ndependencies = ["prefect"]', id="no server"),
    ],
)
def test_server_is_named_if_prefect_has_an_address(place: str, text: str, tmp_path: Path) -> None:
    variables = {"PREFECT_API_URL": text} if place == "variable" else {}
    if not variables:
        file = tmp_path / place
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    environment = without_prefect(
        PREFECT_HOME=str(tmp_path / "prefect"), PYTHONPATH=os.pathsep.join(sys.path), **variables
    )
    asked = subprocess.run(
        [sys.executable, "-c", NAMED], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    expected = place == "variable" or "mine" in text or "tool.prefect" in text
    assert asked.stdout.strip() == str(expected)


def test_evaluation_that_may_cost_less_than_is_expected_is_refused_before_anything_starts(
    config: EvaluationConfig, recorded: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A single cell is open; the record of the other predicts an hour of a slice, for 3.84 USD.
    monkeypatch.setenv("ASSAY_REGION", "us-central1")
    arguments = ["evaluate", "--model", config.model_path, "--output", str(tmp_path / "priced"), "--eval", "demo_facts"]
    arguments += ["--tpu", "v5litepod-8"]
    with set_current_client(LocalClient(device_root=slices(tmp_path))):
        asked = evaluation_from_options(
            EvaluationOptions(model=config.model_path, output=str(tmp_path / "priced"), evals=("demo_facts",)),
            PoolOptions(tpu="v5litepod-8"),
        )
        first, *_ = planned(as_served(asked))
        measured = make_record(**of_cell(first), cost=Cost(replica_seconds=3600.0))
        write_record(first.uri, measured)
        dear = run_command(*arguments, "--max-usd", "3")
        nothing = run_command(*arguments, "--which", "first", "--max-usd", "0")
    unknown = run_command(
        *("evaluate", "--model", config.model_path, "--output", tmp_path / "there", "--eval", "demo_facts"),
        *("--base-url", "http://127.0.0.1:9/v1", "--max-usd", "100"),
    )
    assert (dear.returncode, unknown.returncode) == (3, 3), dear.stderr + unknown.stderr
    words = "expected for 1 cell: 9.8 s, 8.000 chip-hours, 3.84 USD; as measured before"
    assert words in " ".join(dear.stderr.split())
    assert "an evaluation that is expected to cost at most 3.00 USD" in " ".join(dear.stderr.split())
    assert "3.84 USD expected for 1 cell" in " ".join(dear.stderr.split())
    assert "unknown for 2 cells: an endpoint of another owner answers" in " ".join(unknown.stderr.split())
    assert nothing.returncode == 0 and "Nothing to evaluate: 1 cell recorded already." in nothing.stdout
    assert not list((tmp_path / "there").rglob("*.json")), "no cell was started"


def slices(folder: Path) -> Path:
    (folder / "machine" / "dev").mkdir(parents=True)
    for number in range(8):
        (folder / "machine" / "dev" / f"accel{number}").touch()
    return folder / "machine"


def test_flow_carries_out_the_plan_of_the_command_and_reports_it(config: EvaluationConfig) -> None:
    request = Request((config,))
    heard: list[Update] = []
    with listening(heard.append), carrying_out(request) as made:
        assert not heard, "the flow reports it"
        assert plan(Request((config.model_copy(),))) is made
        assert [update.text for update in heard if isinstance(update, Event)] == [
            "2 cells wanted, 0 recorded already, 2 to evaluate"
        ]
        assert plan(Request((config,), CheckpointSelection(which="latest"))) is not made
    assert plan(request) is not made
