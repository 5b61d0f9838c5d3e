"""Checkpoints that were removed before their evaluation: no failure, no other try, named in status and report."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fakes.cells import of_cell
from fakes.cli import invoke
from fakes.evaluators import Commanded
from fakes.layouts import write_adapter
from fakes.models import write_run
from fakes.policies import record_for, write_policy
from fakes.records import cell_of, make_record, publish
from flows.reconcile import load_policy
from pools.weights.kept import keeping, kept_location, release
from pools.weights.staging import Staging
from resources.errors import CheckpointGone
from tasks.checkpoints.checkpoint import Checkpoint
from tasks.checkpoints.discovery import find_checkpoints
from tasks.errors import EvaluationIncomplete
from tasks.evaluators.evaluator import HarnessCommand
from tasks.policies.reconciliation import Reconciliation, reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.prefect_server.progress import Event, Update, listening
from tasks.records.record import find_records, read_record, write_record
from tasks.reports.page import render_report
from tasks.running.attempt import RunResources
from tasks.running.cells import Cell, conclude, plan_cells
from tasks.running.planning import plan_checkpoints
from tasks.running.run_cell import run_cell
from tasks.running.warm import Harness
from tasks.spec.evaluation import EvaluationConfig
from tasks.verdicts.alerts import alerts_in
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import judge, judged_checkpoints


def config_of(folder: Path) -> EvaluationConfig:
    return EvaluationConfig.model_validate(
        {
            "evaluator": "levanter_lm_evaluation_harness",
            "model_path": str(folder / "run-a"),
            "evaluation_path": str(folder / "out"),
            "evals": [{"name": "demo_facts"}],
        }
    )


def unused(*_: object) -> HarnessCommand:
    raise AssertionError("no harness is started for a checkpoint that is gone")


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Checkpoint]:
    write_run(tmp_path / "run-a", [100, 200, 300])
    return find_checkpoints(str(tmp_path / "run-a"))


@pytest.mark.parametrize("protect", [True, False])
def test_planned_checkpoints_of_open_cells_are_kept_unless_that_is_refused(
    tmp_path: Path, checkpoints: list[Checkpoint], protect: bool
):
    config = config_of(tmp_path).model_copy(update={"protect": protect})
    with keeping(lambda reason: pytest.fail(reason)):
        first, *others = plan_cells.fn([config], checkpoints)
        assert [is_kept(cell) for cell in (first, *others)] == [protect] * 3
        release(first.uri)
        assert [is_kept(cell) for cell in (first, *others)] == [False, protect, protect]
    assert not any(map(is_kept, others))
    write_record(first.uri, make_record(**of_cell(first)))
    with keeping(lambda reason: pytest.fail(reason)):
        assert [is_kept(cell) for cell in plan_cells.fn([config], checkpoints)] == [False, protect, protect]


def is_kept(cell: Cell) -> bool:
    with kept_location(cell.folder.uri, cell.digests) as uri:
        return uri != cell.folder.uri


@pytest.mark.parametrize(("policy", "suite"), [({"protect": False}, {}), ({}, {"protect": False})])
def test_policy_and_its_suites_can_refuse_that_checkpoints_are_kept(
    tmp_path: Path, policy: dict[str, Any], suite: dict[str, Any]
):
    write_run(tmp_path / "run", [1])
    [kept] = reconciled(write_policy(tmp_path)).work
    [left] = reconciled(write_policy(tmp_path, {"suite": str(tmp_path / "facts.yaml"), **suite}, **policy)).work
    assert (kept.evaluation.config.protect, left.evaluation.config.protect) == (True, False)
    assert kept.evaluation.hash == left.evaluation.hash, "it changes no score"


@pytest.mark.parametrize("left", ["nothing", "config"])
def test_checkpoint_removed_while_it_is_planned_costs_itself_alone(
    tmp_path: Path, checkpoints: list[Checkpoint], left: str
):
    first = Path(checkpoints[0].uri)
    (first / "model.safetensors").unlink() if left == "config" else shutil.rmtree(first)
    updates: list[Update] = []
    with listening(updates.append):
        cells = plan_cells.fn([config_of(tmp_path)], checkpoints)
    assert [cell.reference.name for cell in cells] == ["run-a-200", "run-a-300"]
    assert any("run-a-100 is gone" in update.text for update in updates if isinstance(update, Event))
    shutil.rmtree(tmp_path / "run-a")
    with pytest.raises(CheckpointGone):
        plan_checkpoints([config_of(tmp_path)], checkpoints)


def test_attempt_at_a_removed_checkpoint_is_recorded_as_gone_and_raises_nothing(
    tmp_path: Path, checkpoints: list[Checkpoint]
):
    cell, other, third = plan_cells.fn([config_of(tmp_path)], checkpoints)
    shutil.rmtree(cell.reference.uri)
    harness = Harness(Commanded(made=unused), Path(sys.executable), None)
    record = run_cell.fn(cell, RunResources(lambda _: harness))
    assert record is not None and record == read_record(cell.uri)
    assert (record.status, record.infra_failures) == ("gone", None)

    def finish(*cells: Cell) -> None:
        for each in cells:
            write_record(each.uri, make_record(**of_cell(each)))

    finish(other)
    assert [each.status for each in conclude([cell, other])] == ["gone", "succeeded"]
    with pytest.raises(EvaluationIncomplete, match="gone"):
        conclude([cell])
    write_record(third.uri, make_record(status="infra_failed", **of_cell(third)))
    with pytest.raises(EvaluationIncomplete):
        conclude([cell, other, third])


@pytest.mark.parametrize("part", ["input of a mean", "base of an adapter"])
@pytest.mark.parametrize("left", ["nothing", "config"])
@pytest.mark.parametrize("planned", [False, True])
def test_checkpoint_is_gone_once_an_input_or_its_base_is_removed(tmp_path: Path, part: str, left: str, planned: bool):
    if part == "input of a mean":
        write_run(tmp_path / "run-a", [100, 200])
        checkpoints = find_checkpoints(f"mean({tmp_path / 'run-a'}@100+200)")
        removed = Path(checkpoints[0].inputs[0].uri)
    else:
        removed = tmp_path / "base"
        write_adapter(tmp_path / "run-a" / "step-100", base=removed, seed=1)
        checkpoints = find_checkpoints(str(tmp_path / "run-a"))
    config, harness = config_of(tmp_path), Harness(Commanded(made=unused), Path(sys.executable), None)
    config = config.model_copy(update={"model_path": checkpoints[0].uri, "protect": False})

    def remove() -> None:
        (removed / "model.safetensors").unlink() if left == "config" else shutil.rmtree(removed)

    if not planned:
        remove()
        assert plan_cells.fn([config], checkpoints) == []
        return
    [cell] = plan_cells.fn([config], checkpoints)
    remove()
    record = run_cell.fn(cell, RunResources(lambda _: harness))
    assert record is not None and (record.status, record.infra_failures) == ("gone", None)
    with (
        Staging(tmp_path / "staged", max_bytes=10**8, python=lambda: Path(sys.executable)) as staging,
        pytest.raises(CheckpointGone),
    ):
        staging.stage(cell.folder.uri, cell.digests)


def test_policy_names_what_is_gone_and_leaves_it_until_it_is_there_again(tmp_path: Path):
    run = write_run(tmp_path / "run", [1, 2])
    policy = write_policy(tmp_path)
    gone = record_for(policy, 1, status="gone", reason="its folder was removed")
    write_record(cell_of(tmp_path / "out", gone), gone)
    assert [cell.checkpoint.name for cell in reconciled(policy).work] == ["run-1", "run-2"], "its folder is there"
    away = shutil.move(run / "hf" / "step-1", tmp_path / "away")
    state = reconciled(policy)
    assert [cell.checkpoint.name for cell in state.every] == ["run-2"]
    assert [(cell.checkpoint.name, cell.state) for cell in state.gone] == [("run-1", "gone")]

    def status(*arguments: str) -> dict[str, Any]:
        return json.loads(invoke(["status", policy, "--json", *arguments]).stdout)

    [row, _] = status()["runs"][0]["checkpoints"]
    assert (row["checkpoint"], list(row["suites"].values())) == ("run-1", [{"gone": 1}])
    assert status()["open"] == 1
    gaps = {cell["checkpoint"]: (cell["state"], cell["reason"]) for cell in status("--gaps")["cells"]}
    assert gaps["run-1"] == ("gone", "its folder was removed")
    for arguments in (["status", policy], ["status", policy, "--gaps"]):
        shown = invoke(arguments, env={"COLUMNS": "120"}).stdout
        assert "run-1" in shown and "gone" in shown and "1 cell of removed checkpoints" in shown
    shutil.move(away, run / "hf" / "step-1")
    assert reconciled(policy).gone == []


def reconciled(policy: Path) -> Reconciliation:
    loaded = load_policy(str(policy))
    return reconcile(take_snapshot(loaded), loaded, now=time.time())


def test_report_and_gate_name_what_is_gone_without_a_failure(tmp_path: Path):
    gone = make_record(step=300, status="gone", reason="its folder was removed")
    publish(tmp_path, gone)
    only = judged_checkpoints(find_records(str(tmp_path)))
    assert not judge(Gate(), only, evaluation_path=str(tmp_path)).go, "nothing is known"
    for step in (100, 200):
        publish(tmp_path, make_record(step=step))
    verdict = judge(Gate(), judged_checkpoints(find_records(str(tmp_path))), evaluation_path=str(tmp_path))
    assert verdict.go and {reason.checkpoint for reason in verdict.reasons} == {"run-a-200"}
    page = render_report([make_record(step=100), gone], title="t")
    assert "1 gone" in page and "nothing failed" in page and "its folder was removed" in page
    assert alerts_in([make_record(step=100), gone]) == []
