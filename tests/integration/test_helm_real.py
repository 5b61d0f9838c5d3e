"""HELM itself, in its own environment, against the deterministic engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.endpoints import KEY, served_model
from fakes.engine import FakeEngine
from fakes.launcher import FakeLauncher
from fakes.lm_eval import Harness, smooth_by_hand
from fakes.models import write_checkpoint
from fakes.pools import InferencePool
from fakes.tokenizers import write_byte_tokenizer
from pools.config import InferencePoolConfig
from pools.endpoint import GENERATE, RunningModel, Scoring
from pools.engine.launch import Servable
from resources.backends.local.client import LocalClient
from resources.errors import BadInput, EndpointUnusable
from resources.settings import process_environment
from tasks.errors import CountsDisagree, GraderFailed, HarnessFailed, UnknownBenchmark
from tasks.evaluators.evaluator import Progress
from tasks.evaluators.harness import LOG_NAME, verify_counts
from tasks.evaluators.helm.evaluator import EVALUATOR
from tasks.records.record import begin_scope, end_scope
from tasks.records.samples import SAMPLES_NAME, read_samples
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig
from tasks.spec.suites import SuiteRequest, load_suite

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]

NATURAL = EvalTaskConfig(name="synthetic_reasoning_natural", task_kwargs={"difficulty": "easy"}, num_fewshot=1)
MODEL = "assay/run-1"
RUNS = Path("helm", "benchmark_output", "runs", "assay")

Evaluate = Callable[..., Any]


@pytest.fixture
def harness(imported: Callable[[str], Harness]) -> Harness:
    return imported("helm")


@pytest.fixture
def python(harness: Harness) -> Path:
    return harness.python


@pytest.fixture
def evaluate(harness: Harness) -> Evaluate:
    return harness.evaluate


def make_config(*benchmarks: str | EvalTaskConfig, **changes: Any) -> EvaluationConfig:
    evals = tuple(EvalTaskConfig(name=item) if isinstance(item, str) else item for item in benchmarks)
    given = {"model_path": "checkpoint", "base_url": "http://unused/v1", "evals": evals, "max_eval_instances": 5}
    return EvaluationConfig.model_validate({"evaluator": "helm", **given, **changes})


def make_model(engine: FakeEngine, tokenizer: Path, **changes: Any) -> RunningModel:
    return served_model(f"{engine.url}/v1", tokenizer, **changes)


def write_questions(folder: Path, *, before: str = "") -> Path:
    folder.mkdir()
    questions = [
        {
            "input": {"text": f"{before}How many sides has shape {number}?"},
            "references": [
                {"output": {"text": str(sides)}, "tags": ["correct"] if sides == number else []} for sides in (3, 4, 5)
            ],
            "split": "test",
        }
        for number in (3, 4, 5)
    ]
    (folder / "shapes.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return folder


def shapes(**changes: Any) -> EvalTaskConfig:
    return EvalTaskConfig.model_validate({"name": "custom_mcqa", "task_kwargs": {"path": "shapes.jsonl"}, **changes})


def answered_and_scored(folder: Path) -> tuple[list[Any], list[Any]]:
    """Returns answers and scores of each question of a HELM run, without times and finish reasons (HELM loses them)."""
    states = json.loads((folder / "scenario_state.json").read_text())["request_states"]
    for state in states:
        for name in ("request_time", "request_datetime"):
            state["result"].pop(name)
        for completion in state["result"]["completions"]:
            completion.pop("finish_reason", None)
    stats = json.loads((folder / "per_instance_stats.json").read_text())
    for question in stats:
        names = ("inference_runtime", "finish_reason_")
        question["stats"] = [stat for stat in question["stats"] if not stat["name"]["name"].startswith(names)]
    return states, stats


async def test_benchmarks_give_metrics_equal_counts_samples_and_a_site(tmp_path: Path, evaluate: Evaluate):
    seen: list[Progress] = []
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        output = tmp_path / "output"
        config = make_config("simple_mcqa", "demo_mcqa", NATURAL)
        parsed = await evaluate(model, config, output, on_progress=seen.append)
        assert engine.stats.requests == 5 + 5 * 4 + 5
    verify_counts(parsed)
    assert parsed.counts.requested == parsed.samples == 15
    first = {metric.benchmark: metric.name for metric in reversed(parsed.metrics)}
    natural = {"synthetic_reasoning_natural": "f1_set_match"}
    assert first == {"simple_mcqa": "exact_match", "demo_mcqa": "exact_match", **natural}
    asked = {"simple_mcqa": 5, "demo_mcqa": 5, "synthetic_reasoning_natural": 2}  # the rest are in another split
    assert all(metric.n == asked[metric.benchmark] and metric.stderr is not None for metric in parsed.metrics)
    smooth = {(metric.benchmark, metric.name): metric for metric in parsed.metrics if metric.smooth}
    assert {key: metric.higher_is_better for key, metric in smooth.items()} == {
        ("demo_mcqa", "bpb"): False,
        ("demo_mcqa", "choice_prob_norm"): True,
    }, "letters are asked for in the other"
    assert all(metric.recomputed and metric.low < metric.value < metric.high for metric in smooth.values())
    assert parsed.versions == {"helm": "0.5.16"}
    ends = {name: (part.finish_reasons, part.at_limit) for name, part in parsed.details.items()}
    assert ends["simple_mcqa"] == ({"length": 5}, None), "letters are asked for"
    assert ends["demo_mcqa"] == ({}, None), "texts are weighed"
    assert sum(ends["synthetic_reasoning_natural"][0].values()) == 5
    controls = {name: part.control for name, part in parsed.details.items()}
    assert controls["simple_mcqa"] == controls["synthetic_reasoning_natural"] == "passed"
    assert controls["demo_mcqa"] == "no control: it does not only let the model write"
    assert (seen[-1].stage, seen[-1].done) == ("synthetic_reasoning_natural (3 of 3)", 5)

    samples = list(read_samples(str(output / SAMPLES_NAME)))
    assert samples[-1].prompt.count("Rules:") == samples[-1].context.count("Rules:") == 1
    assert samples[-1].tokens and not samples[-1].choices
    for metric in (metric for metric in parsed.metrics if metric.name in ("exact_match", "f1_set_match")):
        shares = [sample.scores.get(metric.name) for sample in samples if sample.benchmark == metric.benchmark]
        scores = [share for share in shares if share is not None]
        assert (len(shares), len(scores)) == (5, metric.n)
        assert sum(scores) / metric.n == pytest.approx(metric.value)

    [page] = parsed.links.values()
    assert (output / page).is_file()
    assert 'SUITE = "assay"' in (output / page).with_name("config.js").read_text()
    runs = json.loads((output / RUNS / "runs.json").read_text())
    assert len(runs) == 3
    assert "even or odd" not in (output / LOG_NAME).read_text()
    for path in (path for path in output.rglob("*") if path.is_file()):
        assert KEY not in path.read_text(errors="replace"), path


async def test_choices_come_from_the_cache_where_the_engine_can_and_else_from_echoes(
    tmp_path: Path, evaluate: Evaluate
):
    able = Scoring(scores_from_cache=True, engine=str(tmp_path), architecture="a", dtype="float32")
    ways = {"echo": (Scoring(), False), "cache": (able, False), "refused": (able, True)}
    before = "Of shapes that Euclid knew, each has its own name and its sides. "
    folder = write_questions(tmp_path / "benchmarks", before=before)
    separate = {"path": "shapes.jsonl", "method": "multiple_choice_separate_original"}
    config = make_config(shapes(task_kwargs=separate), benchmarks_path=str(folder))
    by_way = {}
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        for name, (scoring, engine.faults.no_generate) in ways.items():
            engine.targets.clear()
            parsed = await evaluate(replace(model, scoring=scoring), config, tmp_path / name)
            verify_counts(parsed)
            assert (GENERATE in engine.targets) is scoring.scores_from_cache
            by_way[name] = parsed
    samples = {name: list(read_samples(str(tmp_path / name / SAMPLES_NAME))) for name in ways}
    assert samples["cache"] == samples["refused"] == samples["echo"]
    by_hand = smooth_of_run(next((tmp_path / "echo" / RUNS).glob("custom_mcqa*")))
    assert [sample.scores for sample in samples["echo"]] == [
        pytest.approx({"exact_match": sample.scores["exact_match"], **by_hand[sample.id.partition("-")[0]]})
        for sample in samples["echo"]
    ]
    cached, refused = by_way["cache"].asking.loglikelihood, by_way["refused"].asking.loglikelihood
    assert (cached.way, cached.audited, cached.largest_difference, cached.reason) == ("prefix cache", 3, 0.0, None)
    assert refused.way == "echo" and "403" in refused.reason


def smooth_of_run(folder: Path) -> dict[str, dict[str, float]]:
    """Returns smooth scores of each question of a HELM run, from its choices' tokens: a space, then a byte each."""
    weighed: dict[str, list[float]] = {}
    choices: dict[str, list[dict[str, Any]]] = {}
    for state in json.loads((folder / "scenario_state.json").read_text())["request_states"]:
        question, references = state["instance"]["id"], state["instance"]["references"]
        text = f" {references[state['reference_index']]['output']['text']}"
        [answer] = state["result"]["completions"]
        last = answer["tokens"][-len(text.encode()) :]
        weighed.setdefault(question, []).append(sum(token["logprob"] for token in last))
        choices[question] = references
    return {
        question: smooth_by_hand(
            [choice["output"]["text"] for choice in offered],
            weighed[question],
            next(place for place, choice in enumerate(offered) if "correct" in choice["tags"]),
        )
        for question, offered in choices.items()
    }


