"""Results written by a model's code in place of the harness: refused with a reason for any content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import CountsDisagree, HarnessOutputInvalid
from tasks.evaluators import reading
from tasks.evaluators.harness import read_output, verify_counts
from tasks.evaluators.lm_eval.evaluator import EVALUATOR
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

CONFIG = EvaluationConfig(model_path="c", evals=(EvalTaskConfig(name="b"),))
BEYOND = 10**400
TASK = {"questions": 1, "output_type": "generate_until"}
ROW = {"acc,none": 1.0, "sample_len": 1}
SAMPLE = {
    "doc_id": 0,
    "target": "t",
    "arguments": {"gen_args_0": {"arg_0": "p", "arg_1": {}}},
    "resps": [["a"]],
    "filter": "none",
    "metrics": ["acc"],
    "acc": 1.0,
}
DEEP = json.loads("[" * 900 + "]" * 900)


def read(folder: Path, *, task: Any = TASK, row: Any = ROW, sample: Any = SAMPLE, name: str = "b") -> None:
    (folder / "lm_eval" / "m").mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"benchmarks": {"b": {name: task}}}))
    (folder / "lm_eval" / "m" / "results_1.json").write_text(json.dumps({"results": {name: row}}))
    (folder / "lm_eval" / "m" / "samples_b_1.jsonl").write_text(json.dumps(sample) + "\n")
    verify_counts(read_output(EVALUATOR, CONFIG, folder, samples=folder / "samples.jsonl.gz"))


def test_results_of_the_right_form_are_read(tmp_path: Path):
    read(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"task": {**TASK, "questions": BEYOND}},
        {"row": {**ROW, "acc,none": BEYOND}},
        {"row": {**ROW, "sample_len": BEYOND}},
        {"task": {**TASK, "output_type": "multiple_choice"}, "sample": {**SAMPLE, "resps": [[[BEYOND, "x"]]]}},
        {"sample": {**SAMPLE, "acc": DEEP}},
        {"sample": {**SAMPLE, "acc": BEYOND}},
        {"sample": {**SAMPLE, "doc_hash": "\ud800"}},
        {"name": "../../../up"},
        {"name": "a\0b"},
    ],
)
def test_results_that_no_harness_writes_are_refused(tmp_path: Path, changed: dict[str, Any]):
    with pytest.raises((HarnessOutputInvalid, CountsDisagree)):
        read(tmp_path, **changed)


def test_results_larger_than_memory_are_not_read(tmp_path: Path):
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(HarnessOutputInvalid, match="too large"):
        reading.read_result("lm-eval", tmp_path / "plan.json", dict[str, Any])
