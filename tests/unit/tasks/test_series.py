"""Several series of checkpoints below a run: commands, policies, claims and events cover each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes.cli import invoke
from fakes.layouts import WHOLE, write_layout
from flows.cli import evaluate as command
from flows.console.running import SeriesResult
from tasks.checkpoints.discovery import discover_checkpoint
from tasks.errors import NoCheckpoints
from tasks.policies.actions import end_claims
from tasks.policies.events import WatchedRuns
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import reconcile
from tasks.policies.snapshot import run_folders, take_snapshot
from tasks.records.verdicts import Verdict
from tasks.running.claims.files import Subject, claims_folder
from tasks.running.claims.leases import Claims
from tasks.training.arrivals import ArrivingCheckpoints

TWO_SERIES = {"v0-2024/checkpoint-N": WHOLE, "v1-2025/checkpoint-N": WHOLE}


def test_command_evaluates_each_series_under_a_name_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "my-run"
    write_layout(run, TWO_SERIES)
    place = ["--eval", "demo_facts", "--base-url", "http://127.0.0.1:9/v1", "--output", tmp_path / "out", "--dry-run"]
    result = invoke(["evaluate", "--model", run, *place])
    assert result.exit_code == 0, result.output
    for name in ("my-run-v0-2024-100", "my-run-v0-2024-200", "my-run-v1-2025-100", "my-run-v1-2025-200"):
        assert f"  {name} · " in result.stdout
    alone = invoke(["evaluate", "--model", run, *place, "--series", "v1-2025", "--step", "100"])
    assert "my-run-v1-2025-100 · " in alone.stdout and "v0" not in alone.stdout
    document = json.loads(invoke(["evaluate", "--model", run, *place, "--json"]).stdout)
    assert {name: of_series["wanted"] for name, of_series in document["series"].items()} == {"v0-2024": 2, "v1-2025": 2}
    chosen = invoke(["evaluate", "--model", run, *place, "--step", "300", "--json"])
    assert chosen.exit_code == 3 and isinstance(chosen.exception, NoCheckpoints)
    errors = [of_series["error"]["kind"] for of_series in json.loads(chosen.stdout)["series"].values()]
    assert errors == ["NoCheckpoints", "NoCheckpoints"]


def test_summary_has_the_verdict_of_each_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_series(_: object, __: str, name: str, **___: object) -> SeriesResult:
        if name == "my-run":
            discover_checkpoint.fn(str(tmp_path / "my-run"), latest=True)
        return SeriesResult([], 0, 0, report=None, error=None, verdict=Verdict(name, ()))

    monkeypatch.setattr(command, "run_series", run_series)
    write_layout(tmp_path / "my-run", TWO_SERIES)
    (tmp_path / "gate.yaml").write_text("{name: g, rules: [{benchmark: b, metric: m, at_least: 0}]}")
    place = ["--eval", "demo_facts", "--gate", tmp_path / "gate.yaml", "--summary", tmp_path / "summary.md"]
    invoke(["evaluate", "--model", tmp_path / "my-run", "--output", tmp_path / "out", *place])
    heads = (tmp_path / "summary.md").read_text().split("## ")[1:]
    assert [head.split()[1] for head in heads] == ["my-run-v0-2024", "my-run-v1-2025"]


def test_folders_of_a_policy_are_those_of_its_series(tmp_path: Path) -> None:
    run = tmp_path / "my-run"
    write_layout(run, TWO_SERIES)
    place = str(tmp_path / "out")
    content = {"name": "p", "runs": [str(run)], "suites": ["demo"], "evaluation_path": place}
    names = ["my-run", "my-run-v0-2024", "my-run-v1-2025"]
    assert run_folders(Policy.model_validate(content)) == {name: f"{place}/{name}" for name in names}
    request = {"request": {"model_path": str(run), "evaluation_path": place}, "selection": {"series": "v1-2025"}}
    subject = Subject(key="step-100.c", checkpoint="my-run-v1-2025-100", evaluation_hash="h")
    for parameters in (request, {"policy": content}):
        with Claims(claims_folder(place, names[2]), flow_run="a", in_background=False) as claims:
            assert claims.acquire([subject]).ours
            assert end_claims(parameters, flow_run="a") == 1


def test_watcher_reports_a_checkpoint_under_the_run_of_its_series(tmp_path: Path) -> None:
    write_layout(tmp_path / "my-run", TWO_SERIES)
    content = {
        "name": "p",
        "runs": [str(tmp_path / "my-run")],
        "suites": ["demo"],
        "evaluation_path": str(tmp_path / "out"),
    }
    watched = WatchedRuns(Policy.model_validate(content))
    assert [(each.run, each.name) for each in watched.find_new()] == [("my-run-v1-2025", "my-run-v1-2025-200")]


def test_single_checkpoint_has_the_step_of_an_expression(tmp_path: Path) -> None:
    write_layout(tmp_path / "my-run", {"llama-100-sft": WHOLE})
    folder, expression = str(tmp_path / "my-run" / "llama-100-sft"), r"llama-(\d+)-sft"
    assert discover_checkpoint.fn(folder, latest=False, steps_from=expression).step == 100
    assert discover_checkpoint.fn(str(tmp_path / "my-run"), latest=True, steps_from=expression).name == "my-run-100"
    arriving = ArrivingCheckpoints(str(tmp_path / "my-run"), steps_from=expression)
    assert [each.step for each in arriving.find_new(last=True)] == [100]


def test_policy_lists_each_series_with_its_own_records(tmp_path: Path) -> None:
    run = tmp_path / "my-run"
    write_layout(run, TWO_SERIES)
    content = {"name": "p", "runs": [str(run)], "suites": ["demo"], "evaluation_path": str(tmp_path / "out")}
    policy = Policy.model_validate({**content, "steps_from": r"checkpoint-(\d+)"})
    listings = take_snapshot(policy)
    assert [listing.name for listing in listings] == ["my-run-v0-2024", "my-run-v1-2025"]
    assert {each.config.run_name for each in listings[1].evaluations} == {"my-run-v1-2025"}
    assert [seen.name for seen in listings[1].checkpoints] == ["my-run-v1-2025-100", "my-run-v1-2025-200"]
    [suite] = {each.suites for each in listings[0].evaluations}
    assert len(reconcile(listings, policy, now=0.0).work) == 4 * len(listings[0].evaluations), suite
