"""lm-eval itself, in its own environment, against the deterministic engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fakes.engine import FakeEngine
from fakes.tokenizers import BOS, write_byte_tokenizer
from pools.endpoint import RunningModel
from resources.backends.local import LocalClient
from resources.environments import ENVIRONMENTS, ensure_environment
from resources.errors import BadInput, EndpointUnusable, HarnessFailed, UnknownBenchmark
from resources.settings import process_environment
from tasks.benchmarks import BUNDLED
from tasks.config import EvalTaskConfig, EvaluationConfig
from tasks.evaluators.harness import Parsed, Progress, run_harness, verify_counts
from tasks.evaluators.lm_eval import LmEval
from tasks.records import Counts

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]

OWN = Path(__file__).parents[1] / "data" / "lm_eval" / "benchmarks"
KEY = "sk-a-key-that-nobody-may-see"
DEMO = ("demo_facts", "demo_backwards")


@pytest.fixture(scope="session")
def python() -> Path:
    return ensure_environment(ENVIRONMENTS["lm-eval"]).python


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    client = LocalClient(tmp_path / "jobs", grace_seconds=2.0)
    yield client
    client.shutdown()


def make_config(*benchmarks: str | EvalTaskConfig, **changes: Any) -> EvaluationConfig:
    evals = tuple(EvalTaskConfig(name=item) if isinstance(item, str) else item for item in benchmarks)
    given = {"model_path": "checkpoint", "base_url": "http://unused/v1", "evals": evals, "max_eval_instances": 10}
    return EvaluationConfig(**{**given, **changes})


def make_model(engine: FakeEngine, tokenizer: Path, **changes: Any) -> RunningModel:
    given = {
        "base_url": f"{engine.url}/v1",
        "model": "m",
        "tokenizer": str(tokenizer),
        "capacity": 8,
        "prompt_logprobs": True,
        "request_timeout_seconds": 60.0,
        "max_model_len": 2048,
        "api_key": KEY,
    }
    return RunningModel(**{**given, **changes})


async def evaluate(
    model: RunningModel, config: EvaluationConfig, output: Path, *, python: Path, client: LocalClient, **options: Any
) -> Parsed:
    """The runner in a thread, since the engine lives in this loop."""
    return await asyncio.to_thread(
        run_harness, LmEval(), model, config, output=output, python=python, client=client, **options
    )


def samples(folder: Path, benchmark: str) -> list[dict[str, Any]]:
    [path] = folder.rglob(f"samples_{benchmark}_2*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(folder: Path) -> dict[str, Any]:
    [path] = folder.rglob("results_*.json")
    return json.loads(path.read_text())["results"]


async def test_bundled_benchmarks_give_metrics_equal_counts_and_samples(
    tmp_path: Path, python: Path, client: LocalClient
):
    seen: list[Progress] = []
    config = make_config(*DEMO, max_eval_instances=None)
    LmEval().check(config, python=python)
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        output = tmp_path / "output"
        parsed = await evaluate(model, config, output, python=python, client=client, on_progress=seen.append)
    verify_counts(parsed)
    assert parsed.counts.requested == 220
    numbers = {(metric.benchmark, metric.name): metric for metric in parsed.metrics}
    assert set(numbers) == {("demo_facts", "acc"), ("demo_facts", "acc_norm"), ("demo_backwards", "exact_match")}
    assert numbers["demo_facts", "acc"].n == 120
    assert 0 < (numbers["demo_facts", "acc"].stderr or 0) < 0.1
    assert parsed.versions["lm_eval"] == "0.4.13"
    assert len(samples(output, "demo_facts")) == 120
    assert (seen[-1].done, seen[-1].total) == (580, 580)
    for path in (path for path in output.rglob("*") if path.is_file()):
        assert KEY not in path.read_text(errors="replace"), path


async def test_samples_are_those_of_the_bare_command_line(tmp_path: Path, python: Path, client: LocalClient):
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, tokenizer)
        await evaluate(model, make_config(*DEMO), tmp_path / "ours", python=python, client=client)
        model_args = {
            "model": "m",
            "base_url": f"{engine.url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": str(tokenizer),
            "tokenized_requests": False,
            "num_concurrent": 8,
            "max_retries": 3,
        }
        command = [str(python.parent / "lm_eval"), "--model", "local-completions", "--tasks", ",".join(DEMO)]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())]
        command += ["--include_path", ".", "--log_samples", "--limit", "10", "--output_path", str(tmp_path / "theirs")]
        await asyncio.to_thread(
            subprocess.run,
            command,
            cwd=BUNDLED,
            env=process_environment({"OPENAI_API_KEY": KEY, "HF_HOME": str(tmp_path / "hub")}),
            check=True,
            capture_output=True,
        )
    for benchmark in DEMO:
        ours = samples(tmp_path / "ours", benchmark)
        assert len(ours) == 10
        assert ours == samples(tmp_path / "theirs", benchmark)
        assert results(tmp_path / "ours")[benchmark] == results(tmp_path / "theirs")[benchmark]


async def test_one_benchmark_in_several_forms_is_published_under_several_names(
    tmp_path: Path, python: Path, client: LocalClient
):
    config = make_config(
        "shape_sides",
        EvalTaskConfig(name="shapes", num_fewshot=2, task_alias="shapes_2shot"),
        EvalTaskConfig(name="shape_sides", num_fewshot=1, task_alias="sides_1shot"),
        "shape_words",
        benchmarks_path=str(OWN),
        max_eval_instances=3,
    )
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        parsed = await evaluate(model, config, tmp_path / "output", python=python, client=client)
    verify_counts(parsed)
    published = {metric.benchmark for metric in parsed.metrics}
    assert {"shape_sides", "shapes_few", "sides_1shot", "sides_1shot.shapes_few"} <= published
    for benchmark, examples in (("shapes_few", 0), ("sides_1shot.shapes_few", 1), ("shapes_2shot.shapes_few", 2)):
        prompt = samples(tmp_path / "output", benchmark)[0]["arguments"]["gen_args_0"]["arg_0"]
        assert prompt.count(" has") == examples + 1


async def test_chat_template_is_applied_to_both_kinds_of_benchmark(tmp_path: Path, python: Path, client: LocalClient):
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"), apply_chat_template=True)
        config = make_config(*DEMO, max_eval_instances=3)
        verify_counts(await evaluate(model, config, tmp_path / "output", python=python, client=client))
        prompts = [json.loads(body)["prompt"][0] for body in engine.bodies]
    for prompt in prompts:
        text = bytes(token for token in prompt if token < BOS).decode()
        assert prompt[0] == BOS and text.startswith("user: Question:") and "\nassistant:" in text


async def test_prompts_start_with_bos_where_the_tokenizer_adds_one(tmp_path: Path, python: Path, client: LocalClient):
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer", adds_bos=True))
        config = make_config(*DEMO, max_eval_instances=3)
        verify_counts(await evaluate(model, config, tmp_path / "output", python=python, client=client))
        prompts = [json.loads(body)["prompt"][0] for body in engine.bodies]
    assert {prompt[0] for prompt in prompts} == {BOS}
    assert all(BOS not in prompt[1:] for prompt in prompts)


async def test_request_timeout_is_for_one_request_not_for_all(tmp_path: Path, python: Path, client: LocalClient):
    async with FakeEngine(models=("m",)) as engine:
        engine.faults.delay_seconds = 0.3
        tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
        model = make_model(engine, tokenizer, capacity=2, request_timeout_seconds=2)
        parsed = await evaluate(model, make_config(DEMO[1]), tmp_path / "output", python=python, client=client)
        assert engine.stats.aborted == 0
        assert engine.stats.max_in_flight == 2
    verify_counts(parsed)


async def test_requests_that_fail_for_a_moment_are_asked_again(tmp_path: Path, python: Path, client: LocalClient):
    async with FakeEngine(models=("m",)) as engine:
        engine.faults.status_count = 2
        engine.faults.refuse = 2
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        parsed = await evaluate(model, make_config(DEMO[1]), tmp_path / "output", python=python, client=client)
    verify_counts(parsed)


@pytest.mark.parametrize("fault", [{"status_count": 1_000_000}, {"canned": True}])
async def test_endpoint_that_gives_no_log_probabilities_never_gives_a_score(
    tmp_path: Path, python: Path, client: LocalClient, fault: dict[str, Any]
):
    async with FakeEngine(models=("m",)) as engine:
        for name, value in fault.items():
            setattr(engine.faults, name, value)
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"))
        with pytest.raises(HarnessFailed):
            await evaluate(model, make_config(DEMO[0]), tmp_path / "output", python=python, client=client)


async def test_endpoint_that_answers_with_no_text_is_withheld_not_scored_as_wrong(
    tmp_path: Path, python: Path, client: LocalClient
):
    async def no_text(request: web.Request) -> web.Response:
        prompts = (await request.json())["prompt"]
        return web.json_response({"choices": [{"index": index, "text": None} for index in range(len(prompts))]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", no_text)])
    async with TestServer(app) as server:
        model = make_model(FakeEngine(port=server.port or 0), write_byte_tokenizer(tmp_path / "tokenizer"))
        parsed = await evaluate(model, make_config(DEMO[1]), tmp_path / "output", python=python, client=client)
    assert parsed.counts == Counts(requested=10, answered=0, scored=0)


async def test_endpoint_known_to_have_no_prompt_logprobs_is_refused_before_any_request(
    tmp_path: Path, python: Path, client: LocalClient
):
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"), prompt_logprobs=False)
        with pytest.raises(EndpointUnusable, match="demo_facts"):
            await evaluate(model, make_config(*DEMO), tmp_path / "output", python=python, client=client)
        assert engine.stats.requests == 0


async def test_model_too_short_for_a_benchmarks_answers_is_refused(tmp_path: Path, python: Path, client: LocalClient):
    async with FakeEngine(models=("m",)) as engine:
        model = make_model(engine, write_byte_tokenizer(tmp_path / "tokenizer"), max_model_len=12)
        with pytest.raises(BadInput, match="demo_backwards"):
            await evaluate(model, make_config(DEMO[1]), tmp_path / "output", python=python, client=client)


def test_check_finds_what_comes_with_lm_eval(python: Path):
    LmEval().check(make_config("hellaswag", "mmlu"), python=python)
    with pytest.raises(UnknownBenchmark, match="hellaswag"):
        LmEval().check(make_config("hellaswagg"), python=python)
