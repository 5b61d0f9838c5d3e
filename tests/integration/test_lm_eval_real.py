"""lm-eval itself, in its own environment, against the deterministic engine: its requests and its results."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fakes.endpoints import served_model
from fakes.engine import FakeEngine
from fakes.judge import FakeJudge
from fakes.lm_eval import (
    DEMO,
    KEY,
    KINDS,
    PROGRAM,
    Harness,
    make_config,
    make_model,
    results,
    samples,
    smooth_of,
    write_benchmark,
)
from fakes.proxy import CLIENT_KEY, running_proxy, state_of
from fakes.tokenizers import BOS, write_byte_tokenizer
from resources.errors import BadInput, EndpointUnusable
from resources.settings import process_environment
from tasks.errors import UnknownBenchmark
from tasks.evaluators.harness import Progress, verify_counts
from tasks.evaluators.lm_eval.evaluator import EVALUATOR, listing
from tasks.evaluators.lm_eval.options import LmEvalOptions
from tasks.evaluators.reading import tokens_to_ask
from tasks.records.record import Counts
from tasks.records.samples import SAMPLES_NAME, Sample, read_samples
from tasks.spec.evaluation import EvalTaskConfig, EvaluationConfig

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

OWN = Path(__file__).parents[1] / "data" / "lm_eval" / "benchmarks"
BARE = f"""
import gc, sys
gc.disable()
sys.path.append({str(PROGRAM.parent)!r})
from lm_eval_index import use_remembered_index
use_remembered_index()
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""
"""lm-eval's own command, without reading its fifteen thousand benchmark files (13 s) and without garbage collection."""
NOT_FROM_CACHE = "the engine does not score from its prefix cache"
SMOOTH = ("bpb", "choice_prob_norm")
WITHOUT = "Without bpb and choice_prob_norm:"
COMPARED = ("kind_shuffled", "kind_blank", "kind_choice", "kind_next", "kind_targets", "kind_text", "kind_words")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_byte_tokenizer(tmp_path / "tokenizer")


def by_question(folder: Path, benchmark: str) -> list[Sample]:
    return [sample for sample in read_samples(str(folder / SAMPLES_NAME)) if sample.benchmark == benchmark]


async def test_bundled_benchmarks_give_metrics_equal_counts_and_samples(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path
):
    seen: list[Progress] = []
    config = make_config(*DEMO, max_eval_instances=None)
    EVALUATOR.check(config, lm_eval.python)
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, tokenizer)
        output = tmp_path / "output"
        parsed = await lm_eval.evaluate(model, config, output, on_progress=seen.append)
    verify_counts(parsed)
    assert parsed.counts.requested == 220
    numbers = {(metric.benchmark, metric.name): metric for metric in parsed.metrics}
    facts = ("acc", "acc_norm", *SMOOTH)
    assert set(numbers) == {*(("demo_facts", name) for name in facts), ("demo_backwards", "exact_match")}
    assert numbers["demo_facts", "acc"].n == 120
    assert 0 < (numbers["demo_facts", "acc"].stderr or 0) < 0.1
    assert parsed.versions["lm_eval"] == "0.4.13"
    assert len(samples(output, "demo_facts")) == 120
    assert parsed.samples == 220
    assert (seen[-1].done, seen[-1].total) == (580, 580)
    assert (way := parsed.asking.loglikelihood) and (way.way, way.reason) == ("echo", NOT_FROM_CACHE)
    continued = [body["prompt"] for body in map(json.loads, engine.bodies) if not body.get("echo")]
    assert len(continued) > 10 and all(prompts == sorted(prompts) for prompts in continued)
    assert not any("seed" in json.loads(body) for body in engine.bodies)
    for path in (path for path in output.rglob("*") if path.is_file()):
        assert KEY not in path.read_text(errors="replace"), path


