"""Errors that lm-eval must not make: truncate prompts silently, run a model's code, score with the wrong tokenizer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.engine import FakeEngine
from fakes.lm_eval import DEMO, KINDS, Harness, make_config, make_model, write_benchmark
from fakes.tokenizers import write_byte_tokenizer
from resources.errors import AssayError, BadInput, EndpointUnusable, EnvironmentBuildFailed
from tasks.errors import GraderFailed, HarnessFailed
from tasks.evaluators.harness import verify_counts
from tasks.evaluators.lm_eval.evaluator import EVALUATOR
from tasks.evaluators.lm_eval.options import LmEvalOptions
from tasks.records.record import Counts
from tasks.records.samples import SAMPLES_NAME, read_samples
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

CONTEXT = 100
QUESTION = {"question": "Who?", "word": "me"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_byte_tokenizer(tmp_path / "tokenizer")


async def refused(
    lm_eval: Harness,
    config: EvaluationConfig,
    output: Path,
    tokenizer: Path,
    *,
    kind: type[AssayError] = BadInput,
    engine: FakeEngine | None = None,
    proven: bool = False,
    **model: Any,
) -> AssayError:
    """Returns the error of a run that sends no request or, if `proven`, at most two to check the tokenizer."""
    async with engine or FakeEngine(models=("m",)) as engine:
        with pytest.raises(kind) as caught:
            await lm_eval.evaluate(make_model(engine, tokenizer, **model), config, output)
        assert 0 < engine.stats.requests <= 2 if proven else engine.stats.requests == 0
    assert type(caught.value) is kind
    assert not list(output.rglob("results_*.json"))
    return caught.value


# Long prompts


def long_and_short(folder: Path, **content: Any) -> EvaluationConfig:
    questions = [{"question": "Who?" if place % 2 else "Who?" * 50, "word": "me"} for place in range(4)]
    questions.append({"question": "é" * 47, "word": "me"})  # 94 tokens: with 8 answer tokens a single token too long
    return write_benchmark(folder, "lengths", questions, **content)


def with_policy(config: EvaluationConfig, policy: Any) -> EvaluationConfig:
    return config.model_copy(update={"evaluator": LmEvalOptions(long_prompts=policy)})


async def test_long_prompts_are_cut_on_the_left_and_counted_unless_told_otherwise(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path
):
    async with FakeEngine(models=("m",), max_model_len=CONTEXT) as engine:
        model = make_model(engine, tokenizer, max_model_len=CONTEXT)
        config = long_and_short(tmp_path / "own").model_copy(update={"max_truncated": 0.6})
        parsed = await lm_eval.evaluate(model, config, tmp_path / "output")
        lengths = sorted(len(prompt) for body in engine.bodies for prompt in json.loads(body)["prompt"])
    verify_counts(parsed)
    assert parsed.counts == Counts(requested=5, answered=5, scored=5, truncated=3)
    assert lengths == [4, 4, *[CONTEXT - 8] * 3]
    details = parsed.details["lengths"]
    assert (details.questions, details.truncated, details.skipped) == (5, 3, 0)
    assert "3 of 5 prompts were cut" in details.notes[0] and str(details.data).startswith("sha256:")
    plan = json.loads((tmp_path / "output" / "plan.json").read_text())["benchmarks"]["lengths"]["lengths"]
    assert plan["truncated_questions"] == [0, 2, 4]


@pytest.mark.parametrize(
    ("policy", "max_truncated", "remedies"),
    [
        ("truncate_left", 0.59, ("max_model_len", "skip", "raise max_truncated above 0.59")),
        ("truncate_left", 0.05, ("raise max_truncated above 0.05",)),
        ("fail", 0.05, ("truncate_left or skip",)),
    ],
)
async def test_more_long_prompts_than_may_be_are_refused_before_anything_is_asked(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, policy: str, max_truncated: float, remedies: tuple[str, ...]
):
    config = with_policy(long_and_short(tmp_path / "own"), policy).model_copy(update={"max_truncated": max_truncated})
    error = await refused(lm_eval, config, tmp_path / "output", tokenizer, max_model_len=CONTEXT)
    assert "lengths" in error.expected and "100 tokens" in error.expected
    assert f"max_truncated {max_truncated}" in error.expected
    assert "3 of 5 questions" in error.found and "208 tokens" in error.found
    assert all(remedy in error.remedy for remedy in remedies)


@pytest.mark.parametrize("output_type", ["generate_until", "multiple_choice"])
async def test_long_prompts_to_be_skipped_are_neither_asked_nor_scored_and_are_kept(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, output_type: str
):
    choice = {
        "output_type": output_type,
        "doc_to_choice": ["me", "you"],
        "doc_to_target": 0,
        "generation_kwargs": None,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    content = choice if output_type == "multiple_choice" else {}
    config = with_policy(long_and_short(tmp_path / "own", **content), "skip")
    async with FakeEngine(models=("m",), max_model_len=CONTEXT) as engine:
        model = make_model(engine, tokenizer, max_model_len=CONTEXT)
        parsed = await lm_eval.evaluate(model, config, tmp_path / "output")
        lengths = [len(prompt) for body in engine.bodies for prompt in json.loads(body)["prompt"]]
    verify_counts(parsed)
    left_out = 3 if output_type == "generate_until" else 2
    asked = 5 - left_out
    assert parsed.counts == Counts(requested=asked, answered=asked, scored=asked, skipped=left_out)
    assert max(lengths) < CONTEXT and all(metric.n == asked for metric in parsed.metrics)
    samples = list(read_samples(str(tmp_path / "output" / SAMPLES_NAME)))
    assert {sample.id[0]: bool(sample.scores) for sample in samples} == {
        **dict.fromkeys("13", True),
        **dict.fromkeys("02", False),
        "4": left_out == 2,
    }


@pytest.mark.parametrize(("policy", "remedy"), [("truncate_left", "cannot be cut"), ("skip", "no question of it fits")])
async def test_answers_longer_than_the_model_are_never_scored(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, policy: str, remedy: str
):
    config = write_benchmark(
        tmp_path / "own",
        "answers",
        [QUESTION],
        output_type="loglikelihood",
        doc_to_target="{{word * 100}}",
        generation_kwargs=None,
        metric_list=None,
    )
    error = await refused(lm_eval, with_policy(config, policy), tmp_path / "output", tokenizer, max_model_len=CONTEXT)
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("benchmark", "kind", "changes", "options"),
    [
        (DEMO[1], BadInput, {"max_model_len": 12}, LmEvalOptions()),
        (DEMO[0], EndpointUnusable, {"prompt_logprobs": False}, LmEvalOptions()),
        (DEMO[0], EndpointUnusable, {}, LmEvalOptions(endpoint="chat_completions")),
    ],
    ids=["short context", "no prompt_logprobs", "only chat"],
)
async def test_endpoint_that_cannot_do_what_a_benchmark_needs_is_refused_before_any_request(
    tmp_path: Path,
    lm_eval: Harness,
    tokenizer: Path,
    benchmark: str,
    kind: type[AssayError],
    changes: dict[str, Any],
    options: LmEvalOptions,
):
    config = make_config(*DEMO, evaluator=options)
    error = await refused(lm_eval, config, tmp_path / "output", tokenizer, kind=kind, **changes)
    assert benchmark in error.expected


# Missing features of the endpoint


async def test_request_that_the_endpoint_refuses_is_sent_once_and_quoted(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path
):
    config = write_benchmark(tmp_path / "own", "refused", [QUESTION])
    async with FakeEngine(models=("m",)) as engine:
        engine.faults.status, engine.faults.status_count = 400, 9
        with pytest.raises(HarnessFailed) as caught:
            await lm_eval.evaluate(make_model(engine, tokenizer), config, tmp_path / "output")
        assert engine.stats.requests == 1
    assert caught.value.found == "status 400: a fault was asked for"


async def test_empty_stop_string_is_not_sent(tmp_path: Path, lm_eval: Harness, tokenizer: Path):
    stops = {"max_gen_toks": 8, "until": [""]}
    config = write_benchmark(tmp_path / "own", "endless", [QUESTION], generation_kwargs=stops)
    async with FakeEngine(models=("m",)) as engine:
        parsed = await lm_eval.evaluate(make_model(engine, tokenizer), config, tmp_path / "output")
        assert [json.loads(body).get("stop") for body in engine.bodies] in ([None], [["<|endoftext|>"]])
    verify_counts(parsed)


@pytest.mark.parametrize(
    ("name", "changes", "finding", "remedy"),
    [
        (
            "coqa",
            {},
            "coqa cannot: No module named 'transformers.data.metrics'",
            "catalan_bench, coqa, galician_bench, ",
        ),
        (
            "arc_easy",
            {"dataset_path": "json", "dataset_kwargs": {"data_files": "nowhere.jsonl"}},
            "nowhere.jsonl",
            "Correct task_kwargs, or",
        ),
    ],
)
async def test_benchmark_of_lm_eval_that_cannot_load_is_not_to_be_mended(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, name: str, changes: dict[str, Any], finding: str, remedy: str
):
    config = make_config(EvalTaskConfig(name=name, task_kwargs=changes))
    error = await refused(lm_eval, config, tmp_path / "output", tokenizer)
    assert finding in error.found and remedy in error.remedy
    assert "Mend" not in error.remedy and "site-packages" not in error.remedy


# Tokenizers


@pytest.mark.parametrize(
    ("other", "reason"), [("merges", "tokens there in a text that has"), ("ids", "is read there as")]
)
async def test_tokenizer_that_is_not_the_endpoints_is_refused(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, other: str, reason: str
):
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    if other == "merges":
        content["model"] |= {"vocab": {**vocabulary, "th": 258, "an": 259}, "merges": ["t h", "a n"]}
    else:
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    config = make_config(DEMO[1], base_url="http://unused/v1")
    error = await refused(lm_eval, config, tmp_path / "output", tokenizer, proven=True)
    assert str(tokenizer) in error.expected and reason in error.found and "model_path" in error.remedy


async def test_token_ids_beyond_the_models_vocabulary_are_refused(tmp_path: Path, lm_eval: Harness, tokenizer: Path):
    config = make_config(DEMO[1], base_url="http://unused/v1")
    engine = FakeEngine(models=("m",), vocabulary_size=256)  # without the special tokens of the chat template
    output = tmp_path / "output"
    error = await refused(lm_eval, config, output, tokenizer, engine=engine, proven=True, apply_chat_template=True)
    assert "vocabulary of 256" in error.found


@pytest.mark.parametrize("adds_bos", [False, True])
async def test_tokenizer_of_the_endpoint_is_accepted(tmp_path: Path, lm_eval: Harness, adds_bos: bool):
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer", adds_bos=adds_bos)
    async with FakeEngine(models=("m",)) as engine:
        config = make_config(DEMO[1], base_url="http://unused/v1")
        verify_counts(await lm_eval.evaluate(make_model(engine, tokenizer), config, tmp_path / "output"))


@pytest.mark.parametrize("damage", ["folder", "file", "content", "template"])
async def test_tokenizer_that_does_not_load_is_refused(tmp_path: Path, lm_eval: Harness, tokenizer: Path, damage: str):
    match damage:
        case "folder":
            shutil.rmtree(tokenizer)
        case "file":
            (tokenizer / "tokenizer.json").unlink()
        case "content":
            (tokenizer / "tokenizer.json").write_text('{"version": "1.0", "model": {')
        case _:
            (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    output = tmp_path / "output"
    error = await refused(lm_eval, make_config(DEMO[1]), output, tokenizer, apply_chat_template=True)
    assert str(tokenizer) in str(error)


# Code


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KINDS, tmp_path / "code"))


@pytest.mark.parametrize(("name", "allowed"), [("kind_code", ()), ("kind_codes", ("kind_choice", "another"))])
async def test_benchmark_that_runs_code_is_refused_before_it_is_even_imported(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, code: Path, name: str, allowed: tuple[str, ...]
):
    options = LmEvalOptions(allow_code_execution=allowed)
    config = make_config(name, benchmarks_path=str(code), evaluator=options)
    error = await refused(lm_eval, config, tmp_path / "output", tokenizer)
    assert f"evaluator.allow_code_execution to name {name}" in error.expected
    assert not (code / "imported").exists()


@pytest.mark.parametrize(("name", "allowed"), [("kind_code", "kind_code"), ("kind_codes", "kind_code")])
async def test_benchmark_that_is_allowed_by_name_runs_code(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, code: Path, name: str, allowed: str
):
    config = make_config(
        name, benchmarks_path=str(code), evaluator=LmEvalOptions(allow_code_execution=(allowed,)), max_eval_instances=2
    )
    async with FakeEngine(models=("m",)) as engine:
        parsed = await lm_eval.evaluate(make_model(engine, tokenizer), config, tmp_path / "output")
    verify_counts(parsed)
    assert [metric.value for metric in parsed.metrics if metric.name == "runs"] == [1.0]


def test_check_knows_which_benchmarks_of_lm_eval_run_code(lm_eval: Harness):
    for name in ("humaneval", "mbpp_instruct", "cruxeval_input"):
        with pytest.raises(BadInput, match=f"allow_code_execution to name {name}"):
            EVALUATOR.check(make_config(name), lm_eval.python)
    EVALUATOR.check(
        make_config("humaneval", evaluator=LmEvalOptions(allow_code_execution=("humaneval",))), lm_eval.python
    )


# Graders

GRADERS = """
def none(references, predictions):
    return 0.0

