"""Inspect in the orchestrator: tasks by their names, the command, and the reading of its results."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tasks
from fakes.endpoints import planned_model
from resources.errors import BadInput
from tasks.errors import CountsDisagree, HarnessOutputInvalid, UnknownBenchmark
from tasks.evaluators.harness import read_output, verify_counts
from tasks.evaluators.inspect_ai.evaluator import EVALUATOR, FoundTask, find_tasks
from tasks.evaluators.inspect_ai.options import InspectOptions
from tasks.records.samples import read_samples
from tasks.spec.benchmarks import evaluation_hash
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.suites import Suite, SuiteRequest
from tasks.verdicts.statistics.intervals import Stratum, mean_interval

PYTHON = Path("/environment/bin/python")
SHUFFLES = """
import sys
sys.path.append(sys.argv[1])
import inspect_shuffles
import random
from random import Random
cards = list(range(50))
for chance in (Random(), random.Random(None)):
    chance.shuffle(cards)
print(cards, Random(7).random())
"""
JUDGE = {"base_url": "http://judge/v1", "model": "judge"}


def make_config(*names: str, options: dict[str, Any] | None = None, **changes: Any) -> EvaluationConfig:
    given = {
        "evaluator": {"name": "inspect_ai", **(options or {})},
        "model_path": "checkpoint",
        "base_url": "http://unused/v1",
        "evals": [{"name": name} for name in names],
    }
    return EvaluationConfig.model_validate({**given, **changes})


make_model = partial(planned_model, model="m", api_key="model-key")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks"
    (folder / "inspect_ai" / "deep").mkdir(parents=True)
    (folder / "sums.py").write_text("@task\ndef add(): ...\n\n@task(name='x')\ndef take(): ...\n\ndef other(): ...\n")
    (folder / "inspect_ai" / "words.py").write_text("@task\ndef spell(): ...\n@task\ndef add(): ...\n")
    (folder / "inspect_ai" / "deep" / "no.py").write_text("@task\ndef hidden(): ...\n")
    (folder / "broken.py").write_text("@task\ndef (")
    return folder


def test_tasks_are_found_by_name_by_file_and_name_and_by_package_without_running_any_code(folder: Path):
    config = make_config("take", "spell", "words@add", "inspect_evals@gsm8k", benchmarks_path=str(folder))
    assert find_tasks(config) == [
        FoundTask("take", "sums.py"),
        FoundTask("spell", "inspect_ai/words.py"),
        FoundTask("add", "inspect_ai/words.py"),
        FoundTask("inspect_evals/gsm8k", None),
    ]


@pytest.mark.parametrize(
    ("name", "error", "problem"),
    [
        ("spel", UnknownBenchmark, "did you mean spell"),
        ("hidden", UnknownBenchmark, "there: add, spell, take"),
        ("add", BadInput, "inspect_ai/words.py, sums.py"),
        ("nothing@here", UnknownBenchmark, "'nothing@here', and neither"),
    ],
)
def test_task_that_is_nowhere_or_in_two_files_is_refused(
    folder: Path, tmp_path: Path, name: str, error: type[Exception], problem: str
):
    (tmp_path / "environment" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    with pytest.raises(error, match=problem):
        EVALUATOR.check(make_config(name, benchmarks_path=str(folder)), tmp_path / "environment" / "bin" / "python")


def test_what_inspect_would_ignore_and_a_judge_that_isolated_code_cannot_reach_are_refused():
    with pytest.raises(BadInput, match="num_fewshot"):
        EVALUATOR.check(make_config(evals=[{"name": "demo_choices", "num_fewshot": 3}]), PYTHON)
    both = {"judge": JUDGE, "allow_code_execution": ["demo_choices"]}
    with pytest.raises(BadInput, match=r"judge and evaluator\.allow"):
        EVALUATOR.check(make_config("demo_choices", options=both), PYTHON)


def test_judge_elsewhere_has_a_key_of_its_own_and_both_keys_are_in_variables_only(tmp_path: Path):
    judge = make_model(base_url="http://judge/v1", model="judge", api_key="judge-key")
    command = EVALUATOR.command(make_model(), make_config("demo_choices"), tmp_path, python=PYTHON, judge=judge)
    assert command.variables == {"OPENAI_API_KEY": "model-key", "ASSAY_JUDGE_API_KEY": "judge-key"}
    assert (
        "-key" not in command.files["job.json"] and json.loads(command.files["job.json"])["judge"]["model"] == "judge"
    )
    own = EVALUATOR.command(make_model(), make_config("demo_choices"), tmp_path, python=PYTHON, judge=make_model())
    assert own.variables == {"OPENAI_API_KEY": "model-key"}


@pytest.mark.parametrize(
    ("engine_kwargs", "takes_tools"),
    [({}, False), ({"enable-auto-tool-choice": True, "tool_call_parser": "hermes"}, True)],
)
def test_engine_takes_tools_by_its_arguments_and_other_endpoints_are_unknown(
    tmp_path: Path, engine_kwargs: dict[str, Any], takes_tools: bool
):
    pool = {"model": {"name": "m", "engine_kwargs": engine_kwargs}}
    configs = (make_config("demo_choices", base_url=None, pool_config=pool), make_config("demo_choices"))
    commands = (EVALUATOR.command(make_model(), config, tmp_path, python=PYTHON) for config in configs)
    assert [json.loads(command.files["job.json"])["takes_tools"] for command in commands] == [takes_tools, None]


def test_task_code_and_options_that_change_a_score_change_the_evaluation_and_permission_does_not(folder: Path):
    def hashed(**options: Any) -> str:
        return evaluation_hash(make_config("spell", options=options, benchmarks_path=str(folder)))

    asked = hashed()
    assert hashed(allow_code_execution=["spell"]) == asked
    assert len({asked, hashed(epochs=2), hashed(temperature=0), hashed(judge=JUDGE), hashed(solver="generate")}) == 5
    (folder / "inspect_ai" / "words.py").write_text("@task\ndef spell(): return 1\n")
    assert hashed() != asked


def test_suite_gives_inspect_the_judge_of_its_request_without_what_only_alpaca_eval_knows():
    suite = {
        "name": "mine",
        "description": "Both.",
        "evaluations": [
            {"label": "i", "evaluator": "inspect_ai", "evals": ["demo_choices"]},
            {"label": "a", "evaluator": "alpaca_eval", "evals": ["demo_instructions"]},
        ],
    }
    request = SuiteRequest.model_validate({"model_path": "runs/a", "judge": {**JUDGE, "annotator": "demo_verdict"}})
    inspect, alpaca = (config.evaluator for config in Suite.model_validate(suite).evaluations_of(request))
    assert isinstance(inspect, InspectOptions) and inspect.judge is not None
    assert inspect.judge.model_dump(exclude_defaults=True) == JUDGE
    assert alpaca.model_dump()["judge"]["annotator"] == "demo_verdict"


def test_unseeded_generators_are_alike_in_every_process_and_seeded_are_unchanged():
    command = [sys.executable, "-c", SHUFFLES, str(Path(tasks.__path__[0], "evaluators", "inspect_ai", "programs"))]
    [shown] = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)}
    assert shown.rpartition("]")[2].strip() == str(random.Random(7).random())


def test_direction_of_a_metric_is_that_of_the_options_and_changes_no_hash(tmp_path: Path):
    numbers = [{"name": name, "value": 0.5, "score": "match", "better": None} for name in ("mean", "other")]
    plain = make_config("demo_choices")
    directed = make_config("demo_choices", options={"higher_is_better": {"mean": False}})
    parsed = EVALUATOR.read(written(tmp_path / "out", WHOLE, numbers), directed)[0]
    assert [metric.higher_is_better for metric in parsed.metrics] == [False, None]
    assert evaluation_hash(directed) == evaluation_hash(plain)


def written(
    output: Path, rows: list[dict[str, Any]], metrics: list[dict[str, Any]], *, questions: int = 2, **results: Any
) -> Path:
    output.mkdir(exist_ok=True)
    defaults = {
        "benchmark": "demo_choices",
        "epoch": 1,
        "context": "",
        "prompt": "?",
        "choices": [],
        "target": "A",
        "output": "A",
        "answered": True,
        "graded": False,
        "finish": ["stop"],
        "tokens": 3,
        "metadata": {},
    }
    numbers = [{"stderr": None, "n": 2, "better": True, "cluster": None, **metric} for metric in metrics]
    (output / "plan.json").write_text(json.dumps({"questions": {"demo_choices": questions}}))
    (output / "samples.jsonl").write_text("".join(json.dumps({**defaults, **row}) + "\n" for row in rows))
    content = {"metrics": {"demo_choices": numbers}, "logs": {"demo_choices": "x.eval"}, **results}
    (output / "results.json").write_text(json.dumps(content))
    return output


ACCURACY = {"name": "accuracy", "value": 0.5, "score": "match"}
WHOLE = [{"id": "1", "scores": {"match": 1.0}}, {"id": "2", "scores": {"match": 0.0}}]


def test_score_is_published_with_an_interval_from_its_samples_and_inspects_own_log(tmp_path: Path):
    output = written(tmp_path / "out", WHOLE, [ACCURACY, {"name": "oddity", "value": 9.0, "score": "match"}])
    parsed = read_output(EVALUATOR, make_config("demo_choices"), output, samples=tmp_path / "samples.jsonl.gz")
    verify_counts(parsed)
    accuracy, oddity = parsed.metrics
    assert accuracy.recomputed and accuracy.low is not None and accuracy.low < 0.5
    assert not oddity.recomputed and oddity.low is None
    assert parsed.links == {"Inspect log of demo_choices": "inspect/x.eval"}
    assert [sample.scores for sample in read_samples(str(tmp_path / "samples.jsonl.gz"))] == [
        {"accuracy": 1.0},
        {"accuracy": 0.0},
    ]


def test_rows_that_code_of_a_model_wrote_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    output = written(tmp_path / "out", WHOLE, [ACCURACY])
    monkeypatch.setattr("tasks.evaluators.inspect_ai.evaluator.MOST_BYTES_OF_A_LINE", 64)
    with pytest.raises(HarnessOutputInvalid, match=r"a line of samples\.jsonl"):
        EVALUATOR.read(output, make_config("demo_choices"))[0]
    (output / "samples.jsonl").unlink()
    os.mkfifo(output / "samples.jsonl")
    with pytest.raises(HarnessOutputInvalid, match=r"no readable samples\.jsonl"):
        EVALUATOR.read(output, make_config("demo_choices"))[0]


def test_grouped_metric_has_questions_of_its_group(tmp_path: Path):
    rows = [
        {"id": f"{subject}{number}", "scores": {"match": float(number == 1)}, "metadata": {"subject": subject}}
        for subject, questions in (("law", 2), ("art", 4))
        for number in range(questions)
    ]
    group = {"field": "subject", "template": "in {group_name}"}
    numbers = [
        {"name": name, "value": value, "score": "match", "n": 6, "group": {**group, "name": name}}
        for name, value in (("in law", 0.5), ("in art", 0.25), ("all", 1 / 3))
    ]
    output = written(tmp_path / "out", rows, numbers, questions=6)

    parsed = read_output(EVALUATOR, make_config("demo_choices"), output, samples=tmp_path / "samples.jsonl.gz")

    assert [(metric.name, metric.n) for metric in parsed.metrics] == [("in law", 2), ("in art", 4), ("all", 6)]
    assert [metric.recomputed for metric in parsed.metrics] == [True, True, True]
    ends = [mean_interval([Stratum([1.0] + [0.0] * (n - 1), range(n))]).high for n in (2, 4)]
    assert [metric.high for metric in parsed.metrics[:2]] == [pytest.approx(end) for end in ends]


@pytest.mark.parametrize(
    ("second", "counts"),
    [
        ({"answered": False, "scores": {}}, (2, 1, 1, 0)),
        ({"scores": {}}, (2, 2, 1, 0)),
        ({"scores": {}, "graded": True}, (2, 2, 1, 1)),
        ({"scores": {"other": 1.0}}, (2, 2, 1, 0)),
        (None, (2, 1, 1, 0)),
    ],
)
def test_question_without_an_answer_or_a_score_withholds_the_number(
    tmp_path: Path, second: dict[str, Any] | None, counts: tuple[int, ...]
):
    rows = [WHOLE[0], *([{"id": "2", **second}] if second is not None else [])]
    parsed = EVALUATOR.read(written(tmp_path / "out", rows, [ACCURACY]), make_config("demo_choices"))[0]
    parsed_counts = parsed.counts
    assert (parsed_counts.requested, parsed_counts.answered, parsed_counts.scored, parsed_counts.judge_errors) == counts
    with pytest.raises(CountsDisagree):
        verify_counts(parsed)


def test_whole_answers_without_a_number_and_lines_that_are_cut_are_invalid_output(tmp_path: Path):
    problems = {"demo_choices": "a metric that fails"}
    with pytest.raises(HarnessOutputInvalid, match="a metric that fails"):
        EVALUATOR.read(written(tmp_path / "a", WHOLE, [], problems=problems), make_config("demo_choices"))[0]
    output = written(tmp_path / "b", WHOLE, [ACCURACY])
    (output / "samples.jsonl").write_text((output / "samples.jsonl").read_text()[:-9])
    with pytest.raises(HarnessOutputInvalid, match=r"samples\.jsonl"):
        EVALUATOR.read(output, make_config("demo_choices"))[0]