@pytest.mark.parametrize("in_chat", [False, True], ids=["completions", "chat"])
async def test_samples_through_the_proxy_are_those_of_the_bare_command_at_the_engine(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, in_chat: bool
):
    async with FakeEngine(models=("m",)) as engine:
        model_args = {
            "model": "m",
            "base_url": f"{engine.url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": str(tokenizer),
            "tokenized_requests": True,
            "num_concurrent": 8,
            "max_retries": 3,
        }
        command = [str(lm_eval.python), "-c", BARE, "--model", "local-completions", "--tasks"]
        command += [",".join(COMPARED), "--include_path", ".", "--log_samples", "--output_path", str(tmp_path / "bare")]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())]
        command += ["--apply_chat_template", "--fewshot_as_multiturn", "true"] if in_chat else []
        await asyncio.to_thread(
            subprocess.run,
            command,
            cwd=KINDS,
            env=process_environment({"OPENAI_API_KEY": KEY, "HF_HOME": str(tmp_path / "hub")}),
            check=True,
            capture_output=True,
        )
        with running_proxy(tmp_path) as proxy:
            await asyncio.to_thread(proxy.tell, state_of("m", engine))
            model = make_model(
                engine, tokenizer, base_url=f"{proxy.url}/v1", api_key=CLIENT_KEY, apply_chat_template=in_chat
            )
            config = make_config(*COMPARED, benchmarks_path=str(KINDS))
            parsed = await lm_eval.evaluate(model, config, tmp_path / "ours")
    verify_counts(parsed)
    for benchmark in COMPARED:
        ours = [without_smooth(sample) for sample in samples(tmp_path / "ours", benchmark)]
        assert ours and ours == samples(tmp_path / "bare", benchmark)
        numbers_of_sides = [without_smooth(results(tmp_path / side)[benchmark]) for side in ("ours", "bare")]
        for numbers in numbers_of_sides:
            numbers.pop("perplexity_stderr,none", None)  # from fewer resamples than in records
        assert numbers_of_sides[0] == numbers_of_sides[1]


def without_smooth(content: dict[str, Any]) -> dict[str, Any]:
    """Removes the smooth scores that Assay adds from a sample or from the results of lm-eval."""
    left = {name: value for name, value in content.items() if not name.startswith(SMOOTH)}
    return left | ({"metrics": [name for name in left["metrics"] if name not in SMOOTH]} if "metrics" in left else {})


