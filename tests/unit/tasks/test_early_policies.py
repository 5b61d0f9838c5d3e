"""Policies with a gate that decides early: cells that are still evaluated in full, and cells that a verdict settles."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fakes.alerts import known_alert
from fakes.cli import invoke
from fakes.gates import judged_in_a_pass
from fakes.models import write_run
from fakes.policies import record_for, seen_checkpoint, wanted_evaluation, write_policy, write_suite
from fakes.records import make_metric, make_record, make_samples, publish
from flows.reconcile import load_policy, reconcile_policy
from resources.errors import BadInput
from tasks.checkpoints.checkpoint import CheckpointRule
from tasks.policies.early import EarlyDecisions, EarlyKey
from tasks.policies.policy import Policy, WantedEvaluation
from tasks.policies.reconciliation import Reconciliation, RunListing, reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.records.index import Evaluated, RunRecords
from tasks.records.verdicts import EarlyScore, EarlyVerdict
from tasks.verdicts.alert_files import acknowledge, write_first
from tasks.verdicts.gate import Gate

RULE = {"benchmark": "demo_facts", "metric": "acc", "not_worse_than": "previous", "by_more_than": 0.1}
NAMED = {**RULE, "not_worse_than": "other@100"}
NOTHING = RunRecords({}, (), {})


def early_gate(rule: dict[str, Any] = RULE, **fields: Any) -> Gate:
    return Gate.model_validate({"decide": "early", "whole_every": 3, "rules": [rule], **fields})


def done(*steps: int) -> RunRecords:
    states = {f"run-{n}": [Evaluated(f"digest-{n}", f"listing-{n}", frozenset({"hash-a"}))] for n in steps}
    return RunRecords(states, (), {})


def decide(
    steps: Iterable[int],
    *evaluations: WantedEvaluation,
    gate: Gate | None = None,
    records: RunRecords = NOTHING,
    words: dict[int, str] | None = None,
    alerted: Sequence[str] = (),
) -> Reconciliation:
    content = {"name": "p", "runs": ["/runs/run"], "suites": ["demo"], "evaluation_path": "/out"}
    kept = {EarlyKey(step, "hash-a", f"listing-{step}"): word for step, word in (words or {}).items()}
    early = EarlyDecisions(gate or early_gate(), "/out", kept, frozenset(alerted))
    checkpoints = [seen_checkpoint(step) for step in steps]
    listing = RunListing("/runs/run", "run", evaluations or (wanted_evaluation(),), checkpoints, records, early=early)
    return reconcile([listing], Policy.model_validate(content), now=1e6)


def ways(reconciliation: Reconciliation) -> dict[int, str]:
    """Returns state and kind (early or whole) of each open cell, by step."""
    cells = (*reconciliation.work, *reconciliation.others)
    return {cell.checkpoint.step: f"{cell.state} {'early' if cell.early else 'whole'}" for cell in cells}


def test_first_checkpoint_and_each_so_many_th_after_it_is_whole():
    reconciliation = decide(range(10, 80, 10), gate=early_gate(NAMED))
    whole, early = "work whole", "work early"
    assert ways(reconciliation) == {10: whole, 20: early, 30: early, 40: whole, 50: early, 60: early, 70: whole}
    tenth = decide(range(1, 23), gate=early_gate(NAMED, whole_every=None))
    assert [cell.checkpoint.step for cell in tenth.work if not cell.early] == [1, 11, 21]


def test_checkpoints_are_counted_for_each_evaluation_by_its_own_rules():
    reconciliation = decide(
        range(1, 10), wanted_evaluation("a", CheckpointRule(every_n_steps=2)), gate=early_gate(NAMED)
    )
    assert {step for step, way in ways(reconciliation).items() if way == "work whole"} == {2, 8}


@pytest.mark.parametrize("steps", [range(5, 8), range(1, 8), range(5, 12)])
def test_choice_stays_where_checkpoints_are_deleted_or_come_later(steps: range):
    reconciliation = decide(steps, gate=early_gate(NAMED), records=done(1, 4), words={2: "not-worse", 3: "not-worse"})
    assert [ways(reconciliation)[step] for step in (5, 6, 7)] == ["work early", "work early", "work whole"]


def test_cell_behind_a_gate_is_held_until_earlier_whole_cells_end():
    held = ways(decide([1, 2, 3, 4, 5]))
    assert held == {1: "work whole", 2: "held early", 3: "held early", 4: "work whole", 5: "held early"}
    assert ways(decide([1, 2, 3, 4, 5], records=done(1))) | {4: ""} == {
        2: "work early",
        3: "work early",
        4: "",
        5: "held early",
    }


def test_early_verdict_settles_a_cell_unless_it_is_an_alarm():
    words = {2: "not-worse", 3: "worse", 5: "unlike", 6: "not-worse"}
    reconciliation = decide(range(1, 7), gate=early_gate(NAMED), records=done(1, 4), words=words, alerted=["run-6"])
    assert ways(reconciliation) == {2: "decided_early early", 3: "work whole", 5: "work whole", 6: "work whole"}
    reasons = {cell.checkpoint.step: cell.reason for cell in (*reconciliation.work, *reconciliation.others)}
    assert reasons == {
        2: "not worse",
        3: "decided early: worse; to be evaluated whole",
        5: "decided early: cannot be compared; to be evaluated whole",
        6: "an alert is open, to be evaluated whole",
    }
    assert ways(decide([1, 2], records=done(1), alerted=["run-2"])) == {2: "work whole"}, "without a verdict, too"


def test_verdict_is_on_the_checkpoint_as_it_was():
    listing = RunListing("/runs/run", "run", (wanted_evaluation(),), [seen_checkpoint(2, listing="again")], done(1))
    kept = {EarlyKey(2, "hash-a", "listing-2"): "not-worse"}
    content = {"name": "p", "runs": ["/runs/run"], "suites": ["demo"], "evaluation_path": "/out"}
    early = replace(listing, early=EarlyDecisions(early_gate(), "/out", kept))
    assert ways(reconcile([early], Policy.model_validate(content), now=1e6)) == {2: "work early"}


def test_gate_with_whole_every_must_decide_early():
    with pytest.raises(ValueError, match=r"decide: early. with whole_every, found .decide: whole"):
        Gate.model_validate({"rules": [RULE], "whole_every": 10})
    with pytest.raises(ValueError, match="only rules with not_worse_than"):
        Gate.model_validate({"decide": "early", "whole_every": 10})


# On disk


@dataclass(frozen=True)
class Watched:
    folder: Path

    @property
    def policy(self) -> str:
        return str(self.folder / "policy.yaml")

    @property
    def run(self) -> str:
        return str(self.folder / "out" / "run")

    def write(self, *, evaluation: dict[str, Any] | None = None, **fields: Any) -> None:
        suite = write_suite(self.folder, "s", "demo_facts", **(evaluation or {}))
        gate = {"decide": "early", "whole_every": 3, "checkpoints": "every", "rules": [RULE]}
        write_policy(self.folder, suite, **{"gate": gate, **fields})

    def listing(self) -> RunListing:
        [listing] = take_snapshot(load_policy(self.policy))
        return listing

    def publish(self, step: int, right: int, *, early: bool = False) -> None:
        """Publishes a record of a checkpoint with 200 questions, or an early verdict on it after 40 of them."""
        record = record_for(Path(self.policy), step, metrics=(make_metric(value=right / 200, n=200),))
        if not early:
            publish(self.folder / "out", record, make_samples([1.0] * right + [0.0] * (200 - right)))
            return
        value = right / 200
        score = EarlyScore(
            benchmark="demo_facts",
            metric="acc",
            rule=early_gate().rules[0].words,
            baseline="run-100",
            baseline_value=0.9,
            margin=0.1,
            higher_is_better=True,
            alpha=0.05,
            verdict="not worse" if value > 0.8 else "worse",
            asked=40,
            questions=200,
            estimate=value,
            low=value - 0.05,
            high=value + 0.05,
        )
        verdict = EarlyVerdict(
            cell=record.cell,
            checkpoint=record.checkpoint,
            evaluator=record.evaluator,
            benchmarks=record.benchmarks,
            evaluation_hash=record.evaluation_hash,
            wanted="wanted",
            gate="gate",
            alpha=0.05,
            scores=(score,),
            asked=40,
            questions=200,
            attempt=f"attempt-{right}",
            created=record.created,
        )
        early_decisions = self.listing().early
        assert early_decisions is not None
        for _ in range(2):  # a second writer leaves it
            early_decisions.keep(verdict)

    def judge(self) -> list[str]:
        """Returns the verdicts of a pass by checkpoint, and `refused` where NO-GO is raised."""
        return judged_in_a_pass(self.policy)

    def ask(self, *command: str) -> dict[str, Any]:
        done = invoke([*command, self.policy, "--json"], catch_exceptions=False)
        return json.loads(done.stdout)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    write_run(tmp_path / "run", [100, 200, 300])
    watched_run = Watched(tmp_path)
    watched_run.write()
    return watched_run


def test_gate_takes_an_early_verdict_once_and_the_whole_where_it_comes_later(watched: Watched):
    watched.publish(100, 180)
    watched.publish(200, 190, early=True)
    assert watched.judge() == ["run-100 GO", "run-200 GO"]
    assert watched.judge() == []
    [_, kept] = sorted((watched.folder / "out" / "run" / "gates").glob("*/step-*.json"))
    words = "decided early at 40 of 200 questions (α = 0.05 per command and baseline): not worse"
    assert any(words in reason["found"] for reason in json.loads(kept.read_bytes())["reasons"])
    watched.publish(200, 100)
    assert watched.judge() == ["run-200 NO-GO", "refused"], "the whole has other things to say"


def test_checkpoint_that_was_written_again_is_judged_again_by_its_own_early_verdict(watched: Watched):
    watched.publish(100, 180)
    watched.publish(200, 190, early=True)
    assert watched.judge() == ["run-100 GO", "run-200 GO"]
    for file in (watched.folder / "run" / "hf" / "step-200").iterdir():
        os.utime(file, (1, 1))
    assert watched.judge() == [] and watched.ask("status")["runs"][0]["checkpoints"][1]["gate"] is None
    watched.publish(200, 195, early=True)
    assert watched.judge() == ["run-200 GO"]


def test_checkpoint_that_is_worse_early_is_judged_once_by_the_whole(watched: Watched):
    watched.publish(100, 180)
    watched.publish(200, 80, early=True)
    assert watched.judge() == ["run-100 GO"]
    watched.publish(200, 80)
    assert watched.judge() == ["run-200 NO-GO", "refused"]
    assert watched.judge() == []


def test_views_show_what_was_decided_early_with_its_word(watched: Watched):
    watched.publish(100, 180)
    watched.publish(200, 190, early=True)
    [row] = [row for row in watched.ask("status")["runs"][0]["checkpoints"] if row["step"] == 200]
    assert row["suites"] == {"s": {"decided_early": 1}}
    [gap] = [cell for cell in watched.ask("status", "--gaps")["cells"] if cell["step"] == 200]
    assert (gap["state"], gap["reason"], gap["decide"]) == ("decided_early", "not worse", "early")
    assert [(cell["step"], cell["decide"]) for cell in watched.ask("status", "--plan")["cells"]] == [(300, "early")]
    shown = invoke(["status", watched.policy], env={"COLUMNS": "120"}).stdout
    assert "decided early: not worse" in shown
    assert "1 cell done, 1 decided early, 1 to do, 0 waiting for something." in shown


def test_status_expects_the_cost_of_cells_that_wait_for_a_baseline_too(watched: Watched):
    back = {
        "decide": "early",
        "whole_every": 3,
        "checkpoints": "every",
        "rules": [{**RULE, "not_worse_than": "previous"}],
    }
    watched.write(gate=back)
    states = {cell["step"]: cell["state"] for cell in watched.ask("status", "--gaps")["cells"]}
    assert states == {100: "work", 200: "held", 300: "held"}
    assert watched.ask("status")["cost"]["expected"]["cells"] == 3


def test_open_alert_has_a_decided_cell_evaluated_whole_until_it_is_acknowledged(watched: Watched):
    watched.publish(100, 180)
    watched.publish(200, 190, early=True)
    known = known_alert(make_record(step=200, run="run"))
    assert write_first(watched.run, known)
    assert [(cell["step"], cell["decide"]) for cell in watched.ask("status", "--plan")["cells"]] == [(200, "whole")]
    acknowledge(watched.run, known.alert, note=None)
    assert [(cell["step"], cell["decide"]) for cell in watched.ask("status", "--plan")["cells"]] == [(300, "early")]


def test_evaluator_and_work_pools_are_refused_by_name(watched: Watched):
    watched.write(dispatch="work_pools")
    with pytest.raises(BadInput, match="dispatch: work_pools"):
        watched.listing()
    watched.write(evaluation={"evaluator": "levanter_lm_evaluation_harness"}, base_url=None)
    with pytest.raises(BadInput, match=r"s: demo_facts by Levanter.*: its program asks all questions at once"):
        watched.listing()


def test_another_gate_does_not_judge_a_policy_that_decides_early(watched: Watched):
    with pytest.raises(BadInput, match=r"judged by another gate, strict[\s\S]*decide: early"):
        reconcile_policy.fn(load_policy(watched.policy), Gate(name="strict"))
