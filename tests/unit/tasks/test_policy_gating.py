"""Verdicts of a gate on a policy's runs by the current records of its checkpoints, and views of open cells."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from fakes.policies import seen_checkpoint, wanted_evaluation
from fakes.records import make_metric, make_record, publish
from tasks.checkpoints.rules import CheckpointRule
from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.policies.gate import judged_of
from tasks.policies.policy import Policy, WantedEvaluation
from tasks.policies.reconciliation import OpenCell, Reconciliation, RunListing
from tasks.policies.views import gaps_table
from tasks.records.index import RunRecords
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import JudgedCheckpoint

LATEST, EVERY = Gate(), Gate(checkpoints="every")


def seen(step: int, **changes: Any) -> SeenCheckpoint:
    return seen_checkpoint(step, run="/r/run-a", **{"listing": "listing", "digest": f"{step:016x}" * 4, **changes})


def judged(
    folder: Path, gate: Gate, checkpoints: list[SeenCheckpoint], evaluations: list[WantedEvaluation]
) -> list[JudgedCheckpoint]:
    content = {"name": "p", "runs": ["/r/run-a"], "suites": ["demo"], "evaluation_path": str(folder)}
    listing = RunListing("/r/run-a", "run-a", evaluations, checkpoints, RunRecords({}, (), {}))
    return judged_of(gate, Policy.model_validate(content), listing)


def recorded(folder: Path, step: int, name: str) -> None:
    publish(folder, make_record(step=step, metrics=(make_metric(name),), evaluation_hash=f"hash-{name}"))


def test_gate_judges_the_latest_wanted_checkpoint_and_counts_its_cells_without_a_record(tmp_path: Path):
    for step in (100, 200):
        recorded(tmp_path, step, "facts")
    recorded(tmp_path, 200, "not_wanted")
    checkpoints = [seen(100), seen(200), seen(300, problems=("no config.json",)), seen(400, kind="levanter")]
    [newest] = judged(tmp_path, LATEST, checkpoints, [wanted_evaluation("facts"), wanted_evaluation("backwards")])
    assert (newest.name, newest.without_record) == ("run-a-200", 1)
    assert [item.record.benchmarks for item in newest.records] == [("facts",)]
    every = judged(tmp_path, EVERY, checkpoints, [wanted_evaluation("facts"), wanted_evaluation("backwards")])
    assert [checkpoint.step for checkpoint in every] == [100, 200]
    first = wanted_evaluation("facts", CheckpointRule(which="first"))
    [only] = judged(tmp_path, EVERY, checkpoints, [first])
    assert (only.name, only.without_record) == ("run-a-100", 0)


def test_record_of_a_checkpoint_as_it_was_before_does_not_count(tmp_path: Path):
    recorded(tmp_path, 100, "facts")
    [newest] = judged(tmp_path, LATEST, [seen(100, digest="another")], [wanted_evaluation("facts")])
    assert newest.records == () and newest.without_record == 1


def test_gaps_show_a_reason_with_brackets_as_it_is():
    cell = OpenCell("run", seen(1), wanted_evaluation("facts"), "failed", "no such file: [/data/x], [bold]")
    shown = io.StringIO()
    Console(file=shown, width=200).print(gaps_table(Reconciliation({}, [], [cell], 0)))
    assert "no such file: [/data/x], [bold]" in shown.getvalue()


def test_gaps_on_a_narrow_terminal_show_whole_names_and_all_of_the_reason():
    checkpoint = seen(120000, name="llama-1b-120000")
    cell = OpenCell(
        "run", checkpoint, wanted_evaluation("facts"), "waiting", "tokenizer_config_of_the_run.json is missing"
    )
    shown = io.StringIO()
    Console(file=shown, width=80).print(gaps_table(Reconciliation({}, [], [cell], 0)))
    assert "llama-1b-120000" in shown.getvalue()
    assert "…" not in shown.getvalue()