async def test_every_kind_of_benchmark_tells_what_was_asked_answered_and_scored(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path
):
    output, seen = tmp_path / "output", list[Progress]()
    async with FakeEngine(models=("m",)) as engine:
        config = make_config(*COMPARED, benchmarks_path=str(KINDS))
        parsed = await lm_eval.evaluate(make_model(engine, tokenizer), config, output, on_progress=seen.append)
    assert seen[-1].done == seen[-1].total
    assert parsed.counts == Counts(requested=42, answered=42, scored=42)
    planned, bodies = tokens_to_ask(output), [json.loads(body) for body in engine.bodies]
    assert planned is not None and [part.questions for part in planned] == [6] * 7
    assert sum(part.prompt_tokens for part in planned) == sum(
        len(tokens) for body in bodies for tokens in body["prompt"]
    )
    assert sum(part.answer_tokens for part in planned) == sum(
        body["max_tokens"] * len(body["prompt"]) for body in bodies
    )
    for metric in parsed.metrics:
        of_benchmark = by_question(output, metric.benchmark)
        assert len(of_benchmark) == len({sample.id for sample in of_benchmark}) == 6
        if metric.name.startswith(("acc", "exact_match", *SMOOTH)):
            assert statistics.fmean(sample.scores[metric.name] for sample in of_benchmark) == pytest.approx(
                metric.value
            )
        assert {sample.scores.keys() == of_benchmark[0].scores.keys() for sample in of_benchmark} == {True}
    smooth = {(m.benchmark, m.name): m for m in parsed.metrics if m.smooth}
    assert set(smooth) == {(f"kind_{kind}", name) for kind in ("choice", "shuffled", "blank") for name in SMOOTH}
    for (benchmark, name), metric in smooth.items():
        rows = sorted(samples(output, benchmark), key=lambda row: row["doc_id"])
        by_hand = [smooth_of(row, row["doc"]["answer"])[name] for row in rows]
        assert [sample.scores[name] for sample in by_question(output, benchmark)] == pytest.approx(by_hand)
        assert metric.value == pytest.approx(statistics.fmean(by_hand))
        assert metric.stderr == pytest.approx(statistics.stdev(by_hand) / math.sqrt(len(by_hand)))
        assert metric.low is not None and metric.high is not None and metric.low < metric.value < metric.high
        assert (metric.n, metric.higher_is_better, metric.recomputed) == (6, name != "bpb", True)
    assert parsed.details["kind_targets"].notes == (f"{WITHOUT} 3 of 6 questions do not have exactly 1 right choice.",)
    chosen = by_question(output, "kind_choice")[1]
    assert (chosen.id[:2], chosen.prompt, chosen.target) == ("1-", "A bee makes", "honey")
    assert all(sample.output in ("milk", "honey", "wax") for sample in [chosen])
    assert chosen.scores["acc"] == float(chosen.output == "honey")
    assert by_question(output, "kind_targets")[1].target == "honey | wax"
    blank = by_question(output, "kind_blank")[1]
    assert blank.choices == ("A bee makes milk", "A bee makes honey", "A bee makes wax")
    assert blank.output in blank.choices
    following = by_question(output, "kind_next")[0]
    assert (following.prompt, following.target) == ("A baker makes", " bread")
    assert float(following.output) < 0 and set(following.scores) == {"perplexity", "acc"}
    weighed = by_question(output, "kind_text")[0]
    assert weighed.target is None and weighed.prompt.startswith("Bread is baked")
    assert set(weighed.scores) == {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    written = by_question(output, "kind_words")[1]
    assert (written.prompt, written.target) == ("A bee makes", "['honey', 'wax']")
    assert written.context.startswith("Answer in one word.\n\n") and written.context.endswith("\n\n")
    assert set(written.scores) == {"exact_match,strict", "exact_match,flexible"}


async def test_benchmark_in_several_forms_is_published_under_several_names(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path
):
    config = make_config(
        "shape_sides",
        EvalTaskConfig(name="shapes", num_fewshot=2, task_alias="shapes_2shot", force_fewshot=True),
        EvalTaskConfig(name="shape_sides", num_fewshot=1, task_alias="sides_1shot", force_fewshot=True),
        "shape_words",
        EvalTaskConfig(
            name="shape_words",
            task_alias="sampled",
            task_kwargs={
                "generation_kwargs": {"temperature": 0.7, "max_tokens": 5},
                "doc_to_text": "Say: {{shape}}",
                "metadata": {"version": 2.0},
            },
        ),
        EvalTaskConfig(
            name="shape_sides", task_alias="asked", task_kwargs={"doc_to_text": "Sides of a {{shape}}? It has"}
        ),
        benchmarks_path=str(OWN),
        max_eval_instances=3,
    )
    output = tmp_path / "output"
    async with FakeEngine(models=("m",)) as engine:
        parsed = await lm_eval.evaluate(make_model(engine, tokenizer), config, output)
        bodies = [json.loads(body) for body in engine.bodies]
    verify_counts(parsed)
    published = {metric.benchmark for metric in parsed.metrics}
    assert {"shape_sides", "shapes_few", "sides_1shot", "sides_1shot.shapes_few", "sampled"} <= published
    groups = {(metric.benchmark, metric.name): metric for metric in parsed.metrics if metric.parts}
    assert {name for benchmark, name in groups if benchmark == "sides_1shot"} == {"acc", *SMOOTH}
    for (benchmark, name), metric in groups.items():
        assert (metric.parts, metric.smooth) == (groups[benchmark, "acc"].parts, name in SMOOTH)
        parts = {part.benchmark: part.value for part in parsed.metrics if part.name == name}
        assert metric.value == pytest.approx(sum(weight * parts[part] for part, weight in metric.parts.items()))
        assert metric.recomputed and metric.low is not None
    for benchmark, examples in (("shapes_few", 0), ("sides_1shot.shapes_few", 1), ("shapes_2shot.shapes_few", 2)):
        prompt = samples(output, benchmark)[0]["arguments"]["gen_args_0"]["arg_0"]
        assert prompt.count(" has") == examples + 1
    assert by_question(output, "sampled")[0].prompt == "Say: triangle"
    assert by_question(output, "asked.shapes_many")[0].prompt == "Sides of a triangle? It has"
    [sampled] = [body for body in bodies if body["temperature"]]
    assert (sampled["temperature"], sampled["max_tokens"], sampled["stop"]) == (0.7, 5, ["\n"])


async def test_examples_for_a_benchmark_that_takes_none_are_left_out_with_a_note_unless_forced(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path
):
    given = {"name": "kind_choice", "num_fewshot": 2}
    forced = EvalTaskConfig.model_validate({**given, "task_alias": "forced", "force_fewshot": True})
    config = make_config(EvalTaskConfig.model_validate(given), forced, benchmarks_path=str(KINDS))
    async with FakeEngine(models=("m",)) as engine:
        parsed = await lm_eval.evaluate(make_model(engine, tokenizer), config, tmp_path)
    assert by_question(tmp_path, "kind_choice")[0].prompt == "A baker makes"
    forced = by_question(tmp_path, "forced")[0]
    assert forced.prompt == "A baker makes" and forced.context.count("\n\n") == 2
    assert not parsed.details["forced"].notes
    [note] = parsed.details["kind_choice"].notes
    assert "without examples, not with 2" in note and "force_fewshot" in note


async def test_clusters_follow_the_named_field_and_a_missing_field_is_refused(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path
):
    def by(field: str) -> EvaluationConfig:
        return make_config(EvalTaskConfig(name="shape_words", cluster_by=field), benchmarks_path=str(OWN))

    async with FakeEngine(models=("m",)) as engine:
        await lm_eval.evaluate(make_model(engine, tokenizer), by("choices"), tmp_path / "choices")
        with pytest.raises(BadInput, match="cluster_by of shape_words to be a field of its documents") as refused:
            await lm_eval.evaluate(make_model(engine, tokenizer), by("passage"), tmp_path / "passage")
    assert "choices" in refused.value.found
    assert len({sample.cluster for sample in by_question(tmp_path / "choices", "shape_words")}) == 1


@pytest.mark.parametrize("in_chat", [False, True], ids=["completions", "chat"])
async def test_prompts_of_some_questions_are_those_of_the_whole_run_however_they_are_drawn(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, in_chat: bool
):
    async def asked(limit: int | None, *names: str) -> dict[tuple[str, str], tuple[str, str | None]]:
        output = tmp_path / f"{names}-{limit}"
        config = make_config(*names, benchmarks_path=str(KINDS), max_eval_instances=limit)
        parsed = await lm_eval.evaluate(model, config, output)
        verify_counts(parsed)
        for sample in samples(output, "kind_drawn"):
            assert sample["doc"]["question"] in sample["arguments"]["gen_args_0"]["arg_0"]
        stored = list(read_samples(str(output / SAMPLES_NAME)))
        assert {sample.benchmark for sample in stored} == parsed.details.keys()
        return {(sample.benchmark, sample.id): (sample.asked, sample.target) for sample in stored}

    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, tokenizer, apply_chat_template=in_chat)
        whole = await asked(None, "kind_words", "kind_shuffled", "kind_group")
        first = await asked(2, "kind_words", "kind_shuffled", "kind_group")
        alone = await asked(2, "kind_group")
    assert len({prompt for prompt, _ in whole.values()}) == len(whole) == 3 * len(first)
    assert first.items() <= whole.items() and alone.items() <= first.items()