def everything(references, predictions):
    return 1.0

def half(references, predictions):
    return float(references == predictions and "2" in predictions[0])
"""


def graded(folder: Path, metric: str, **content: Any) -> EvaluationConfig:
    """Writes a benchmark that shows gold answers in its prompts and has its own metric."""
    named = f"!function graders.{metric}" if metric in GRADERS else metric
    metrics = [{"metric": named, "aggregation": "mean", "higher_is_better": True}]
    rows = [{"question": f"Count {number}.", "word": f"It is {number}"} for number in range(4)]
    given = {"metric_list": metrics, "num_fewshot": 1, "fewshot_split": "test", **content}
    config = write_benchmark(folder, "counted", rows, **given)
    described = folder / "counted.yaml"
    described.write_text(described.read_text().replace(f'"{named}"', named))
    (folder / "graders.py").write_text(GRADERS)
    return config


@pytest.mark.parametrize("metric", ["none", "everything"])
async def test_grader_that_ignores_answers_withholds_the_score(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, metric: str
):
    config = graded(tmp_path / "own", metric)
    error = await refused(lm_eval, config, tmp_path / "output", tokenizer, kind=GraderFailed)
    assert error.record_status == "withheld" and "counted" in error.expected and "failed for 4" in error.found
    evidence = json.loads((tmp_path / "output" / "control.json").read_text())
    assert (evidence["question"], evidence["answer"]) == ("Count 0.", "It is 0")
    assert evidence["scores"] == evidence["empty"] == {f"{metric},none": float(metric == "everything")}
    noted = config.model_copy(update={"evaluator": LmEvalOptions(failed_control="note")})
    async with FakeEngine(models=("m",)) as engine:
        parsed = await lm_eval.evaluate(make_model(engine, tokenizer), noted, tmp_path / "noted")
    assert parsed.details["counted"].control == "failed for 4 known answers"


NUMBER = {"function": "regex", "regex_pattern": "answer is It is ([0-9])"}


@pytest.mark.parametrize(
    ("metric", "content", "outcome"),
    [
        ("exact_match", {}, "passed"),
        ("half", {}, "passed for 1 of 4 known answers"),
        ("none", {"num_fewshot": 0}, "no control: gold answers are not in the form"),
        ("exact_match", {"doc_to_target": "{{['neither', word]}}"}, "passed"),
        ("exact_match", {"doc_to_target": ""}, "no control: no gold answers"),
        (
            "exact_match",
            {"doc_to_target": "{{word[-1]}}", "filter_list": [{"name": "found", "filter": [NUMBER]}]},
            "no control: gold answers are not in the form",
        ),
    ],
)
async def test_known_answers_go_through_filters_and_metric_before_anything_is_asked(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, metric: str, content: dict[str, Any], outcome: str
):
    filters = content.get("filter_list", [])
    content |= {"num_fewshot": 0} if filters else {}
    config = graded(tmp_path / "own", metric, **content)
    async with FakeEngine(models=("m",)) as engine:
        parsed = await lm_eval.evaluate(make_model(engine, tokenizer), config, tmp_path / "output")
        assert engine.stats.requests == 1
    verify_counts(parsed)
    assert str(parsed.details["counted"].control).startswith(outcome)


# Benchmarks and their data


@pytest.mark.parametrize(
    ("questions", "content", "reason"),
    [
        (None, {}, "no file {folder}/own.jsonl"),
        ("broken", {}, "line 2 of {folder}/own.jsonl"),
        ([QUESTION], {"output_type": "guess"}, "guess"),
        ([QUESTION], {"doc_to_text": "{{ unfinished"}, "TemplateSyntaxError"),
        ([QUESTION, {"word": "me"}], {"doc_to_text": "{{question.upper()}}"}, "upper"),
    ],
)
async def test_benchmark_that_cannot_be_loaded_or_asked_is_refused_with_the_reason(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, questions: Any, content: dict[str, Any], reason: str
):
    folder = tmp_path / "own"
    config = write_benchmark(folder, "own", None if questions == "broken" else questions, **content)
    if questions == "broken":
        (folder / "own.jsonl").write_text(json.dumps(QUESTION) + '\n{"question": "Why\n')
    error = await refused(lm_eval, config, tmp_path / "output", tokenizer)
    assert "own" in error.expected and reason.format(folder=folder) in error.found


async def test_data_set_that_is_neither_here_nor_reachable_names_the_command_that_fetches_it(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
):
    config = write_benchmark(tmp_path / "own", "far", [], dataset_path="nobody/has-this", dataset_kwargs=None)
    cold = Harness(lm_eval.python, lm_eval.client)
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    error = await refused(cold, config, tmp_path / "output", tokenizer)
    assert "nobody/has-this" in error.found and "assay stage" in error.remedy


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("kind_words", {"task_kwargs": {"generation_kwarg": {}}}, "did you mean generation_kwargs?"),
        ("kind_words", {"task_kwargs": {"num_fewshot": 3}}, "num_fewshot"),
        ("kind_code", {"task_kwargs": {"unsafe_code": False}}, "empty list"),
        ("kind_choice", {"task_kwargs": {"generation_kwargs": {"temperature": 1}}}, "generates nothing"),
        ("kind_text", {"num_fewshot": 3}, "whole texts"),
    ],
)
async def test_setting_that_would_be_ignored_is_refused(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, name: str, settings: dict[str, Any], reason: str
):
    config = make_config(EvalTaskConfig(name=name, **settings), benchmarks_path=str(KINDS))
    error = await refused(lm_eval, config, tmp_path / "output", tokenizer)
    assert reason in error.found


# The environment


async def test_environment_without_its_packages_is_to_be_deleted(tmp_path: Path, lm_eval: Harness, tokenizer: Path):
    folder = tmp_path / "lm-eval-broken"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    broken = Harness(folder / "bin" / "python", lm_eval.client)
    error = await refused(broken, make_config(DEMO[1]), tmp_path / "output", tokenizer, kind=EnvironmentBuildFailed)
    assert "lm_eval" in error.found and f"Delete the folder {folder}" in error.remedy
    with pytest.raises(EnvironmentBuildFailed, match=f"Delete the folder {folder}"):
        EVALUATOR.check(make_config("hellaswag"), broken.python)


async def test_environment_without_its_interpreter_is_refused_with_a_rebuild_as_remedy(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path
):
    gone = Harness(tmp_path / "lm-eval-gone" / "bin" / "python", lm_eval.client)
    error = await refused(gone, make_config(DEMO[1]), tmp_path / "output", tokenizer)
    assert str(gone.python) in error.found and "rebuilds" in error.remedy