async def test_answers_and_scores_through_a_pool_are_those_of_the_bare_command_line(
    tmp_path: Path, python: Path, evaluate: Evaluate
):
    checkpoint = write_checkpoint(tmp_path / "step-1", seed=1)
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    config = make_config("simple_mcqa", NATURAL)
    pool_config = InferencePoolConfig.model_validate({"model": {"name": "run"}, "startup_timeout_seconds": 60})
    pool_client = LocalClient(tmp_path / "jobs")
    served = [Servable.from_uri("run-1", str(checkpoint))]
    with InferencePool(pool_config, served, client=pool_client, launcher=FakeLauncher(tmp_path)) as pool:
        running, _ = await asyncio.to_thread(pool.load, "run-1")
        running = replace(running, max_model_len=2048, tokenizer=str(tokenizer))
        verify_counts(await evaluate(running, config, tmp_path / "ours"))
    pool_client.shutdown()

    async with FakeEngine(weights=checkpoint) as engine:
        write_deployment(tmp_path / "prod_env", engine, tokenizer)
        entries = [f"simple_mcqa:model={MODEL}"]
        entries += [f"synthetic_reasoning_natural:difficulty=easy,max_train_instances=1,model={MODEL}"]
        helm_run = "import gc; gc.disable(); from helm.benchmark.run import main; main()"  # takes a third of the time
        command = [str(python), "-c", helm_run, "--run-entries", *entries, "--suite", "assay"]
        await asyncio.to_thread(
            subprocess.run,
            [*command, "--max-eval-instances", "5", "--local-path", "prod_env"],
            cwd=tmp_path,
            env=process_environment({"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}),
            check=True,
            capture_output=True,
        )
    theirs = sorted((tmp_path / "benchmark_output" / "runs" / "assay").glob("s*"))
    assert [folder.name.partition(":")[0] for folder in theirs] == ["simple_mcqa", "synthetic_reasoning_natural"]
    for folder in theirs:
        assert answered_and_scored(tmp_path / "ours" / RUNS / folder.name) == answered_and_scored(folder)


def write_deployment(folder: Path, engine: FakeEngine, tokenizer: Path) -> None:
    """Writes the files that users write by hand to run `helm-run` against an endpoint."""
    folder.mkdir()
    client = {"class_name": "helm.clients.openai_client.OpenAILegacyCompletionsClient"}
    reader = {"class_name": "helm.tokenizers.huggingface_tokenizer.HuggingFaceTokenizer"}
    deployment = {
        "name": "assay/checkpoint",
        "model_name": MODEL,
        "tokenizer_name": "huggingface/checkpoint",
        "max_sequence_length": 2048,
        "client_spec": {**client, "args": {"base_url": f"{engine.url}/v1", "openai_model_name": "run-1"}},
    }
    config = {
        "name": "huggingface/checkpoint",
        "tokenizer_spec": {**reader, "args": {"pretrained_model_name_or_path": str(tokenizer)}},
        "end_of_text_token": "<|eos|>",
        "prefix_token": "<|bos|>",
    }
    (folder / "model_deployments.yaml").write_text(json.dumps({"model_deployments": [deployment]}))
    (folder / "tokenizer_configs.yaml").write_text(json.dumps({"tokenizer_configs": [config]}))


async def test_dead_requests_withhold_the_score_and_only_their_runs_are_asked_again(tmp_path: Path, evaluate: Evaluate):
    benchmarks = str(write_questions(tmp_path / "benchmarks"))
    config = make_config(
        "simple_mcqa", shapes(), benchmarks_path=benchmarks, evaluator={"name": "helm", "request_retries": 0}
    )
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        engine.faults.status_count = 2
        engine.faults.malformed = 1
        withheld = await evaluate(model, config, tmp_path / "attempt-1")
        assert (withheld.counts.requested, withheld.counts.answered, withheld.counts.scored) == (8, 5, 5)
        with pytest.raises(EndpointUnusable, match="3 requests had no answer"):
            verify_counts(withheld)
        assert engine.stats.requests == 8

        resumed = await evaluate(model, config, tmp_path / "attempt-2")
        assert engine.stats.requests == 8 + 5
        verify_counts(resumed)
        unshared = config.model_copy(
            update={"evaluator": config.evaluator.model_copy(update={"skip_completed_runs": False})}
        )
        assert (await evaluate(model, unshared, tmp_path / "attempt-3")).metrics == resumed.metrics
        assert engine.stats.requests == 8 + 5 + 8
    both = [list(read_samples(str(tmp_path / attempt / SAMPLES_NAME))) for attempt in ("attempt-2", "attempt-3")]
    assert both[0] == both[1]


async def test_evaluation_that_is_done_again_takes_nothing_over(tmp_path: Path, evaluate: Evaluate):
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        for attempt in range(2):  # as after a deleted record
            begin_scope(str(tmp_path))
            verify_counts(await evaluate(model, make_config("simple_mcqa"), tmp_path / f"attempt-{attempt}"))
            end_scope(str(tmp_path))
        assert engine.stats.requests == 5 + 5


async def test_requests_that_fail_and_answers_that_are_malformed_for_a_moment_are_asked_again(
    tmp_path: Path, evaluate: Evaluate
):
    for fault in ({"status_count": 2, "refuse": 2}, {"aborted": 2}):
        async with FakeEngine(models=("m",)) as engine:
            for name, value in fault.items():
                setattr(engine.faults, name, value)
            model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
            verify_counts(await evaluate(model, make_config("simple_mcqa"), tmp_path / "-".join(fault)))
            assert engine.stats.requests > 5


async def test_empty_stop_string_is_not_sent(tmp_path: Path, evaluate: Evaluate):
    benchmark = NATURAL.model_copy(update={"task_kwargs": {"difficulty": "easy", "add_to_stop": ""}})
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        verify_counts(await evaluate(model, make_config(benchmark), tmp_path / "output"))
        assert [json.loads(body).get("stop") for body in engine.bodies] == [["\n"]] * 5


async def test_first_dead_request_ends_it_where_exit_on_error_is_set(tmp_path: Path, evaluate: Evaluate):
    async with FakeEngine(models=("m",)) as engine:
        engine.faults.status_count = 1_000_000
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"), capacity=1)
        options = {"name": "helm", "exit_on_error": True, "request_retries": 0}
        with pytest.raises(EndpointUnusable, match="exit_on_error is set: InternalServerError 500"):
            await evaluate(model, make_config("simple_mcqa", evaluator=options), tmp_path / "failed")
        engine.faults.status = 400
        with pytest.raises(HarnessFailed, match="simple_mcqa"):
            await evaluate(model, make_config("simple_mcqa", evaluator=options), tmp_path / "refused")
        assert engine.stats.requests == 2


async def test_prompts_that_the_endpoint_refuses_are_no_fault_of_the_endpoint(tmp_path: Path, evaluate: Evaluate):
    async with FakeEngine(models=("m",)) as engine:
        engine.faults.status, engine.faults.status_count = 400, 2
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        withheld = await evaluate(model, make_config("simple_mcqa"), tmp_path / "output")
        assert engine.stats.requests == 5
    assert withheld.counts.answered == 3
    with pytest.raises(CountsDisagree, match="the endpoint refused 2 requests, the first for: a fault was asked for"):
        verify_counts(withheld)


async def test_chat_template_sends_conversations_and_refuses_what_weighs_texts(tmp_path: Path, evaluate: Evaluate):
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"), apply_chat_template=True)
        verify_counts(await evaluate(model, make_config("simple_mcqa"), tmp_path / "chat"))
        messages = [json.loads(body)["messages"] for body in engine.bodies]
        assert [[message["role"] for message in conversation] for conversation in messages] == [["user"]] * 5
        with pytest.raises(BadInput, match="demo_mcqa"):
            await evaluate(model, make_config("demo_mcqa"), tmp_path / "weighed")
        plain = replace(model, apply_chat_template=False, prompt_logprobs=False)
        with pytest.raises(EndpointUnusable, match="demo_mcqa"):
            await evaluate(plain, make_config("demo_mcqa"), tmp_path / "blind")
        assert engine.stats.requests == 5


async def test_prompts_are_cut_to_what_the_model_holds_with_its_bos(tmp_path: Path, evaluate: Evaluate):
    async with FakeEngine(models=("m",), max_model_len=200) as engine:
        tokenizer = write_byte_tokenizer(tmp_path / "tokenizer", adds_bos=True)
        model = make_model(engine, tokenizer, max_model_len=200)
        verify_counts(await evaluate(model, make_config("simple_mcqa"), tmp_path / "output"))
        longest = max(len(body["prompt"]) + body["max_tokens"] for body in map(json.loads, engine.bodies))
    assert 150 < longest < 200


async def test_grader_that_ignores_answers_is_refused_before_any_request(tmp_path: Path, evaluate: Evaluate):
    benchmarks = write_questions(tmp_path / "benchmarks")
    questions = [json.loads(line) for line in (benchmarks / "shapes.jsonl").read_text().splitlines()]
    for reference in (reference for question in questions for reference in question["references"]):
        if reference["tags"]:
            reference["output"]["text"] = ""  # HELM's metrics never count it as correct
    (benchmarks / "shapes.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        config = make_config(shapes(), benchmarks_path=str(benchmarks))
        with pytest.raises(GraderFailed, match="no difference for 3 known answers"):
            await evaluate(model, config, tmp_path / "refused")
        assert engine.stats.requests == 0
        options = {"name": "helm", "failed_control": "note"}
        noted = make_config(shapes(), benchmarks_path=str(benchmarks), evaluator=options)
        parsed = await evaluate(model, noted, tmp_path / "noted")
    assert parsed.details["custom_mcqa"].control == "failed for 3 known answers"


async def test_more_prompts_that_are_cut_than_may_be_are_not_asked(tmp_path: Path, evaluate: Evaluate):
    benchmarks = write_questions(tmp_path / "benchmarks")
    text = (benchmarks / "shapes.jsonl").read_text().replace("shape 3?", f"shape {'3' * 400}?")
    (benchmarks / "shapes.jsonl").write_text(text)
    async with FakeEngine(models=("m",), max_model_len=300) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"), max_model_len=300)
        with pytest.raises(BadInput, match="1 of 3 questions that do not"):
            await evaluate(model, make_config(shapes(), benchmarks_path=str(benchmarks)), tmp_path / "refused")
        assert engine.stats.requests == 0
        tolerant = make_config(shapes(), benchmarks_path=str(benchmarks), max_truncated=0.5)
        parsed = await evaluate(model, tolerant, tmp_path / "cut")
    verify_counts(parsed)
    assert parsed.counts.truncated == parsed.details["custom_mcqa"].truncated == 1


async def test_file_of_run_entries_is_filtered_and_its_models_are_replaced(
    tmp_path: Path, python: Path, evaluate: Evaluate
):
    entries = tmp_path / "run_specs.conf"
    entries.write_text(
        """
        # HOCON: comments, and no need of commas between entries
        entries: [
          {description: "custom_mcqa:model=org/a,path=shapes.jsonl,method=multiple_choice_joint", priority: 1}
          {description: "custom_mcqa:model=org/a,path=shapes.jsonl,method=multiple_choice_separate_original"}
          {description: "simple_mcqa:model=text", priority: 2}
          {description: "simple_classification:model=text", priority: 3}
        ]
        """
    )
    options = {"name": "helm", "run_specs_path": str(entries), "priority": 2}
    given = {
        "evaluator": options,
        "max_eval_instances": 2,
        "benchmarks_path": str(write_questions(tmp_path / "benchmarks")),
    }
    joint = {"method": "multiple_choice_joint"}
    config = make_config("simple_mcqa", shapes(task_kwargs={}), shapes(task_kwargs=joint, task_alias="joint"), **given)
    EVALUATOR.check(config, python)
    with pytest.raises(UnknownBenchmark, match="simple_mcqa"):
        EVALUATOR.check(make_config("simple_mcq", evaluator=options), python)
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        parsed = await evaluate(model, config, tmp_path / "output")
        verify_counts(parsed)
        assert parsed.counts.requested == 8
        published = {metric.benchmark: metric.n for metric in parsed.metrics}
        both = [f"custom_mcqa.method=multiple_choice_{way}" for way in ("joint", "separate_original")]
        assert published == {"simple_mcqa": 2, "custom_mcqa": 4, **dict.fromkeys(both, 2), "joint": 2}
        everything = await evaluate(model, make_config("all", **given), tmp_path / "all")
        assert everything.counts.requested == 6
        with pytest.raises(BadInput, match="simple_classification"):
            await evaluate(model, make_config("simple_classification", **given), tmp_path / "none")


async def test_file_that_is_not_there_is_refused_with_its_path(tmp_path: Path, evaluate: Evaluate):
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        missing = shapes(task_kwargs={"path": "nowhere.jsonl"})
        with pytest.raises(BadInput, match=r"nowhere\.jsonl"):
            await evaluate(model, make_config(missing), tmp_path / "output")


def test_check_finds_what_comes_with_helm_and_refuses_what_does_not(python: Path):
    EVALUATOR.check(make_config("simple_mcqa", shapes(), NATURAL), python)
    subject = {"subject": "anatomy", "data_augmentation": "canonical"}
    EVALUATOR.check(make_config(EvalTaskConfig(name="mmlu", task_kwargs=subject)), python)
    for config in load_suite("helm").evaluations_of(SuiteRequest(model_path="run")):
        EVALUATOR.check(config, python)
    with pytest.raises(UnknownBenchmark, match="did you mean simple_mcqa"):
        EVALUATOR.check(make_config("simple_mcqaa"), python)
    with pytest.raises(BadInput, match="did you mean path"):
        EVALUATOR.check(make_config(shapes(task_kwargs={"path": "shapes.jsonl", "pathh": "x"})), python)
    with pytest.raises(BadInput, match="none for path"):
        EVALUATOR.check(make_config("custom_mcqa"), python)
