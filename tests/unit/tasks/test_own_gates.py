"""Gates of policies: verdicts of each pass, on current records alone, and views of open cells."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from fakes.cli import invoke
from fakes.gates import judged_in_a_pass
from fakes.models import write_run
from fakes.policies import record_for, seen_checkpoint, wanted_evaluation, write_policy, write_suite
from fakes.records import FIRST, cell_of, make_metric, make_record, make_samples, publish
from flows.reconcile import load_policy
from resources.errors import AssayError, BadInput, RecordStatus
from tasks.checkpoints.checkpoint import CheckpointRule
from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.errors import EvaluationIncomplete, EvaluationInterrupted
from tasks.policies.gate import judged_of
from tasks.policies.policy import Policy, WantedEvaluation, check_policy_paths, own_gate
from tasks.policies.reconciliation import OpenCell, Reconciliation, RunListing
from tasks.policies.views import gaps_table
from tasks.records.index import RunRecords, indexed_records
from tasks.records.record import SinkState, find_records, note_sinks, write_record
from tasks.records.samples import SAMPLES_NAME, write_samples
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import JudgedCheckpoint

AT_LEAST = {"benchmark": "demo_facts", "metric": "acc", "at_least": 0.5}
PREVIOUS = {"benchmark": "demo_facts", "metric": "acc", "not_worse_than": "previous", "by_more_than": 0.2}
INTERRUPTED = EvaluationInterrupted(expected="a record", found="none", remedy="again")
INCOMPLETE = EvaluationIncomplete(expected="a record", found="failed", remedy="look")


@dataclass(frozen=True)
class Watched:
    folder: Path
    _cells: dict[tuple[int, int], Path] = field(default_factory=dict)

    @property
    def policy(self) -> str:
        return str(self.folder / "policy.yaml")

    @property
    def verdicts(self) -> list[Path]:
        return sorted((self.folder / "out" / "run" / "gates").rglob("*.json"))

    def write(self, *rules: dict[str, Any], suites: Sequence[str] = ("facts",), **gate: Any) -> None:
        own = {"name": "release", "checkpoints": "every", "rules": list(rules), **gate}
        written = [write_suite(self.folder, suite, f"demo_{suite}") for suite in suites]
        write_policy(self.folder, *written, runs=[str(self.folder / "run")], gate=own)

    def publish(self, step: int, right: int, *, status: RecordStatus = "succeeded", number: int = 1, suite: int = 0):
        """Publishes a record as an evaluation of a checkpoint does: `right` of 400 questions correct."""
        name = ("demo_facts", "demo_backwards")[suite]
        record = record_for(
            Path(self.policy),
            step,
            suite=suite,
            status=status,
            metrics=(make_metric(name, right / 400, n=400),),
            benchmarks=(name,),
            attempt=f"attempt-{number}",
            created=FIRST + timedelta(seconds=number),
        )
        cell = self._cells[step, suite] = Path(cell_of(self.folder / "out", record))
        shutil.rmtree(cell, ignore_errors=True)
        (cell / record.attempt).mkdir(parents=True)
        scores = [1.0] * right + [0.0] * (400 - right)
        write_samples(cell / record.attempt / SAMPLES_NAME, make_samples(scores, benchmark=name))
        write_record(str(cell), record)

    def cell(self, step: int, suite: int = 0) -> Path:
        return self._cells[step, suite]

    def judge(self, error: AssayError | None = None) -> list[str]:
        """Returns the verdicts of a pass by checkpoint; NO-GO is raised after that."""
        return judged_in_a_pass(self.policy, error)

    def status(self) -> list[str | None]:
        done = invoke(["status", self.policy, "--json"], catch_exceptions=False)
        return [row["gate"] for row in json.loads(done.stdout)["runs"][0]["checkpoints"]]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    write_run(tmp_path / "run", [100, 200, 300])
    watched_run = Watched(tmp_path)
    watched_run.write(AT_LEAST)
    return watched_run


def test_settled_checkpoints_are_judged_once_and_unsettled_checkpoints_later(watched: Watched):
    assert watched.judge() == []
    watched.publish(100, 300)
    watched.publish(200, 100)
    assert watched.judge() == ["run-100 GO", "run-200 NO-GO", "refused"]
    assert watched.judge() == [], "NO-GO is said once"
    assert watched.status() == ["GO", "NO-GO", None]
    watched.publish(300, 300)
    assert watched.judge() == ["run-300 GO"]
    assert watched.status() == ["GO", "NO-GO", "GO"]


def test_kept_verdict_has_its_reasons_and_is_taken_for_no_record(watched: Watched):
    watched.publish(200, 100)
    watched.judge()
    [file] = watched.verdicts
    kept = json.loads(file.read_bytes())
    assert (kept["verdict"], kept["checkpoint"], kept["step"], kept["policy"]) == ("NO-GO", "run-200", 200, "p")
    assert any("demo_facts · acc = 0.250" in reason["found"] for reason in kept["reasons"])
    assert len(find_records(str(watched.folder / "out"))) == 1
    assert list(indexed_records(str(watched.folder / "out" / "run"), use_index=False).done) == ["run-200"]


def test_records_made_again_are_judged_again_and_sink_notes_are_not(watched: Watched):
    watched.publish(100, 300)
    assert watched.judge() == ["run-100 GO"]
    note_sinks(str(watched.cell(100)), {"wandb:x": SinkState(status="failed", reason="away", at=FIRST)})
    assert watched.judge() == []
    watched.publish(100, 100, number=2)
    assert watched.status()[0] is None, "a verdict is on the records that it was given on"
    assert watched.judge() == ["run-100 NO-GO", "refused"]


def test_records_that_the_policy_does_not_want_bring_no_second_verdict(watched: Watched):
    watched.publish(100, 300)
    assert watched.judge() == ["run-100 GO"]
    watched.write(AT_LEAST, suites=("facts", "backwards"))
    watched.publish(100, 100, suite=1, number=3)
    watched.write(AT_LEAST)
    assert watched.judge() == []
    assert watched.status()[0] == "GO"


def test_suite_added_later_and_another_gate_are_judged_for_themselves(watched: Watched):
    watched.publish(100, 300)
    assert watched.judge() == ["run-100 GO"]
    watched.write(AT_LEAST | {"at_least": 0.8})
    assert watched.judge() == ["run-100 NO-GO", "refused"]
    watched.write(AT_LEAST, suites=("facts", "backwards"))
    assert watched.judge() == [] and watched.status()[0] is None
    watched.publish(100, 300, suite=1, number=2)
    assert watched.judge() == ["run-100 GO"]


def test_checkpoint_that_was_copied_between_two_evaluations_is_judged_by_both(watched: Watched):
    watched.write(AT_LEAST, suites=("facts", "backwards"))
    watched.publish(100, 300)
    for file in (watched.folder / "run" / "hf" / "step-100").iterdir():
        os.utime(file, (1, 1))
    watched.publish(100, 300, suite=1)
    assert watched.judge() == ["run-100 GO"]
    assert watched.judge() == []


def test_failure_by_itself_is_settled_and_one_of_machines_or_a_cancelled_cell_is_not(watched: Watched):
    watched.publish(100, 0, status="infra_failed")
    watched.publish(200, 0, status="failed")
    done = invoke(["cancel", watched.policy, "--cell", "run-300:facts"], catch_exceptions=False)
    assert done.exit_code == 0
    assert watched.judge() == ["run-200 NO-GO", "refused"]
    watched.write(AT_LEAST, max_failed=1)
    assert watched.judge() == ["run-200 NO-GO", "refused"], "its score is missing all the same"


def test_gate_of_the_latest_checkpoint_judges_the_latest_that_is_settled(watched: Watched):
    watched.write(AT_LEAST, checkpoints="latest")
    watched.publish(100, 100)
    watched.publish(200, 300)
    assert watched.judge() == ["run-200 GO"]
    watched.publish(300, 300)
    assert watched.judge() == ["run-300 GO"]
    assert watched.status() == [None, "GO", "GO"]


def test_gate_that_looks_back_waits_for_earlier_checkpoints_that_are_to_be_evaluated(watched: Watched):
    watched.write(PREVIOUS)
    watched.publish(200, 300)
    assert watched.judge() == [], "run-100 is to be evaluated yet"
    watched.publish(100, 300)
    assert watched.judge() == ["run-100 GO", "run-200 GO"]
    watched.publish(300, 100)
    assert watched.judge() == ["run-300 NO-GO", "refused"]


def test_errors_of_the_pass_are_raised_where_the_gate_does_not_answer_for_them(watched: Watched):
    with pytest.raises(EvaluationIncomplete):
        watched.judge(INCOMPLETE)
    watched.publish(100, 300)
    with pytest.raises(EvaluationInterrupted):
        watched.judge(INTERRUPTED)
    watched.publish(200, 300)
    assert watched.judge(INCOMPLETE) == ["run-200 GO"]
    watched.publish(300, 100)
    assert watched.judge(INTERRUPTED) == ["run-300 NO-GO", "refused"], "it is said once, the other again"


def test_gate_file_is_read_and_a_relative_path_is_refused(watched: Watched, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(watched.folder)
    content = yaml.safe_load(Path(watched.policy).read_text())
    Path("gate.yaml").write_text(yaml.safe_dump(content["gate"]))
    policy = load_policy(watched.policy)
    check_policy_paths(policy)
    by_file = policy.model_copy(update={"gate": "gate.yaml"})
    assert own_gate(by_file) == policy.gate
    with pytest.raises(BadInput, match=r"gate\.yaml"):
        check_policy_paths(by_file)
    with pytest.raises(BadInput, match="not there"):
        own_gate(policy.model_copy(update={"gate": str(watched.folder / "none.yaml")}))
    assert type(policy).model_validate(policy.model_dump(mode="json")) == policy, "it travels whole"


def test_status_for_people_has_a_column_of_verdicts(watched: Watched):
    watched.publish(100, 300)
    watched.judge()
    shown = invoke(["status", watched.policy], env={"COLUMNS": "120"})
    assert "Gate" in shown.stdout
    [line] = [line for line in shown.stdout.splitlines() if "run-100" in line]
    assert line.split("│")[3].strip() == "GO"


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