@pytest.mark.parametrize("in_chat", [False, True])
async def test_prompts_start_with_a_single_bos_of_the_tokenizer_or_of_its_chat_template(
    tmp_path: Path, lm_eval: Harness, in_chat: bool
):
    async with FakeEngine(models=("m",)) as engine:
        tokenizer = write_byte_tokenizer(tmp_path / "tokenizer", adds_bos=not in_chat)
        model = make_model(engine, tokenizer, apply_chat_template=in_chat)
        verify_counts(await lm_eval.evaluate(model, make_config(*DEMO, max_eval_instances=3), tmp_path / "output"))
        prompts = [json.loads(body)["prompt"][0] for body in engine.bodies]
    for prompt in prompts:
        text = bytes(token for token in prompt if token < BOS).decode()
        assert prompt[0] == BOS and BOS not in prompt[1:]
        assert text.startswith("user: Question:" if in_chat else "Question:") and ("\nassistant:" in text) is in_chat


async def test_endpoint_that_has_only_chat_is_asked_with_messages(tmp_path: Path, lm_eval: Harness, tokenizer: Path):
    stops = ["never", "#", "\t", "|", "5"]  # the last is not sent: endpoints accept four
    config = make_config(
        EvalTaskConfig(name="kind_words", task_kwargs={"generation_kwargs": {"until": stops}}),
        benchmarks_path=str(KINDS),
        evaluator=LmEvalOptions(endpoint="chat_completions"),
    )
    output = tmp_path / "output"
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, tokenizer, prompt_logprobs=False)
        verify_counts(await lm_eval.evaluate(model, config, output))
        bodies = [json.loads(body) for body in engine.bodies]
    assert [message["role"] for message in bodies[0]["messages"]] == ["system", "user", "assistant", "user"]
    assert {(body["max_tokens"], tuple(body["stop"])) for body in bodies} == {(12, tuple(stops[:4]))}
    answers = [sample.output for sample in by_question(output, "kind_words")]
    assert len(answers) == 6 and "5" not in "".join(answers)
    assert any(len(answer) < 12 for answer in answers)


