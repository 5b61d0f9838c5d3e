"""Smooth scores of multiple choice: their computation, and their display next to records without them."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tasks
from fakes.cli import invoke
from fakes.lm_eval import smooth_by_hand
from fakes.records import make_metric, make_record, publish
from resources.errors import BadInput
from tasks.records.builds import Qualification
from tasks.records.provenance import versions
from tasks.records.record import Metric, Record, find_records, read_records
from tasks.records.samples import Sample
from tasks.reports.artifacts import table_rows
from tasks.reports.page import curves_svg, render_report
from tasks.sinks.announcement import Announcement, metric_values
from tasks.sinks.hugging_face import with_results
from tasks.verdicts.gate import Gate
from tasks.verdicts.judge import Verdict, judge, judged_checkpoints
from tasks.verdicts.qualification import qualify

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(tasks.__path__[0]) / "evaluators" / "programs")
    program: Any = importlib.import_module("choice_scoring")
QUESTIONS = 60
SMOOTH = {"bpb": False, "choice_prob_norm": True}


@pytest.mark.parametrize("right", range(3))
def test_scores_are_bits_per_byte_and_a_softmax_of_them(right: int):
    texts, weighed = ["wax", "日本の蜂", "ein Bär"], [-7.25, -31.5, -12.0]
    assert program.smooth_scores(weighed, texts, right) == pytest.approx(smooth_by_hand(texts, weighed, right))
    assert program.smooth_scores([-8 * np.log(2)], ["wood"], 0) == pytest.approx({"bpb": 2.0, "choice_prob_norm": 1.0})


def test_scores_of_impossible_and_empty_choices_are_numbers():
    scores = program.smooth_scores([-90_000.0, -90_001.0], ["A", "B"], 0)
    assert scores["choice_prob_norm"] == pytest.approx(1 / (1 + np.exp(-1 / np.log(2))))
    assert program.smooth_scores([-1.0, -1.0], ["", "B"], 0)["choice_prob_norm"] == 0.5


def answered(step: int, *, smooth: bool, shift: float = 0.0) -> list[Sample]:
    """Returns samples that the model learns, with half of them right at every step."""
    asked, drawn = np.random.default_rng(1).gamma(4.0, 0.25, QUESTIONS), np.random.default_rng(step)
    bits = asked - step / 1000 + shift + drawn.normal(0.0, 0.02, QUESTIONS)
    return [
        Sample(
            benchmark="demo_facts",
            id=str(number),
            prompt=f"Question {number}?",
            output="a",
            target="a",
            scores={"acc": float(number % 2)} | ({"bpb": bit, "choice_prob_norm": np.exp(-bit) / 2} if smooth else {}),
            log_likelihoods=(-bit, -2.0),
        )
        for number, bit in enumerate(map(float, bits))
    ]


def numbers(samples: Sequence[Sample], benchmark: str = "demo_facts") -> tuple[Metric, ...]:
    return tuple(
        make_metric(
            benchmark,
            float(np.mean([sample.scores[name] for sample in samples])),
            name=name,
            n=QUESTIONS,
            higher_is_better=SMOOTH.get(name, True),
        ).model_copy(update={"smooth": name in SMOOTH})
        for name in samples[0].scores
    )


def put(folder: Path, step: int, *, smooth: bool = True, shift: float = 0.0, **others: Any) -> Record:
    samples = answered(step, smooth=smooth, shift=shift)
    record = make_record(step=step, metrics=numbers(samples), **others)
    publish(folder, record, samples)
    return record


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    for step, smooth in ((100, False), (200, True), (300, True)):
        put(tmp_path, step, smooth=smooth)
    return tmp_path


def shown(*arguments: str) -> str:
    done = invoke(arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_table_shows_smooth_scores_where_they_are_named_and_older_records_without(mixed: Path):
    assert not re.search("bpb|choice_prob", shown("records", str(mixed)) + shown("records", str(mixed), "--all"))
    named = shown("records", str(mixed), "--metric", "bpb", "--metric", "choice_*")
    assert {"bpb", "choice_prob_norm", "200", "300"} <= set(named.split())
    every = shown("records", str(mixed), "--metric", "*")
    assert {"acc", *SMOOTH} <= set(every.split())
    [older] = [line for line in every.splitlines() if line.split()[:1] == ["100"]]
    assert older.split()[-2:] == ["–", "–"], "it has none, and has not failed"


def test_export_has_all_of_them_and_says_which_are_smooth(mixed: Path):
    rows = [json.loads(line) for line in shown("records", str(mixed), "--format", "jsonl").splitlines()]
    assert [(row["step"], row["metric"]) for row in rows if row["smooth"]] == [
        (step, name) for step in (200, 300) for name in SMOOTH
    ]
    assert [row["step"] for row in rows if row["metric"] == "acc"] == [100, 200, 300]


def test_report_has_them_folded_and_shows_no_older_record_as_failed(mixed: Path):
    given = [*read_records(str(mixed)), make_record(step=400, status="withheld")]
    page = render_report(given, title="run-a")
    top, folded = page.split("<details><summary>Smooth scores: ")
    assert "bpb" not in top.partition("</style>")[2] and "bpb" in folded
    table = folded.split("<summary>Smooth scores</summary>")[1]
    for step, gaps, badges in ((100, 2, 0), (200, 0, 0), (300, 0, 0), (400, 0, 2)):
        row = table.split(f'<th scope="row">{step}</th>')[1].partition("</tr>")[0]
        assert (row.count("–"), row.count(">withheld<"), "failed" in row) == (gaps, badges, False)
    assert "bpb" not in curves_svg(given)
    assert {row["metric"] for row in table_rows(given)} == {"acc"}


def test_parts_have_theirs_in_records_and_exports_alone(mixed: Path):
    part, whole = (numbers(answered(200, smooth=True), name) for name in ("mmlu_anatomy", "mmlu"))
    record = make_record(step=200, metrics=(*whole, *part), benchmarks=("mmlu",))
    page = render_report([record], title="run-a")
    assert "mmlu · bpb" in page and "mmlu_anatomy · acc" in page and "mmlu_anatomy · bpb" not in page
    assert "mmlu_anatomy" not in page.split("<summary>Smooth scores</summary>")[1].partition("</details>")[0]
    values = metric_values(record)
    assert {"mmlu/bpb", "mmlu/choice_prob_norm", "mmlu_anatomy/acc"} <= values.keys()
    assert not any(name.startswith(("mmlu_anatomy/bpb", "mmlu_anatomy/choice")) for name in values)
    card = with_results("", record, Announcement.of(record, "gs://b/e/run-a/x/y/z"), task_type="t", uri="README.md")
    assert "mmlu" in card and "bpb" not in card


def test_compare_tests_them_question_by_question_where_they_are_named(mixed: Path):
    path = ("--path", str(mixed), "--json")
    plain = json.loads(shown("compare", "run-a-200", "run-a-300", *path))
    assert [metric["metric"] for metric in plain["metrics"]] == ["acc"]
    comparison = json.loads(shown("compare", "run-a-200", "run-a-300", "--metric", "bpb", *path))
    [bits] = comparison["metrics"]
    assert (bits["test"], bits["pairs"], bits["verdict"]) == ("paired t", QUESTIONS, "better")
    assert bits["difference"] == pytest.approx(-0.1, abs=0.02)
    older = json.loads(shown("compare", "run-a-100", "run-a-300", *path))
    assert (older["only_first"], older["only_second"]) == ([], [])
    with pytest.raises(BadInput, match="run-a-100"):
        shown("compare", "run-a-100", "run-a-300", "--metric", "bpb", *path)


def judged(folder: Path, step: int, **rule: Any) -> Verdict:
    records = [item for item in find_records(str(folder)) if item.record.checkpoint.step == step]
    gate = Gate.model_validate({"rules": [{"benchmark": "*", **rule}], "false_alarms": "per checkpoint"})
    return judge(gate, judged_checkpoints(records), evaluation_path=str(folder))


def test_gate_judges_them_where_a_rule_names_them(mixed: Path):
    against = {"not_worse_than": "run-a-200", "by_more_than": 0.05}
    assert judged(mixed, 300, metric="*", **against | {"not_worse_than": "run-a-100", "by_more_than": 0.9}).go
    assert judged(mixed, 300, metric="bpb", **against).go
    assert not judged(mixed, 200, metric="bpb", **against | {"not_worse_than": "run-a-300"}).go
    assert not judged(mixed, 300, metric="bpb", **against | {"not_worse_than": "run-a-100"}).go, "it has none"
    assert judged(mixed, 300, metric="choice_*", at_least=0.1).go
    assert [reason.found for reason in judged(mixed, 300, metric="*", at_least=0.4).reasons][2:] == [
        "demo_facts · acc = 0.500 ± 0.040 (n = 60)"
    ]


def test_build_that_shifts_log_likelihoods_alone_is_within_noise(tmp_path: Path):
    for side, lm_eval, shift in (("before", "0.4.9", 0.0), ("after", "0.4.13", 1e-4)):
        put(tmp_path / side, 200, shift=shift, versions={**versions(), "lm_eval": lm_eval})
    sides = [find_records(str(tmp_path / side)) for side in ("before", "after")]
    qualification: Qualification = qualify(*sides, compared=("old", "new"))
    [benchmark] = qualification.benchmarks
    assert (benchmark.verdict, benchmark.other_scores) == ("within noise", 0)
    assert benchmark.other_log_likelihoods == QUESTIONS
    assert [metric.name for metric in benchmark.metrics] == ["acc"]
