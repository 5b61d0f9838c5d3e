"""Merged checkpoints of a policy: their selection, their start, and repeats after changed inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from fakes.policies import seen_checkpoint, wanted_evaluation
from tasks.checkpoints.checkpoint import CheckpointRule, eligible
from tasks.checkpoints.merged_listing import recorded_mean, with_means
from tasks.checkpoints.run_snapshot import SeenCheckpoint
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import Reconciliation, RunListing, State, reconcile
from tasks.policies.views import gaps_json, status_json
from tasks.records.index import Evaluated, RunRecords

NOTHING = RunRecords({}, (), {})
EVERY_SECOND = CheckpointRule(every_n_steps=2000, merged="last 3")
POLICY = Policy.model_validate({"name": "p", "runs": ["/r/a"], "suites": ["demo"], "evaluation_path": "/out"})


def checkpoint(step: int, **changes: Any) -> SeenCheckpoint:
    return seen_checkpoint(step, run="/r/a", **changes)


def run(*steps: int) -> list[SeenCheckpoint]:
    return [checkpoint(step) for step in steps]


def listing(
    checkpoints: list[SeenCheckpoint], *rules: CheckpointRule, records: RunRecords = NOTHING, **more: Any
) -> RunListing:
    evaluation = wanted_evaluation("some", *rules)
    seen = RunListing("/r/a", "a", [evaluation], checkpoints, records, **more)
    return replace(seen, checkpoints=with_means(checkpoints, seen.taken_by(rules, final_step=None)))


def decide(checkpoints: list[SeenCheckpoint], *rules: CheckpointRule, **more: Any) -> Reconciliation:
    return reconcile([listing(checkpoints, *rules, **more)], POLICY, now=1e6)


def states(reconciliation: Reconciliation) -> dict[str, State]:
    return {cell.checkpoint.name: cell.state for cell in (*reconciliation.work, *reconciliation.others)}


def recorded(mean: SeenCheckpoint, name: str | None = None) -> RunRecords:
    return RunRecords({name or mean.name: [Evaluated("d", mean.listing, frozenset({"hash-some"}))]}, (), {})


def means(run_listing: RunListing) -> list[SeenCheckpoint]:
    return [seen for seen in run_listing.checkpoints if seen.merged]


def test_rule_takes_the_last_checkpoints_up_to_each_step_where_there_are_so_many():
    steps = [1000, 2000, 3000, 4000, 5000, 6000]
    assert eligible([EVERY_SECOND], steps, final_step=None) == {(2000, 3000, 4000), (4000, 5000, 6000)}
    both = [EVERY_SECOND, CheckpointRule(which="latest")]
    assert eligible(both, steps, final_step=None) == {(2000, 3000, 4000), (4000, 5000, 6000), (6000,)}
    assert eligible([CheckpointRule(which="latest", merged="last 2")], steps, final_step=None) == {(5000, 6000)}
    assert eligible([CheckpointRule(which="final", merged="last 2")], steps, final_step=4000) == {(3000, 4000)}


@pytest.mark.parametrize("rule", [{"every_n_steps": 5, "merged": "last 1"}, {"which": "first", "merged": "last 2"}])
def test_rule_that_can_merge_nothing_is_refused(rule: dict[str, Any]):
    with pytest.raises(ValidationError):
        CheckpointRule.model_validate(rule)


def test_merged_cell_has_the_name_the_step_and_the_run_of_its_last_input_and_comes_without_those():
    reconciliation = decide(run(1000, 2000, 3000, 4000), EVERY_SECOND)
    [cell] = reconciliation.work
    assert cell.checkpoint.uri == "mean(/r/a/hf/step-2000, /r/a/hf/step-3000, /r/a/hf/step-4000)"
    assert (cell.run, cell.checkpoint.name, cell.checkpoint.step) == ("a", "a-2000-to-4000-mean3", 4000)
    assert reconciliation.left_out == 4


def test_merged_cell_waits_until_all_its_inputs_are_whole_and_says_for_which():
    half = [*run(1000, 2000), checkpoint(3000, problems=("no weights",)), checkpoint(4000)]
    reconciliation = decide(half, EVERY_SECOND, CheckpointRule(which="latest"))
    assert states(reconciliation) == {"a-2000-to-4000-mean3": "waiting", "a-4000": "work"}
    [waiting] = reconciliation.others
    assert waiting.reason == "a-3000: no weights"
    assert gaps_json(POLICY, reconciliation)["cells"][1]["reason"] == "a-3000: no weights"
    assert states(decide(run(1000, 2000, 3000, 4000), EVERY_SECOND)) == {"a-2000-to-4000-mean3": "work"}


def test_merged_cell_is_wanted_again_once_an_input_was_rewritten_or_came_late():
    steps = (1000, 2000, 3000, 4000)
    [mean] = means(listing(run(*steps), EVERY_SECOND))
    assert states(decide(run(*steps), EVERY_SECOND, records=recorded(mean))) == {}
    rewritten = [*run(1000, 2000), checkpoint(3000, listing="written again"), checkpoint(4000)]
    assert states(decide(rewritten, EVERY_SECOND, records=recorded(mean))) == {mean.name: "work"}

    [before] = means(listing(run(1000, 2000, 4000), EVERY_SECOND))
    assert before.name.startswith("a-1000-to-4000-mean3-")
    assert states(decide(run(*steps), EVERY_SECOND, records=recorded(before))) == {mean.name: "work"}


def test_merged_cell_is_not_made_again_when_inputs_are_deleted():
    [mean] = means(listing(run(1000, 2000, 3000, 4000), EVERY_SECOND))
    rotated = run(1000, 2000, 4000)  # its mean would differ
    reconciliation = decide(rotated, EVERY_SECOND, records=recorded(mean))
    assert (states(reconciliation), reconciliation.done_count) == ({}, 1)
    assert states(decide(rotated, EVERY_SECOND)) == {"a-1000-to-4000-mean3-" + _digest(rotated): "work"}


def _digest(checkpoints: list[SeenCheckpoint]) -> str:
    [mean] = means(listing(checkpoints, EVERY_SECOND))
    return mean.name.rpartition("-")[2]


def test_merged_cell_of_checkpoints_in_another_layout_is_not_served_and_says_why():
    native = [checkpoint(step, kind="levanter") for step in (2000, 3000, 4000)]
    [cell] = decide(native, EVERY_SECOND).others
    assert cell.state == "not_served" and "exports to Hugging Face format" in (cell.reason or "")


def test_merged_cell_is_of_exports_alone_where_the_run_has_any():
    exports, latest = run(100, 200, 300), CheckpointRule(which="latest", merged="last 3")
    native = [checkpoint(step, kind="levanter") for step in (150, 250, 350)]
    every = CheckpointRule(every_n_steps=100, merged="last 3")
    reconciliation = decide(sorted([*exports, *native], key=lambda seen: seen.step), every, latest)
    assert states(reconciliation) == {"a-100-to-300-mean3": "work"}


def test_merged_cell_of_a_step_with_two_checkpoints_waits_unless_unambiguous():
    again = checkpoint(4000, uri="/r/a/hf/checkpoint-4000")
    [cell] = decide([*run(2000, 3000, 4000), again], EVERY_SECOND).others
    assert cell.state == "waiting" and f"/r/a/hf/step-4000 and {again.uri}" in (cell.reason or "")
    for kind in ("huggingface", "levanter"):
        half = replace(again, kind=kind, problems=("no weights",))
        merged_cells = [
            cell for cell in decide([*run(2000, 3000, 4000), half], EVERY_SECOND).work if cell.checkpoint.merged
        ]
        assert [cell.checkpoint.uri.count("step-") for cell in merged_cells] == [3]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("a-1000-to-3000-mean3", (1000, 2000, 3000)),
        ("a-b-1-to-9-mean3-0f3a2c", (1, 9)),
        ("a-3000", None),
        ("a-1000-to-3000-ema3-0.9", None),
    ],
)
def test_recorded_mean_tells_its_inputs_by_its_name(name: str, known: tuple[int, ...] | None):
    mean = recorded_mean(name)
    assert (mean and mean.known) == known


def test_status_has_a_row_for_each_merged_checkpoint_and_each_written():
    seen = listing(run(2000, 3000, 4000), EVERY_SECOND, CheckpointRule(which="latest"))
    [content] = status_json(POLICY, [seen], reconcile([seen], POLICY, now=1e6))["runs"]
    rows = {row["checkpoint"]: row["suites"] for row in content["checkpoints"]}
    assert rows["a-2000-to-4000-mean3"] == rows["a-4000"] == {"some": {"work": 1}}
    assert rows["a-3000"] == {}
