"""The lm-eval evaluator: its command, and the reading of a real run's results.

`tests/data/lm_eval/recorded` is a run of lm-eval 0.4.13 over `tests/data/lm_eval/benchmarks` with five questions each,
against the deterministic engine: a group, a tag in a 2-shot form, the group again in a 1-shot form, and a generation
with two filters.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fakes.endpoints import planned_model
from pools.endpoint import RunningModel
from resources.errors import BadInput, EnvironmentBuildFailed
from resources.settings import settings
from tasks.errors import CountsDisagree, HarnessFailed, HarnessOutputInvalid, UnknownBenchmark
from tasks.evaluators.harness import Parsed, Progress, verify_counts
from tasks.evaluators.lm_eval.evaluator import EVALUATOR
from tasks.evaluators.lm_eval.files import NO_ANSWER
from tasks.evaluators.lm_eval.options import LmEvalOptions
from tasks.evaluators.lm_eval.results import clusters_of
from tasks.records.samples import Sample
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

DATA = Path(__file__).parents[2] / "data" / "lm_eval"
PYTHON = Path("/environment/bin/python")
EVALS = (
    EvalTaskConfig(name="shape_sides"),
    EvalTaskConfig(name="shapes", num_fewshot=2, task_alias="shapes_2shot"),
    EvalTaskConfig(name="shape_sides", num_fewshot=1, task_alias="sides_1shot"),
    EvalTaskConfig(name="shape_words"),
)


def make_config(*evals: EvalTaskConfig, **changes: Any) -> EvaluationConfig:
    given = {
        "model_path": "checkpoint",
        "base_url": "http://127.0.0.1:9/v1",
        "evals": evals or EVALS,
        "benchmarks_path": str(DATA / "benchmarks"),
        "max_eval_instances": 5,
    }
    return EvaluationConfig(**{**given, **changes})


def job_of(config: EvaluationConfig, model: RunningModel) -> dict[str, Any]:
    command = EVALUATOR.command(model, config, Path("/out"), python=PYTHON)
    return json.loads(command.files["job.json"])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "recorded", tmp_path / "recorded"))


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield tmp_path / "cache"
    settings.cache_clear()


def parse(folder: Path) -> Parsed:
    return EVALUATOR.read(folder, make_config())[0]


def few_in(folder: Path) -> list[Sample]:
    return [sample for sample in EVALUATOR.read(folder, make_config())[1] if sample.benchmark == "shapes_few"]


def edit_results(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    [path] = folder.glob("lm_eval/*/results_*.json")
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def samples_file(folder: Path, benchmark: str) -> Path:
    [path] = folder.glob(f"lm_eval/*/samples_{benchmark}_2*.jsonl")
    return path


def edit_sample(folder: Path, benchmark: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = samples_file(folder, benchmark)
    first, *rest = path.read_text().splitlines()
    sample = json.loads(first)
    edit(sample)
    path.write_text("\n".join([json.dumps(sample), *rest, ""]))


# The command


def test_command_job_holds_what_was_asked_and_where_to_ask():
    job = job_of(make_config(), planned_model(max_model_len=512))
    assert job["benchmarks"][:2] == [
        {
            "name": "shape_sides",
            "num_fewshot": None,
            "force_fewshot": False,
            "cluster_by": None,
            "key": "shape_sides",
            "task_kwargs": {},
        },
        {
            "name": "shapes",
            "num_fewshot": 2,
            "force_fewshot": False,
            "cluster_by": None,
            "key": "shapes_2shot",
            "task_kwargs": {},
        },
    ]
    assert job["benchmarks_path"] == str(DATA / "benchmarks")
    assert job["limit"] == 5
    assert job["max_model_len"] == 512
    assert job["output"] == "/out"
    assert job["model_args"]["base_url"] == "http://127.0.0.1:9/v1/completions"
    assert job["model_args"]["model"] == "run-100"
    assert job["model_args"]["tokenizer"] == "tokenizer"
    assert job["model_args"]["num_concurrent"] == 7
    assert job["model_args"]["timeout"] == 60
    assert job["prove_tokenizer"]
    one = job_of(make_config(), planned_model(capacity=1))
    assert one["model_args"]["num_concurrent"] == 2, "with 1, lm-eval takes another path"


def test_command_holds_the_options_and_asks_chat_where_that_is_the_endpoint():
    options = LmEvalOptions(
        endpoint="chat_completions", max_gen_toks=9, long_prompts="skip", allow_code_execution=("shape_words",)
    )
    job = job_of(make_config(base_url=None, evaluator=options), planned_model())
    assert job["model_args"]["base_url"] == "http://127.0.0.1:9/v1/chat/completions" and job["conversations"]
    assert (job["max_gen_toks"], job["long_prompts"], job["allow_code_execution"]) == (9, "skip", ["shape_words"])
    assert not job["prove_tokenizer"]  # a pool serves the checkpoint of the tokenizer


def test_options_that_change_scores_change_score_inputs_and_permissions_do_not():
    plain = make_config().score_inputs()
    for changed in ({"long_prompts": "skip"}, {"max_gen_toks": 9}, {"endpoint": "chat_completions"}):
        assert make_config(evaluator=LmEvalOptions.model_validate(changed)).score_inputs() != plain
    assert make_config(evaluator=LmEvalOptions(allow_code_execution=("humaneval",))).score_inputs() == plain
    assert LmEvalOptions().score_inputs()["method"] == 2  # a changed request method never continues an old record


def test_harness_is_isolated_where_code_is_allowed_and_sees_the_files_that_its_benchmarks_name(tmp_path: Path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("{}")
    task = EvalTaskConfig(name="shape_words", task_kwargs={"dataset_kwargs": {"data_files": {"test": str(questions)}}})
    allowed = LmEvalOptions(allow_code_execution=("shape_words",))
    model = planned_model()
    assert EVALUATOR.command(model, make_config(task), Path("/out"), python=PYTHON).model_code is None
    command = EVALUATOR.command(model, make_config(task, evaluator=allowed), Path("/out"), python=PYTHON)
    assert command.model_code is not None
    assert command.model_code.endpoint == model.base_url
    assert str(questions) in command.model_code.reads
    assert command.model_code.scratch == (str(DATA / "benchmarks"),)


def test_command_argv_is_our_program_run_by_the_environment():
    command = EVALUATOR.command(planned_model(), make_config(), Path("/out"), python=PYTHON)
    python, *_, program, job_file = command.argv
    assert python == str(PYTHON)
    assert Path(program).name == "run_lm_eval.py" and Path(program).is_file()
    assert list(command.files) == [job_file]
    assert command.variables["LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER"] == NO_ANSWER


def test_command_takes_the_bundled_benchmarks_and_copies_those_in_a_store():
    folder = Path(job_of(make_config(benchmarks_path=None), planned_model())["benchmarks_path"])
    assert (folder / "demo_facts.yaml").is_file()
    config = make_config(benchmarks_path="memory://lm-eval-command/own")
    command = EVALUATOR.command(planned_model(), config, Path("/out"), python=PYTHON)
    assert command.copies == {json.loads(command.files["job.json"])["benchmarks_path"]: "memory://lm-eval-command/own"}


# Results


def test_parse_recorded_run_gives_every_row_that_lm_eval_reports(recorded: Path):
    parsed = parse(recorded)
    verify_counts(parsed)
    assert parsed.counts.requested == 7 * 5
    assert parsed.versions["lm_eval"] == "0.4.13"
    rows = {(metric.benchmark, metric.name): metric for metric in parsed.metrics}
    assert set(rows) == {
        ("shape_sides", "acc"),
        ("shapes_few", "acc"),
        ("shapes_many", "acc"),
        ("shapes_2shot.shapes_few", "acc"),
        ("shapes_2shot.shapes_many", "acc"),
        ("sides_1shot", "acc"),
        ("sides_1shot.shapes_few", "acc"),
        ("sides_1shot.shapes_many", "acc"),
        ("shape_words", "exact_match,strict"),
        ("shape_words", "exact_match,flexible"),
    }
    group = rows["sides_1shot", "acc"]
    assert (group.value, group.stderr, group.n, group.higher_is_better) == (0.1, 0.1, 10, True)
    assert rows["shapes_few", "acc"].n == 5


def test_parse_only_filter_is_not_part_of_a_metrics_name(recorded: Path):
    edit_results(recorded, lambda content: content["results"]["shape_words"].pop("exact_match,strict"))
    edit_results(recorded, lambda content: content["results"]["shape_words"].pop("exact_match_stderr,strict"))
    names = {metric.name for metric in parse(recorded).metrics if metric.benchmark == "shape_words"}
    assert names == {"exact_match"}


def test_parse_direction_and_standard_error_come_from_the_results(recorded: Path):
    edit_results(recorded, lambda content: content["results"]["shapes_few"].update({"acc_stderr,none": "N/A"}))
    directions = {"shapes_few": {"acc": False}, "shapes_many": {"acc": None}}
    edit_results(recorded, lambda content: content["higher_is_better"].update(directions))
    metrics = {metric.benchmark: metric for metric in parse(recorded).metrics}
    assert (metrics["shapes_few"].higher_is_better, metrics["shapes_few"].stderr) == (False, None)
    assert metrics["shapes_many"].higher_is_better is None


ASKED = {
    "asking": {"seeds": {"generation": "none"}, "bos": "none", "notes": ["A note."]},
    "ends": {"shape_words": {"0": {"reasons": ["stop", "length"], "unclosed": True}, "1": {"reasons": ["stop"]}}},
    "groups": {
        "shape_sides": {"leaves": ["shapes_few", "shapes_many"], "by_size": {"acc": True}},
        "sides_1shot": {"leaves": ["sides_1shot.shapes_few", "sides_1shot.shapes_many"], "by_size": {"acc": False}},
    },
    "versions": {"torch": "2.9"},
}


def test_parse_tells_how_answers_ended_how_it_was_asked_and_what_groups_are_made_of(recorded: Path):
    (recorded / "asked.json").write_text(json.dumps(ASKED))
    edit_results(recorded, lambda content: content["results"]["shapes_few"].update(sample_len=15))
    edit_results(recorded, lambda content: content["results"]["sides_1shot.shapes_few"].update(sample_len=15))
    parsed = parse(recorded)
    words = parsed.details["shape_words"]
    assert words.finish_reasons == {"length": 1, "stop": 2}
    assert (words.questions, words.at_limit, words.unclosed) == (5, 1, 1)
    assert parsed.details["shapes_few"].at_limit is None
    assert parsed.asking.seeds == {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234, "generation": "none"}
    assert (parsed.asking.bos, parsed.asking.notes) == ("none", ("A note.",))
    assert parsed.versions["torch"] == "2.9"
    parts = {metric.benchmark: metric.parts for metric in parsed.metrics if metric.parts}
    assert parts == {
        "shape_sides": {"shapes_few": 0.75, "shapes_many": 0.25},
        "sides_1shot": {"sides_1shot.shapes_few": 0.5, "sides_1shot.shapes_many": 0.5},
    }
    finish_by_id = {
        sample.id[0]: sample.finish
        for sample in EVALUATOR.read(recorded, make_config())[1]
        if "words" in sample.benchmark
    }
    assert (finish_by_id["0"], finish_by_id["1"], finish_by_id["2"]) == ("length", "stop", None)


def test_samples_of_texts_have_log_likelihood_and_length_and_say_if_their_prompt_was_cut(recorded: Path):
    weighed = {"metrics": ["word_perplexity"], "word_perplexity": [-12.5, 5], "doc_id": 0}
    edit_sample(recorded, "shapes_few", lambda sample: sample.update(weighed))
    plan = json.loads((recorded / "plan.json").read_text())
    plan["benchmarks"]["shape_sides"]["shapes_few"]["truncated_questions"] = [0]
    (recorded / "plan.json").write_text(json.dumps(plan))
    samples = few_in(recorded)
    assert samples[0].ratios == {"word_perplexity": (-12.5, 5.0)} and not samples[1].ratios
    edit_sample(recorded, "shapes_few", lambda sample: sample.update(metrics=["perplexity"], perplexity=-2.5))
    first = few_in(recorded)[0]
    assert first.ratios["perplexity"] == (-2.5, 1.0)
    assert [sample.truncated for sample in samples] == [True, False, False, False, False]


# Samples


@pytest.mark.parametrize(
    ("docs", "names", "cluster_by", "together"),
    [
        ([{"passage": "a"}, {"passage": "a"}, {"passage": "b"}], ["boolq"], None, [{"0", "1"}]),
        ([{"passage": "a"}, {"passage": "b"}], ["boolq"], None, []),
        ([{"passage": "Answer!"}] * 3, ["quiz"], None, []),  # an instruction, not their subject
        ([{"support": ""}, {"support": ""}, {"support": "b"}], ["sciq"], None, []),
        ([{"source_id": 7}, {"source_id": 7}, {"source_id": 8}], ["hellaswag", "hellaswag_10shot"], None, [{"0", "1"}]),
        ([{"context": "a"}, {"context": "a"}, {"context": "b"}], ["mmlu_law"], None, []),
        ([{"passage": "a", "topic": t} for t in "xyy"], ["boolq"], "topic", [{"1", "2"}]),
    ],
)
def test_clusters_are_questions_with_the_same_value_of_a_field(
    docs: list[dict[str, Any]], names: list[str], cluster_by: str | None, together: list[set[str]]
):
    clusters = clusters_of(names, {str(number): doc for number, doc in enumerate(docs)}, cluster_by=cluster_by)
    assert [
        {name for name in clusters if clusters[name] == cluster} for cluster in dict.fromkeys(clusters.values())
    ] == together


def test_samples_of_questions_about_a_document_share_a_cluster(recorded: Path):
    path = samples_file(recorded, "shapes_few")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["doc"]["passage"] = f"passage {number // 3}"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = few_in(recorded)
    assert len({sample.cluster for sample in samples[:3]}) == 1 and samples[0].cluster
    assert samples[3].cluster == samples[4].cluster != samples[0].cluster


def test_answers_of_a_question_that_names_its_choices_take_no_more_memory_than_the_choices(recorded: Path):
    def named(target: str) -> str:
        edit_sample(recorded, "shapes_few", lambda sample: sample.update(target=target))
        sample = few_in(recorded)[0]
        assert len(sample.choices) > 1
        return str(sample.target)

    once = named("[0, 1]")
    assert " | " in once and named(str([0, 1] * 500)) == once
    assert named(str([0, 1] * 5000)) == str([0, 1] * 5000)


def test_samples_recorded_run_gives_each_question_once_with_the_scores_of_all_filters(recorded: Path):
    samples = list(EVALUATOR.read(recorded, make_config())[1])
    assert len(samples) == 35 == len({(sample.benchmark, sample.id) for sample in samples})
    [words] = [sample for sample in samples if sample.benchmark == "shape_words" and sample.id.startswith("1-")]
    assert words.id == "1-8fdbcfe3e64d"
    assert (words.prompt, words.output, words.target) == ("The sides of a square, in one word:", "D5oB1r", "four")
    assert words.scores == {"exact_match,strict": 0.0, "exact_match,flexible": 0.0}
    [few] = [sample for sample in samples if sample.benchmark == "shapes_few" and sample.id.startswith("0-")]
    assert (few.prompt, few.target, few.scores) == ("A triangle has", "three", {"acc": 0.0})
    assert few.output in few.choices and len(few.choices) == len(few.log_likelihoods)
    assert few.choices == ("three", "four", "five", "six", "eight", "none")


def test_sample_has_what_stood_before_its_question_as_far_as_the_plan_or_the_conversation_tells(recorded: Path):
    turns = [("system", "Be brief."), ("user", "A sphere?"), ("assistant", "none"), ("user", 'It\'s {"role": "user"')]
    sent = json.dumps([{"role": role, "content": content} for role, content in turns], ensure_ascii=False)
    edit_sample(recorded, "shape_words", lambda sample: sample.update(arguments=[[[sent], {}]]))
    plan = json.loads((recorded / "plan.json").read_text())
    plan["benchmarks"]["shape_sides"]["shapes_few"]["contexts"] = {0: 2}
    (recorded / "plan.json").write_text(json.dumps(plan))
    by_question = {(sample.benchmark, sample.id[0]): sample for sample in EVALUATOR.read(recorded, make_config())[1]}
    first, chat = by_question["shapes_few", "0"], by_question["shape_words", "0"]
    assert (first.context, first.prompt, by_question["shapes_few", "1"].context) == ("A ", "triangle has", "")
    assert chat.asked == str([sent]) and chat.context.endswith('"none"}, ')
    assert chat.prompt.startswith('{"role": "user", "content": "It')


def test_samples_questions_left_out_have_no_score_and_are_counted_apart(recorded: Path):
    plan = json.loads((recorded / "plan.json").read_text())
    plan["benchmarks"]["shape_words"]["shape_words"] |= {"skipped": 1, "truncated": 2}
    (recorded / "plan.json").write_text(json.dumps(plan))
    line = {"benchmark": "shape_words", "doc_id": 7, "doc_hash": "ab" * 32, "prompt": "A long shape", "target": "six"}
    (recorded / "skipped.jsonl").write_text(json.dumps(line) + "\n")
    counts = parse(recorded).counts
    assert (counts.requested, counts.scored, counts.skipped, counts.truncated) == (35, 35, 1, 2)
    *_, last = EVALUATOR.read(recorded, make_config())[1]
    assert (last.id, last.prompt, last.output, last.scores) == ("7-abababababab", "A long shape", "", {})


@pytest.mark.parametrize(
    "damage", [{"arguments": None}, {"resps": [[]]}, {"target": None}, {"metrics": 1}, {"acc": []}]
)
def test_samples_of_a_damaged_line_are_read_as_far_as_possible(recorded: Path, damage: dict[str, Any]):
    edit_sample(recorded, "shapes_few", lambda sample: sample.update(damage))
    assert len(list(EVALUATOR.read(recorded, make_config())[1])) == 35


# Withheld


def test_samples_perplexity_beyond_all_numbers_is_no_score(recorded: Path):
    weighed = {"metrics": ["perplexity", "acc"], "perplexity": -math.inf, "acc": 1.0, "doc_id": 0}
    edit_sample(recorded, "shapes_few", lambda sample: sample.update(weighed))
    question = few_in(recorded)[0]
    assert question.scores == {"acc": 1.0}


def withheld(folder: Path) -> tuple[int, int, int]:
    parsed = parse(folder)
    with pytest.raises(CountsDisagree):
        verify_counts(parsed)
    return parsed.counts.requested, parsed.counts.answered, parsed.counts.scored


@pytest.mark.parametrize(
    ("benchmark", "edit", "counts"),
    [
        ("shapes_few", lambda lines: lines[:-1], (35, 34, 34)),
        ("shapes_few", lambda lines: [*lines[:-1], lines[0]], (35, 34, 34)),
        ("shapes_few", lambda lines: [], (35, 30, 30)),
        ("shape_words", lambda lines: [*lines[:-1], lines[-1][:-100]], (35, 35, 34)),  # a line of the second filter
    ],
    ids=["fewer", "twice", "none", "cut"],
)
def test_parse_samples_that_differ_in_number_from_the_questions_are_withheld(
    recorded: Path, benchmark: str, edit: Callable[[list[bytes]], list[bytes]], counts: tuple[int, int, int]
):
    path = samples_file(recorded, benchmark)
    path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True))))
    assert withheld(recorded) == counts


@pytest.mark.parametrize(
    "line", [b"\xff\xfe\x00", b"{", b"[" * 100_000, b"null", b'{"doc_id": {}}', b'{"doc_id": 1e999}']
)
def test_parse_garbage_line_in_samples_is_withheld(recorded: Path, line: bytes):
    path = samples_file(recorded, "shapes_few")
    path.write_bytes(b"\n".join([line, *path.read_bytes().splitlines()[1:]]))
    assert withheld(recorded) == (35, 34, 34)


@pytest.mark.parametrize(
    ("benchmark", "responses"),
    [
        *(("shapes_few", responses) for responses in (None, [], [None, None], [[]] * 6, [[[]]] * 6, "text")),
        *(("shapes_few", [[[number, "False"]]] * 6) for number in ("nan", "-inf", "None")),
        ("shapes_few", [[["-1.0", "False"]]] * 5),
        *(("shape_words", responses) for responses in (None, [[None]], [[NO_ANSWER]], [[]], [[{}]])),
    ],
)
def test_parse_answer_that_is_missing_or_not_finite_is_withheld(recorded: Path, benchmark: str, responses: Any):
    edit_sample(recorded, benchmark, lambda sample: sample.update(resps=responses))
    assert withheld(recorded) == (35, 34, 34)


def test_parse_empty_generation_is_an_answer(recorded: Path):
    edit_sample(recorded, "shape_words", lambda sample: sample.update(resps=[[""]]))
    verify_counts(parse(recorded))


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, {}, [0.5, float("nan")], 10**400])
def test_parse_score_missing_or_not_finite_is_withheld(recorded: Path, score: Any):
    edit_sample(recorded, "shapes_few", lambda sample: sample.update(acc=score))
    assert withheld(recorded) == (35, 35, 34)


def test_parse_scores_kept_as_pairs_or_texts_are_scores(recorded: Path):
    edit_sample(recorded, "shapes_few", lambda sample: sample.update(acc=[-12.5, 4]))
    edit_sample(recorded, "shapes_many", lambda sample: sample.update(acc=["reference", "prediction"]))
    verify_counts(parse(recorded))


def test_parse_fewer_questions_evaluated_than_planned_is_withheld(recorded: Path):
    plan = json.loads((recorded / "plan.json").read_text())
    plan["benchmarks"]["shape_words"]["shape_words"]["questions"] = 6
    (recorded / "plan.json").write_text(json.dumps(plan))
    assert withheld(recorded) == (36, 35, 35)


# Garbage


@pytest.mark.parametrize("pattern", ["plan.json", "lm_eval/*/results_*.json"])
@pytest.mark.parametrize(
    "content", [None, b"", b"\xff", b"{", b"[]", b"null", b"{}", b'{"results": 1}', b"[" * 100_000]
)
def test_parse_file_that_is_garbage_is_invalid_output(recorded: Path, pattern: str, content: bytes | None):
    [path] = recorded.glob(pattern)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HarnessOutputInvalid) as caught:
        parse(recorded)
    assert caught.value.record_status == "infra_failed"


def test_parse_results_without_a_benchmark_that_was_asked_is_invalid_output(recorded: Path):
    edit_results(recorded, lambda content: content["results"].pop("shape_words"))
    with pytest.raises(HarnessOutputInvalid, match="shape_words"):
        parse(recorded)


def test_parse_of_another_evaluations_folder_is_invalid_output(recorded: Path):
    with pytest.raises(HarnessOutputInvalid):
        EVALUATOR.read(recorded, make_config(EvalTaskConfig(name="shape_words")))[0]


def test_parse_metric_that_is_no_number_though_all_was_scored_is_invalid_output(recorded: Path):
    edit_results(recorded, lambda content: content["results"]["shapes_few"].update({"acc,none": float("nan")}))
    with pytest.raises(HarnessOutputInvalid, match="shapes_few acc"):
        parse(recorded)


# Progress


def test_progress_is_that_of_the_last_bar_of_requests():
    log = (
        "Running loglikelihood requests\n"
        "Requesting API (arc, piqa; 0 before, 580 in all):  37%|███▋      | 178/480 [00:01<00:02, 100.00it/s]\r"
        "Requesting API (arc, piqa; 0 before, 580 in all): 100%|██████████| 480/480 [00:03<00:00, 150.00it/s]\n"
        "Requesting API (gsm8k; 480 before, 580 in all):   7%|▋         | 7/100 [00:00<?, ?it/s]\r"
    )
    assert EVALUATOR.progress(log) == Progress("gsm8k", 487, 580)
    unlabelled = "Requesting API:  37%|███▋ | 148/400 [00:01<00:02, 9it/s]"
    assert EVALUATOR.progress(unlabelled) == Progress("requests", 148, 400)
    assert EVALUATOR.progress("Tokenizing inputs: 100%|██████████| 480/480 [00:00<00:00, 20541.22it/s]") is None


# Looking benchmarks up


@pytest.fixture
def environment_python(tmp_path: Path) -> Path:
    """An interpreter that lists two benchmarks once and then breaks."""
    python = tmp_path / "lm-eval-0123" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nrm "$0"\necho \'{"benchmarks": ["hellaswag", "mbpp"], "run_code": ["mbpp"]}\'\n')
    python.chmod(0o755)
    return python


def test_check_of_own_benchmarks_asks_no_environment(cache_dir: Path):
    EVALUATOR.check(make_config(), PYTHON)
    assert not cache_dir.exists()


def test_check_benchmark_of_lm_eval_is_asked_for_once_per_environment(cache_dir: Path, environment_python: Path):
    for _ in range(2):
        EVALUATOR.check(make_config(EvalTaskConfig(name="hellaswag")), environment_python)
    assert not environment_python.exists()


def test_check_unknown_benchmark_says_what_may_have_been_meant(cache_dir: Path, environment_python: Path):
    with pytest.raises(UnknownBenchmark, match="did you mean hellaswag"):
        EVALUATOR.check(make_config(EvalTaskConfig(name="helaswag")), environment_python)
    with pytest.raises(UnknownBenchmark, match="did you mean shape_words"):
        EVALUATOR.check(make_config(EvalTaskConfig(name="shape_word")), environment_python)


def test_check_names_files_it_could_not_read(cache_dir: Path, environment_python: Path, tmp_path: Path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "broken.yaml").write_text("task: [")
    (folder / "deep.yaml").write_text("task: " + "[" * 2000)
    os.mkfifo(folder / "pipe.yaml")
    (folder / "good.yaml").write_text("task: good\nprocess_docs: !function functions.process\n")
    EVALUATOR.check(make_config(EvalTaskConfig(name="good"), benchmarks_path=str(folder)), environment_python)
    with pytest.raises(UnknownBenchmark, match=r"broken\.yaml, deep\.yaml"):
        EVALUATOR.check(make_config(EvalTaskConfig(name="bad"), benchmarks_path=str(folder)), environment_python)


def test_check_benchmarks_in_a_store_are_found(cache_dir: Path):
    fsspec.filesystem("memory").pipe_file("/lm-eval-check/own/one.yaml", b"task: one")
    config = make_config(EvalTaskConfig(name="one"), benchmarks_path="memory://lm-eval-check/own")
    EVALUATOR.check(config, PYTHON)


def test_check_folder_that_does_not_exist_is_bad_input(cache_dir: Path, tmp_path: Path):
    with pytest.raises(BadInput, match="benchmarks_path"):
        EVALUATOR.check(make_config(benchmarks_path=str(tmp_path / "missing")), PYTHON)


def test_check_benchmark_that_runs_code_needs_permission(cache_dir: Path, environment_python: Path, tmp_path: Path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.yaml").write_text("task: mine\nunsafe_code: true\n")
    own = {"benchmarks_path": str(folder)}
    for name in ("mbpp", "mine"):
        with pytest.raises(BadInput, match=f"allow_code_execution to name {name}"):
            EVALUATOR.check(make_config(EvalTaskConfig(name=name), **own), environment_python)
        allowed = LmEvalOptions(allow_code_execution=(name,))
        EVALUATOR.check(make_config(EvalTaskConfig(name=name), evaluator=allowed, **own), environment_python)


def test_check_interpreter_that_is_gone_says_which_folder_to_delete(cache_dir: Path):
    with pytest.raises(EnvironmentBuildFailed, match=f"Delete the folder {PYTHON.parents[1]}"):
        EVALUATOR.check(make_config(EvalTaskConfig(name="hellaswag")), PYTHON)


def test_check_listing_that_is_none_is_reported(cache_dir: Path, environment_python: Path):
    environment_python.write_text("#!/bin/sh\necho no JSON\n")
    with pytest.raises(HarnessFailed, match="by hand"):
        EVALUATOR.check(make_config(EvalTaskConfig(name="hellaswag")), environment_python)
