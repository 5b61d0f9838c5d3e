"""HELM's commands and results on a recorded run: two benchmarks of four questions, one of them in two trials."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.endpoints import planned_model
from resources.errors import BadInput
from tasks.errors import HarnessOutputInvalid
from tasks.evaluators.alpaca_eval.evaluator import EVALUATOR as ALPACA_EVAL
from tasks.evaluators.evaluator import Parsed, Progress
from tasks.evaluators.helm.evaluator import EVALUATOR, read_entries_file
from tasks.evaluators.helm.options import HelmOptions
from tasks.evaluators.inspect_ai.evaluator import EVALUATOR as INSPECT_AI
from tasks.records.record import Counts
from tasks.records.samples import Sample
from tasks.spec.benchmarks import BUNDLED
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

RECORDED = Path(__file__).parents[2] / "data" / "helm"
CHOICES = "custom_mcqa,path=helm_demo_mcqa.jsonl,method=multiple_choice_separate_original:model=assay_m"
PYTHON = Path("/environment/bin/python")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED, tmp_path / "attempt"))


def make_config(*names: str, **changes: Any) -> EvaluationConfig:
    evals = [{"name": name} for name in names or ("simple_mcqa", "demo_mcqa")]
    given = {"evaluator": "helm", "model_path": "c", "base_url": "http://unused/v1", "evals": evals}
    return EvaluationConfig.model_validate({**given, **changes})


def parse(output: Path, *names: str) -> Parsed:
    return EVALUATOR.read(output, make_config(*names))[0]


def choices_in(output: Path) -> list[Sample]:
    return [sample for sample in EVALUATOR.read(output, make_config())[1] if sample.benchmark == "demo_mcqa"]


def change(output: Path, name: str, edit: Callable[[Any], None], *, run: str = CHOICES) -> None:
    path = output / "helm" / "benchmark_output" / "runs" / "assay" / run / name
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def job_of(config: EvaluationConfig, **changes: Any) -> dict[str, Any]:
    command = EVALUATOR.command(planned_model(**changes), config, Path("/out"), python=PYTHON)
    return json.loads(command.files["job.json"])


def test_recorded_run_gives_the_main_metric_first_with_its_standard_error(output: Path):
    parsed = parse(output)
    assert parsed.counts == Counts(requested=12, answered=12, scored=12)
    choices = [metric for metric in parsed.metrics if metric.benchmark == "demo_mcqa"]
    assert [metric.name for metric in choices] == ["exact_match"]
    assert (choices[0].value, choices[0].n) == (0.5, 4)
    assert choices[0].stderr == pytest.approx(math.sqrt(0.25 * 4 / 3 / 4))
    letters = [metric for metric in parsed.metrics if metric.benchmark == "simple_mcqa"]
    assert [metric.name for metric in letters][:2] == ["exact_match", "quasi_exact_match"]
    assert {metric.n for metric in letters} == {4}
    assert parsed.versions == {"helm": "0.5.16"}


def test_web_site_is_linked_if_it_exists(output: Path):
    assert not parse(output).links
    (output / "helm" / "index.html").touch()
    assert parse(output).links == {"HELM": "helm/index.html"}


def unscored(questions: list[dict[str, Any]]) -> None:
    for question in questions:
        if question["instance_id"] == questions[0]["instance_id"]:
            question["stats"] = [stat for stat in question["stats"] if stat["name"]["name"] != "exact_match"]


@pytest.mark.parametrize(
    ("name", "edit", "answered", "scored"),
    [
        ("scenario_state.json", lambda state: state["request_states"][1]["result"].update(success=False), 11, 11),
        ("scenario_state.json", lambda state: state["request_states"].__delitem__(slice(4, None)), 9, 9),
        ("per_instance_stats.json", unscored, 12, 11),
    ],
    ids=["dead request", "questions that vanished", "answer without a score"],
)
def test_question_without_an_answer_or_a_score_is_missed(
    output: Path, name: str, edit: Callable[[Any], None], answered: int, scored: int
):
    change(output, name, edit)
    assert parse(output).counts == Counts(requested=12, answered=answered, scored=scored)


def test_metric_of_the_run_scores_all_answers_and_none_scores_none(output: Path):
    def forget_questions(questions: list[dict[str, Any]]) -> None:
        for question in questions:
            question.update(stats=[])

    change(output, "per_instance_stats.json", forget_questions)
    assert parse(output).counts.scored == 12

    def forget(stats: list[dict[str, Any]]) -> None:
        stats[:] = [stat for stat in stats if stat["name"]["name"] != "exact_match"]

    change(output, "stats.json", forget)
    assert parse(output).counts.scored == 8


def test_benchmark_of_several_runs_is_their_mean_and_each_of_them(output: Path):
    plan = json.loads((output / "plan.json").read_text())
    for place, run in enumerate(plan["runs"].values()):
        run.update(key="both", label=f"part={place}")
    (output / "plan.json").write_text(json.dumps(plan))
    metrics = parse(output, "both").metrics
    by_benchmark = {metric.benchmark: metric for metric in metrics if metric.name == "exact_match"}
    assert metrics[0] == by_benchmark["both"]
    assert (by_benchmark["both"].value, by_benchmark["both"].n) == (0.25, 8)
    assert by_benchmark["both"].stderr == pytest.approx((by_benchmark["both.part=1"].stderr or 0) / 2)


@pytest.mark.parametrize("spoil", ["stats.json", "per_instance_stats.json", "scenario_state.json"])
def test_results_that_are_cut_off_or_gone_are_invalid(output: Path, spoil: str):
    [path] = (output / "helm").rglob(f"simple_mcqa*/{spoil}")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(HarnessOutputInvalid):
        parse(output)
    path.unlink()
    with pytest.raises(HarnessOutputInvalid, match=spoil):
        parse(output)


def test_plan_for_other_benchmarks_is_invalid(output: Path):
    with pytest.raises(HarnessOutputInvalid, match="simple_mcqa"):
        parse(output, "demo_mcqa")


def test_answers_cut_or_with_open_reasoning_are_counted(output: Path):
    def generate(content: dict[str, Any]) -> None:
        for number, state in enumerate(content["request_states"]):
            state["request"]["echo_prompt"] = False
            [completion] = state["result"]["completions"]
            completion.update(finish_reason={"reason": "length" if number == 0 else "stop"}, text="<think>a")

    assert {sample.finish for sample in EVALUATOR.read(output, make_config())[1]} == {None}
    change(output, "scenario_state.json", generate)
    assert sorted(str(sample.finish) for sample in choices_in(output)) == ["length", "stop", "stop", "stop"]
    assert parse(output).details["demo_mcqa"].unclosed == 4


def test_samples_say_what_was_asked_answered_and_right(output: Path):
    samples = list(EVALUATOR.read(output, make_config())[1])
    assert len({(sample.benchmark, sample.id) for sample in samples}) == 12
    letters = [sample for sample in samples if sample.benchmark == "simple_mcqa"]
    assert {sample.target for sample in letters} <= {"A", "B"}
    assert {sample.id.partition("/")[2] for sample in letters} == {"", "trial 1"}
    assert all(sample.prompt.count("even or odd?") == 1 and sample.context.count("Answer: ") == 5 for sample in letters)
    assert all(sample.prompt.startswith("Question: ") and sample.context.endswith("\n") for sample in letters)
    assert {sample.choices for sample in letters} == {("Even", "Odd")} and {sample.tokens for sample in letters} == {5}
    choices = [sample for sample in samples if sample.benchmark == "demo_mcqa"]
    assert all(sample.scores["exact_match"] == (sample.output == sample.target) for sample in choices)
    assert all(sample.prompt.startswith("Question: ") and not sample.context for sample in choices)
    assert all(sample.target in sample.choices and len(sample.choices) == 4 for sample in choices)
    assert {sample.tokens for sample in choices} == {None}


def test_questions_of_another_split_are_excluded_from_the_main_error(output: Path):
    def move_last(questions: list[dict[str, Any]]) -> None:
        for stat in questions[-1]["stats"]:
            stat["name"]["split"] = "valid"

    change(output, "per_instance_stats.json", move_last)
    [choices] = [metric for metric in parse(output).metrics if metric.benchmark == "demo_mcqa"]
    assert choices.n == 3
    assert parse(output).counts == Counts(requested=12, answered=12, scored=12)
    assert [len(sample.scores) for sample in choices_in(output)] == [1, 1, 1, 0]


def test_sample_of_a_changed_question_is_another_sample(output: Path):
    def turn_answers(state: dict[str, Any]) -> None:
        for asked in state["request_states"][:4]:
            for reference in asked["instance"]["references"]:
                reference["tags"] = [] if reference["tags"] else ["correct"]

    before = {sample.id for sample in choices_in(output)}
    change(output, "scenario_state.json", turn_answers)
    assert len(before - {sample.id for sample in choices_in(output)}) == 1


def test_sample_of_a_choice_tells_the_scored_choice(output: Path):
    # HELM scores choices by their length, so its choice does not always have the highest log-probability.
    def choose(questions: list[dict[str, Any]]) -> None:
        for stat in (stat for question in questions for stat in question["stats"]):
            if stat["name"]["name"] == "predicted_index":
                stat["mean"] = 3.0

    change(output, "per_instance_stats.json", choose)
    states = json.loads(next(output.rglob("custom_mcqa*/scenario_state.json")).read_text())["request_states"]
    last = [state["instance"]["references"][3]["output"]["text"] for state in states[::4]]
    assert [sample.output for sample in choices_in(output)] == last


def test_command_asks_as_many_as_the_endpoint_takes_at_once_within_reason():
    assert job_of(make_config())["num_threads"] == 7
    assert job_of(make_config(), capacity=1000)["num_threads"] == 64
    assert job_of(make_config(evaluator={"name": "helm", "num_threads": 3}))["num_threads"] == 3


def test_choice_that_a_question_does_not_offer_is_left_out(output: Path):
    def point_elsewhere(content: dict[str, Any]) -> None:
        content["request_states"][0]["reference_index"] = 99

    whole = choices_in(output)[0].choices
    change(output, "scenario_state.json", point_elsewhere)
    assert choices_in(output)[0].choices == whole[1:]


@pytest.mark.parametrize("name", ["../../../../elsewhere", "/etc"])
def test_plan_that_leads_out_of_the_output_is_refused(output: Path, name: str):
    plan = json.loads((output / "plan.json").read_text())
    (output / "plan.json").write_text(json.dumps({**plan, "suite": name}))
    with pytest.raises(HarnessOutputInvalid, match="name of a single file"):
        parse(output)


def test_command_carries_benchmarks_and_a_file_of_run_entries(tmp_path: Path):
    entries = tmp_path / "mine.conf"
    entries.write_text("entries: []")
    benchmark = EvalTaskConfig(name="mmlu", task_kwargs={"subject": "anatomy"}, num_fewshot=2, task_alias="anatomy")
    config = make_config(
        evals=(benchmark,), evaluator={"name": "helm", "run_specs_path": str(entries)}, max_eval_instances=9
    )
    command = EVALUATOR.command(planned_model(), config, Path("/out"), python=PYTHON)
    job = json.loads(command.files["job.json"])
    [item] = job["benchmarks"]
    assert (item["name"], item["key"], item["num_fewshot"]) == ("mmlu", "anatomy", 2)
    assert item["arguments"] == {"subject": "anatomy"}
    assert (job["limit"], job["base_url"]) == (9, "http://127.0.0.1:9/v1")
    assert job["run_specs"] == "entries: []"
    entries.unlink()
    with pytest.raises(BadInput, match=r"mine\.conf"):
        EVALUATOR.command(planned_model(), config, Path("/out"), python=PYTHON)


def test_options_measure_what_is_asked_not_how_patiently(tmp_path: Path):
    entries = tmp_path / "mine.conf"
    entries.write_text("entries: []")
    first = HelmOptions(run_specs_path=str(entries)).score_inputs()
    patient = HelmOptions(run_specs_path=str(entries), request_retries=9, num_threads=1, site=False)
    assert patient.score_inputs() == first
    assert HelmOptions(run_specs_path=str(entries), priority=1).score_inputs() != first
    entries.write_text("entries: [{description: simple_mcqa}]")
    assert HelmOptions(run_specs_path=str(entries)).score_inputs() != first


@pytest.mark.timeout(20)
def test_pipe_is_no_file_of_entries(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    HelmOptions(run_specs_path=str(tmp_path / "pipe")).score_inputs()
    with pytest.raises(BadInput, match="pipe"):
        read_entries_file(str(tmp_path / "pipe"))


def test_data_that_an_entry_of_the_file_names_by_its_whole_path_can_change_a_score(tmp_path: Path) -> None:
    entries, questions = tmp_path / "run_specs.conf", tmp_path / "questions.jsonl"
    entries.write_text(f'entries: [{{description: "custom_mcqa:path={questions},num_train_instances=0", priority: 1}}]')
    questions.write_text("{}")
    first = HelmOptions(run_specs_path=str(entries)).score_inputs()
    questions.write_text("{} ")
    assert HelmOptions(run_specs_path=str(entries)).score_inputs() != first


def test_progress_is_that_of_the_last_line_about_it():
    log = "Answered 0 of 10 requests of simple_mcqa (1 of 2)\nINFO x\nAnswered 3 of 40 requests of demo_mcqa (2 of 2)\n"
    assert EVALUATOR.progress(log) == Progress("demo_mcqa (2 of 2)", 3, 40)
    assert EVALUATOR.progress("INFO     scenario.get_instances {") is None
    many = "9" * 5000
    lines = (f"Answered {many} of {many} requests of x", f"Answered {many} of 1 samples", f"x, answers: {many}/1 [")
    assert {kind.progress(line) for kind in (EVALUATOR, INSPECT_AI, ALPACA_EVAL) for line in lines} == {
        None,
        Progress("x, answers", 1, 1),
    }


def test_bundled_questions_are_those_of_demo_facts_as_the_model_is_trained_on_them():
    facts = [json.loads(line) for line in (BUNDLED / "demo_facts.jsonl").read_text().splitlines()]
    questions = [json.loads(line) for line in (BUNDLED / "helm" / "demo_mcqa.jsonl").read_text().splitlines()]
    assert [question["id"] for question in questions] == [fact["id"] for fact in facts]
    for question, fact in zip(questions, facts, strict=True):
        offered = [reference["output"]["text"] for reference in question["references"]]
        right = [reference["output"]["text"] for reference in question["references"] if reference["tags"]]
        assert offered == fact["choices"]
        assert right == [fact["choices"][fact["answer"]]]
        assert question["input"]["text"] == f"Question: {fact['question']}\nAnswer:"
        assert max(len(question["input"]["text"]) + len(text) for text in offered) < 100