@pytest.mark.parametrize(("asked", "sent"), [(None, 256), (40, 40), (5000, 1024)])
async def test_length_of_answers_is_the_options_where_a_benchmark_sets_none(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, asked: int | None, sent: int
):
    free = write_benchmark(
        tmp_path / "own", "free", [{"question": "Who?", "word": "me"}], generation_kwargs={"until": ["\n"]}
    )
    evals = (
        *free.evals,
        EvalTaskConfig(name="free", task_alias="set", task_kwargs={"generation_kwargs": {"max_gen_toks": 7}}),
    )
    config = make_config(*evals, benchmarks_path=free.benchmarks_path, evaluator=LmEvalOptions(max_gen_toks=asked))
    async with FakeEngine(models=("m",)) as engine:
        verify_counts(await lm_eval.evaluate(make_model(engine, tokenizer), config, tmp_path / "output"))
        assert {json.loads(body)["max_tokens"] for body in engine.bodies} == {sent, 7}


async def test_request_timeout_is_for_each_request_not_for_all(tmp_path: Path, lm_eval: Harness, tokenizer: Path):
    async with FakeEngine(models=("m",)) as engine:
        engine.faults.delay_seconds = 0.3
        model = make_model(engine, tokenizer, capacity=2, request_timeout_seconds=2)
        parsed = await lm_eval.evaluate(model, make_config(DEMO[1]), tmp_path / "output")
        assert engine.stats.aborted == 0
        assert engine.stats.max_in_flight == 2
    verify_counts(parsed)


async def test_requests_that_fail_for_a_moment_are_asked_again(tmp_path: Path, lm_eval: Harness, tokenizer: Path):
    async with FakeEngine(models=("m",)) as engine:
        engine.faults.status_count = 2
        engine.faults.refuse = 2
        parsed = await lm_eval.evaluate(make_model(engine, tokenizer), make_config(DEMO[1]), tmp_path / "output")
    verify_counts(parsed)


@pytest.mark.parametrize("fault", [{"status_count": 1_000_000}, {"canned": True}])
async def test_endpoint_that_gives_no_log_probabilities_never_gives_a_score(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, fault: dict[str, Any]
):
    async with FakeEngine(models=("m",)) as engine:
        for name, value in fault.items():
            setattr(engine.faults, name, value)
        with pytest.raises(EndpointUnusable) as caught:
            await lm_eval.evaluate(make_model(engine, tokenizer), make_config(DEMO[0]), tmp_path / "output")
    assert caught.value.record_status == "infra_failed"


