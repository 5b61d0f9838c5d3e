"""Checkpoints with a label in place of a step: shown, found, gated, but points of no curve and no rule by number."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fakes.alerts import DROP, STEADY, run_of
from fakes.cli import invoke
from fakes.gates import judged_in_a_pass
from fakes.models import write_checkpoint, write_run
from fakes.policies import record_for, seen_checkpoint, wanted_evaluation, write_policy
from fakes.records import labelled, make_metric, make_record, make_samples, merged_record, publish, renamed
from flows.reconcile import load_policy
from pools.weights.model_files import digest_model_folder, inspect_model_folder
from resources.errors import BadInput
from tasks.checkpoints.checkpoint import CheckpointRule
from tasks.checkpoints.merged_listing import with_means
from tasks.policies.events import CompleteCheckpoint
from tasks.policies.policy import Policy
from tasks.policies.reconciliation import RunListing, reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.records.builds import build_changes
from tasks.records.details import MergedInput
from tasks.records.export import measured_rows
from tasks.records.index import RunRecords, indexed_records
from tasks.records.record import Record, find_records
from tasks.records.search import RecordFilter, records_of_checkpoints
from tasks.reports.artifacts import asset_keys
from tasks.reports.charts import chart_of, last_means
from tasks.reports.page import curves_svg, render_report, results_rows, results_table
from tasks.reports.plots import chart_svg
from tasks.reports.table import Results
from tasks.reports.viewer.boards import boards_of
from tasks.sinks.announcement import Announcement, metric_values
from tasks.sinks.hugging_face import HuggingFaceSink, send
from tasks.spec.labels import folder_of, order_of, place_in, slug_of
from tasks.verdicts.alerts import alerts_in
from tasks.verdicts.baselines import Baseline, baseline_of
from tasks.verdicts.gate import BaselineRule, Gate
from tasks.verdicts.judge import false_alarms_of, judge, judged_checkpoints, with_rejected

RULE = {"benchmark": "demo_facts", "metric": "acc", "not_worse_than": "previous", "by_more_than": 0.4}


@pytest.mark.parametrize(
    ("step", "label", "folder"),
    [
        (200, None, "step-200"),
        (0, None, "step-0"),
        (0, "best", "label-best"),
        (0, "epoch 2", "label-epoch-2"),
        (0, "a.b+c", "label-a.b+c"),
        (0, "epoch-2", "label-epoch-2"),
    ],
)
def test_place_of_a_checkpoint_is_a_folder_and_read_from_it(step: int, label: str | None, folder: str):
    assert folder_of(step, label) == folder
    assert place_in(folder) == (step, label and slug_of(label))


@pytest.mark.parametrize("label", ["最終", "a  b", "x" * 200, "a:b", "  "])
def test_label_that_is_no_part_of_a_path_gets_a_digest_and_stays_apart(label: str):
    assert slug_of(label) != slug_of(label + "2") and len(slug_of(label)) < 100
    assert slug_of(label).isascii() and " " not in slug_of(label)


@pytest.mark.parametrize("folder", ["index", "gates", "label-", "step-", "step-x", "steps-1", "step-" + "1" * 400])
def test_other_folders_of_a_run_are_no_place(folder: str):
    assert place_in(folder) is None


def test_labels_come_after_steps_in_natural_order_and_final_last():
    places = [(200, None), (0, "final"), (0, "epoch 10"), (0, None), (0, "best"), (0, "epoch 9"), (1000, None)]
    shown = [label or step for step, label in sorted(places, key=lambda place: order_of(*place))]
    assert shown == [0, 200, 1000, "epoch 9", "epoch 10", "best", "final"]


def published(folder: Path, *records: Record) -> list[Record]:
    for record in records:
        publish(folder, record, make_samples([1.0, 0.0] * 60))
    return list(records)


@pytest.fixture
def run(tmp_path: Path) -> list[Record]:
    steps = [make_record(step=step, metrics=(make_metric(value=step / 1000),)) for step in (100, 200)]
    return published(tmp_path, labelled("final", 0.7), *steps, labelled("best", 0.6), labelled("epoch 2", 0.4))


def test_records_of_labels_are_listed_indexed_and_found_by_label_and_name(tmp_path: Path, run: list[Record]):
    assert [item.record.checkpoint.short_place for item in find_records(str(tmp_path))] == [
        "100", "200", "epoch 2", "best", "final",
    ]  # fmt: skip
    assert {"run-a-best", "run-a-epoch-2"} <= indexed_records(str(tmp_path / "run-a")).done.keys()
    texts = ["run-a@best", "run-a-best", "run-a@epoch 2", "run-a@epoch-2", "run-a@200"]
    entries = records_of_checkpoints(texts, evaluation_path=str(tmp_path))
    assert [item.record.checkpoint.name for [item] in entries] == [
        "run-a-best", "run-a-best", "run-a-epoch-2", "run-a-epoch-2", "run-a-200",
    ]  # fmt: skip
    for text in ("run-a@0", "run-a@", "run-a@worst"):
        with pytest.raises(BadInput, match="RUN@LABEL"):
            records_of_checkpoints([text], evaluation_path=str(tmp_path))


def test_filters_by_step_and_exports_give_a_label_no_number(run: list[Record]):
    assert [each.checkpoint.step for each in RecordFilter(first_step=0, last_step=150).select(run)] == [100]
    rows = list(measured_rows(run, filters=RecordFilter()))
    assert {(row["step"], row["label"]) for row in rows} == {
        (100, None), (200, None), (None, "best"), (None, "epoch 2"), (None, "final"),
    }  # fmt: skip
    assert {row["step"] for row in results_rows(run)} == {100, 200, None}


def test_tables_name_labels_and_curves_draw_them_behind_the_axis(run: list[Record]):
    console = Console(file=(text := io.StringIO()), width=100)
    console.print(results_table(run))
    shown = text.getvalue()
    assert [shown.index(f" {place} ") for place in ("100", "200", "epoch 2", "best", "final")] == sorted(
        shown.index(f" {place} ") for place in ("100", "200", "epoch 2", "best", "final")
    )
    [column] = (results := Results(run)).columns
    chart = chart_of(results, column)
    [curve] = chart.curves
    assert [point.label or point.step for point in curve.points] == [100, 200, "epoch 2", "best", "final"]
    [change] = results.changes(column)
    assert (change.first_step, change.last_step) == (100, 200)
    svg = chart_svg(chart)
    assert ">best</text>" in svg and ">0</text>" not in svg, "no step 0 on the axis"
    line = next(part for part in svg.split("<path") if "stroke-width: 2;" in part)
    assert line.count("L") == 1, "a line through the two steps alone"
    page = render_report(run, title="t")
    assert "steps 100 to 200, epoch 2, best, final" in " ".join(page.split()) and '<th scope="row">best</th>' in page
    assert curves_svg([labelled("best"), labelled("final")]).count("training step") == 0


def test_many_labels_are_drawn_inside_of_the_picture():
    records = [make_record(step=100), *(labelled(f"epoch {number}") for number in range(40))]
    svg = curves_svg(records)
    places = [float(part.partition('"')[0]) for part in svg.split('<text x="')[1:]]
    assert max(places) < 400 and svg.count(">epoch") >= 3


def test_labels_are_no_point_of_a_trend_an_alert_or_a_change_of_versions():
    steady = run_of(STEADY)
    assert alerts_in([*steady, labelled("best", DROP)]) == []
    assert len(alerts_in([*run_of([*STEADY, DROP]), labelled("final", 0.6)])) == 1
    [column] = (results := Results([*steady, labelled("best", DROP)])).columns
    [without] = (plain := Results(steady)).columns
    assert last_means(results, column, "run-a", {}) == last_means(plain, without, "run-a", {})
    other = labelled("best", versions={**steady[0].versions, "vllm": "0.1"})
    numbers = [(record.checkpoint, record) for record in [*steady, other]]
    asked: dict[str, Any] = {"evaluator": "lm_evaluation_harness", "benchmark": "demo_facts", "metric": "acc"}
    assert build_changes(numbers, **asked, qualifications=()) == []


def test_viewer_sends_the_label_with_its_place_last(tmp_path: Path, run: list[Record]):
    [board] = boards_of(find_records(str(tmp_path)))
    assert [(each.step, each.label) for each in board.shown.checkpoints][1:] == [
        (200, None), (0, "epoch 2"), (0, "best"), (0, "final"),
    ]  # fmt: skip


def test_gate_judges_the_latest_step_every_label_or_a_label_by_its_name(tmp_path: Path, run: list[Record]):
    judged = judged_checkpoints(find_records(str(tmp_path)))
    of = {
        which: dict.fromkeys(
            each.checkpoint for each in judge(Gate(checkpoints=which), judged, evaluation_path="").reasons
        )
        for which in ("latest", "every")
    }
    assert list(of["latest"]) == ["run-a-200"]
    assert list(of["every"]) == ["run-a-100", "run-a-200", "run-a-epoch-2", "run-a-best", "run-a-final"]
    labels = [each for each in judged if each.label]
    assert {each.checkpoint for each in judge(Gate(), labels, evaluation_path="").reasons} == {"run-a-final"}
    file = tmp_path / "gate.yaml"
    file.write_text("rules: [{benchmark: demo_facts, metric: acc, at_least: 0.55}]")
    outcomes = [
        invoke(["gate", file, "--records", tmp_path, "--checkpoint", name]).exit_code
        for name in ("run-a@best", "run-a@epoch 2")
    ]
    assert outcomes == [0, 1]


def test_rejected_record_of_a_label_counts_for_that_label_alone():
    known = judged_checkpoints([])
    cells = {"/e/run-a/label-best/lm/x": "damaged", "/e/run-a/step-0/lm/x": "damaged", "/e/run-a/index/lm/x": "no"}
    every = with_rejected(known, cells, run="run-a", folder=None)
    assert [(each.name, each.step, each.label) for each in every] == [("run-a-best", 0, "best"), ("run-a-0", 0, None)]
    assert [each.name for each in with_rejected(known, cells, run="run-a", folder="label-best")] == ["run-a-best"]


@pytest.mark.parametrize(
    ("baseline", "of", "expected"),
    [
        ("previous", "best", "run-a-200"),
        ("mean of last 2", "best", "run-a-200"),
        ("previous", "step", "run-a-100"),
        ("run-a@best", "step", "run-a-best"),
        ("other@same step", "best", "run-a-best has no step"),
        ("other@same step", "step", "other-200"),
    ],
)
def test_baseline_of_a_label_is_a_step_and_a_label_only_by_its_name(
    tmp_path: Path, run: list[Record], baseline: str, of: str, expected: str
):
    published(tmp_path, make_record(step=200, run="other"), labelled("best", run="other"))
    checkpoint = next(
        r.checkpoint for r in run if r.checkpoint.label == "best" or (of == "step" and r.checkpoint.step == 200)
    )
    rule = BaselineRule.model_validate(RULE | {"not_worse_than": baseline})
    result = baseline_of(rule, checkpoint, evaluation_path=str(tmp_path))
    if isinstance(result, Baseline):
        [score] = result.scores.values()
        assert score.records[0].record.checkpoint.name == expected
    else:
        assert expected in result.found


def test_false_alarms_of_a_run_are_shared_by_steps_and_labels(tmp_path: Path):
    published(
        tmp_path, *(make_record(step=step) for step in range(100, 6500, 100)), labelled("best"), labelled("final")
    )
    shares = [
        false_alarms_of(Gate(), record.checkpoint, str(tmp_path))
        for record in (make_record(step=6400), labelled("best"), labelled("final"))
    ]
    assert shares[0] > shares[1] == shares[2]


def test_sinks_get_a_label_in_names_and_no_training_step(tmp_path: Path):
    record = labelled("best", 0.6)
    assert metric_values(record)["best/demo_facts/acc"] == 0.6
    assert all(name.startswith("best/") for name in metric_values(record))
    announcement = Announcement.of(record, publish(tmp_path, record))
    card = send(announcement, HuggingFaceSink(path=str(tmp_path / "cards")))
    assert card == str(tmp_path / "cards" / "run-a" / "label-best" / "README.md")
    assert "label-best" in asset_keys(record)[0] and "label-best" in asset_keys(record)[1]
    merged = merged_record((100, 200))
    assert merged.checkpoint.merge is not None
    inputs = [
        *merged.checkpoint.merge.inputs,
        MergedInput(uri="u", run="run-a", step=0, label="best", digest="d", weight=0),
    ]
    assert str(merged.checkpoint.merge.model_copy(update={"inputs": tuple(inputs)})).endswith("run-a 100, 200, best")


def labelled_listing(*rules: CheckpointRule, steps: tuple[int, ...] = (100, 200)) -> RunListing:
    labels = [
        seen_checkpoint(0, uri=f"/runs/run/{label}", name=f"run-{label}", label=label, listing=label)
        for label in ("best", "final")
    ]
    checkpoints = [*map(seen_checkpoint, steps), *labels]
    return RunListing("/runs/run", "run", [wanted_evaluation("a", *rules)], checkpoints, RunRecords({}, (), {}))


@pytest.mark.parametrize(
    ("rule", "expected", "left_out"),
    [
        ({"which": "all"}, ["run-100", "run-200", "run-best", "run-final"], 0),
        ({"which": "latest"}, ["run-200"], 3),
        ({"which": "first"}, ["run-100"], 3),
        ({"every_n_steps": 100}, ["run-100", "run-200"], 2),
        ({"steps": (0, 100)}, ["run-100"], 3),
        ({"which": "latest", "merged": "last 2"}, ["run-100-to-200-mean2"], 4),
    ],
)
def test_policy_takes_labels_by_the_rule_all_alone(rule: dict[str, Any], expected: list[str], left_out: int):
    listing = labelled_listing(CheckpointRule.model_validate(rule))
    taken = listing.taken_by(listing.evaluations[0].rules, final_step=None)
    means = with_means(listing.checkpoints, taken)
    listing = replace(listing, checkpoints=means)
    policy = Policy.model_validate(
        {"name": "p", "runs": ["/runs/run"], "suites": ["default_eval"], "evaluation_path": "/e"}
    )
    result = reconcile([listing], policy, now=1.0)
    assert [cell.checkpoint.name for cell in result.work] == expected
    assert result.left_out == left_out


def test_labels_of_two_runs_of_the_same_name_stay_with_their_run():
    def of(place: str) -> list[Record]:
        named = [("hf/step-100", None), ("checkpoint-best", "best"), ("", "final")]
        records = [labelled(label) if label else make_record(place=place) for _, label in named]
        return [
            renamed(
                record.model_copy(
                    update={
                        "checkpoint": record.checkpoint.model_copy(
                            update={
                                "uri": f"/{place}/run-a/{folder}".rstrip("/"),
                                "digest": sha256(f"{place} {folder}".encode()).hexdigest(),
                            }
                        )
                    }
                )
            )
            for record, (folder, _) in zip(records, named, strict=True)
        ]

    results = Results([*of("first"), *of("second")])
    assert results.runs == ["run-a (first/run-a)", "run-a (second/run-a)"]
    assert [checkpoint.short_place for checkpoint in results.checkpoints] == ["100", "best", "final"] * 2


@pytest.mark.parametrize(("judges", "expected"), [("every", ["run-100 GO", "run-best GO"]), ("latest", ["run-100 GO"])])
def test_own_gate_of_a_policy_keeps_a_verdict_on_a_label_and_judges_it_once(
    tmp_path: Path, judges: str, expected: list[str]
):
    write_checkpoint(write_run(tmp_path / "run", [100]) / "checkpoint-best", seed=3)
    rule = {"benchmark": "demo_facts", "metric": "acc", "at_least": 0.4}
    policy = write_policy(tmp_path, gate={"name": "release", "checkpoints": judges, "rules": [rule]})
    publish(tmp_path / "out", record_for(policy, 100))
    [listing] = take_snapshot(load_policy(str(policy)))
    [seen] = [each for each in listing.checkpoints if each.label == "best"]
    record = labelled("best", run="run", evaluation_hash=listing.evaluations[0].hash)
    changes = {"listing": seen.listing, "digest": digest_model_folder(inspect_model_folder(seen.uri)).checkpoint}
    record = record.model_copy(update={"checkpoint": record.checkpoint.model_copy(update=changes)})
    publish(tmp_path / "out", renamed(record))
    assert judged_in_a_pass(str(policy)) == expected
    assert judged_in_a_pass(str(policy)) == []
    names = [file.name.partition(".")[0] for file in sorted((tmp_path / "out" / "run" / "gates").rglob("*.json"))]
    assert names == [["label-best", "step-100"], ["step-100"]][judges == "latest"]
    row = json.loads(invoke(["status", policy, "--json"]).stdout)["runs"][0]["checkpoints"][-1]
    assert (row["checkpoint"], row["step"], row["label"]) == ("run-best", None, "best")


def test_event_of_a_label_has_no_step():
    labels = CompleteCheckpoint("/runs/run/best", "run", "run-best", 0, label="best").labels()
    assert labels["assay.label"] == "best" and "assay.step" not in labels