@pytest.mark.parametrize("endpoint", ["completions", "chat_completions"])
async def test_endpoint_that_answers_with_no_text_is_withheld_not_scored_as_wrong(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path, endpoint: Any
):
    async def no_text(request: web.Request) -> web.Response:
        prompts = (await request.json()).get("prompt", [None])
        nothing = {"text": None, "message": {"content": None}}
        return web.json_response({"choices": [{"index": index, **nothing} for index in range(len(prompts))]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", no_text), web.post("/v1/chat/completions", no_text)])
    async with TestServer(app) as server:
        model = make_model(FakeEngine(port=server.port or 0), tokenizer)
        config = make_config(DEMO[1], evaluator=LmEvalOptions(endpoint=endpoint))
        parsed = await lm_eval.evaluate(model, config, tmp_path / "output")
    assert parsed.counts == Counts(requested=10, answered=0, scored=0)


async def test_halves_of_surrogate_pairs_are_replaced_counted_and_scored(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path
):
    config = make_config(DEMO[1], evaluator=LmEvalOptions(endpoint="chat_completions"))
    async with FakeJudge(says=lambda number, prompt: "5 \ud83d" if number % 2 else "5 \U0001f600") as engine:
        model = served_model(engine.url, tokenizer)
        parsed = await lm_eval.evaluate(model, config, tmp_path / "output")
    verify_counts(parsed)
    assert "5 of the endpoint's answers" in parsed.asking.notes[-1]
    assert {s.output for s in read_samples(str(tmp_path / "output" / SAMPLES_NAME))} == {"5 \ufffd", "5 \U0001f600"}


# Samples of a single question


SAMPLED = {"max_gen_toks": 12, "until": ["\n"], "temperature": 0.9, "do_sample": True}


async def test_repeats_of_a_question_are_samples_and_not_copies(tmp_path: Path, lm_eval: Harness, tokenizer: Path):
    questions = [{"question": f"Why is {name}?", "word": "me"} for name in "abcd"]
    config = write_benchmark(
        tmp_path / "own", "drawn", questions, repeats=12, generation_kwargs={**SAMPLED, "seed": 1234}
    )
    async with FakeEngine(models=("m",)) as engine:
        engine.faults.fresh_samples = True
        parsed = await lm_eval.evaluate(make_model(engine, tokenizer), config, tmp_path / "output")
        bodies = [json.loads(body) for body in engine.bodies]
    verify_counts(parsed)
    assert not any("seed" in body for body in bodies)
    for sample in samples(tmp_path / "output", "drawn"):
        [repeats] = sample["resps"]
        assert len(repeats) == 12 and len(set(repeats)) > 6
    details = parsed.details["drawn"]
    assert sum(details.finish_reasons.values()) == 48 and details.at_limit is not None
    assert parsed.asking.seeds["fewshot"] == 1234 and str(parsed.asking.seeds["generation"]).startswith("none")
    assert parsed.versions["datasets"]


# Finish reasons and stop strings


async def test_foreign_endpoint_receives_four_stops_and_a_pool_receives_all(
    tmp_path: Path, lm_eval: Harness, tokenizer: Path
):
    stops = ["never", "#", "\t", "|", "5"]
    task = EvalTaskConfig(name="kind_words", task_kwargs={"generation_kwargs": {"until": stops}})
    config = make_config(task, benchmarks_path=str(KINDS))
    answers = []
    async with FakeEngine(models=("m",)) as engine:
        for pool in (False, True):
            engine.bodies.clear()
            model = make_model(engine, tokenizer, direct=pool)
            verify_counts(await lm_eval.evaluate(model, config, tmp_path / f"output-{pool}"))
            assert {len(json.loads(body)["stop"]) for body in engine.bodies} == {5 if pool else 4}
            answers.append([sample.output for sample in by_question(tmp_path / f"output-{pool}", "kind_words")])
    assert answers[0] == answers[1] and "5" not in "".join(answers[0])


async def test_answers_at_the_length_limit_are_counted_by_question(tmp_path: Path, lm_eval: Harness, tokenizer: Path):
    output = tmp_path / "output"
    async with FakeEngine(models=("m",)) as engine:
        config = make_config("kind_words", benchmarks_path=str(KINDS))
        parsed = await lm_eval.evaluate(make_model(engine, tokenizer), config, output)
    finishes = [sample.finish for sample in by_question(output, "kind_words")]
    details = parsed.details["kind_words"]
    assert details.finish_reasons == {name: finishes.count(name) for name in sorted(set(map(str, finishes)))}
    assert details.at_limit == finishes.count("length") > 0


# Malformed answers, straight from an endpoint


def test_check_finds_what_comes_with_lm_eval(lm_eval: Harness):
    EVALUATOR.check(make_config("hellaswag", "mmlu"), lm_eval.python)
    assert {"gsm8k", "mmlu_anatomy"} <= set(listing(lm_eval.python).benchmarks)
    with pytest.raises(UnknownBenchmark, match="hellaswag"):
        EVALUATOR.check(make_config("hellaswagg"), lm_eval.python)
