"""The demo command end to end, then its engine under hard conditions; nothing is faked.

A single file because all tests share a demo run, and test workers receive whole files.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from fakes import engine as engine_program
from fakes.demo import Demo
from fakes.polling import eventually
from fakes.pools import InferencePool
from fakes.processes import running_program
from faults.scenarios.processes import engine_key, listener
from flows.evaluation import evaluate_checkpoint
from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engine.engine_client import EngineClient
from pools.engine.launch import Servable
from resources.config import ResourceConfig
from resources.errors import ModelUnusable, SwapRefused
from tasks.checkpoints.discovery import find_checkpoints
from tasks.generation.config import GenerationConfig
from tasks.generation.generate import PlannedGeneration, Target, supervise
from tasks.generation.output import AnswerFolder, decoded
from tasks.generation.prompts import plan_prompts
from tasks.generation.worker import SharedColumns
from tasks.records.record import Record, read_records
from tasks.running import native_jobs
from tasks.spec.evaluation import EvaluationConfig

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.timeout(900)]

STEPS = 180
"""Number of training steps: enough for every score to rise over five checkpoints; the demo itself trains for 480."""
ENGINE = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, session_cache: Path) -> Demo:
    """Runs `assay demo` in a new folder, with a cache of environments but without reload verdicts of earlier runs."""
    first = Demo(tmp_path_factory.mktemp("e2e") / "demo", session_cache, "")
    done = first.run("demo", "--folder", str(first.folder), "--steps", str(STEPS))
    assert done.returncode == 0, done.stdout + done.stderr
    return Demo(first.folder, session_cache, done.stdout)


QUESTIONS = {"lm_evaluation_harness": 220, "helm": 120, "alpaca_eval": 24}
"""Number of samples per checkpoint, by evaluator."""


def records_of(demo: Demo) -> dict[tuple[int, str], Record]:
    """Returns the records of the checkpoints that training wrote, without merged checkpoints."""
    records = [record for record in read_records(str(demo.folder / "evaluations")) if record.checkpoint.merge is None]
    return {(record.checkpoint.step, record.evaluator): record for record in records}


def test_demo_evaluates_every_checkpoint_by_every_evaluator(demo: Demo) -> None:
    records = records_of(demo)
    steps = sorted(int(folder.name.removeprefix("step-")) for folder in (demo.folder / "checkpoints" / "hf").iterdir())
    assert set(records) == {(step, evaluator) for step in steps for evaluator in QUESTIONS}
    assert len(steps) == 6  # on any machine, however slow
    for (_, evaluator), record in records.items():
        assert record.succeeded
        counts = record.counts
        assert counts is not None
        assert (counts.requested, counts.answered, counts.scored) == (QUESTIONS[evaluator],) * 3
        assert (counts.skipped, counts.truncated, counts.judge_errors) == (0, 0, 0)
        assert record.samples == QUESTIONS[evaluator]
        assert record.requests["answered"] >= record.requests["upstream"] > 0
        assert record.requests["prompt_tokens"] > 0
        assert record.requests["server_errors"] == 0
    by_lm_eval = [records[step, "lm_evaluation_harness"] for step in steps]
    ways = [record.served["how"] for record in by_lm_eval]
    assert ways == ["cold start", "restart", *["reload"] * (len(steps) - 2)]
    assert "compared with a cold start: they agree" in by_lm_eval[1].served["reason"]


def test_demo_evaluates_the_mean_of_the_last_three_checkpoints_and_shows_it_apart(demo: Demo) -> None:
    [record] = [each for each in read_records(str(demo.folder / "evaluations")) if each.checkpoint.merge]
    last = sorted({step for step, _ in records_of(demo)})[-3:]
    merge = record.checkpoint.merge
    assert merge is not None and [each.step for each in merge.inputs] == last
    assert record.succeeded and record.checkpoint.step == last[-1] and record.checkpoint.run == "tiny-llama"
    assert record.evaluation_hash == records_of(demo)[last[-1], "lm_evaluation_harness"].evaluation_hash
    assert re.search(r"mean of\s+3", demo.output)
    assert "tiny-llama (merged: mean of 3)" in (demo.folder / "report.html").read_text()


def test_scores_of_every_evaluator_improve_over_the_checkpoints(demo: Demo) -> None:
    records = records_of(demo)
    first, last = min(step for step, _ in records), max(step for step, _ in records)
    metric_names = {
        "lm_evaluation_harness": {"acc", "exact_match"},
        "helm": {"exact_match"},
        "alpaca_eval": {"win_rate"},
    }
    for evaluator, names in metric_names.items():
        before = {
            (metric.benchmark, metric.name): metric
            for metric in records[first, evaluator].metrics
            if metric.name in names
        }
        after = {
            (metric.benchmark, metric.name): metric
            for metric in records[last, evaluator].metrics
            if metric.name in names
        }
        assert set(before) == set(after)
        assert {name for _, name in after} == names
        for key, metric in after.items():
            assert metric.value > before[key].value, f"{key} did not improve"
    for step in (first, last):  # HELM evaluates the questions of demo_facts, with a request for each choice
        by_helm, by_lm_eval = (smooth_scores(records[step, name]) for name in ("helm", "lm_evaluation_harness"))
        assert by_helm.keys() == {"bpb", "choice_prob_norm"} and by_helm == pytest.approx(by_lm_eval, abs=1e-4)
    assert by_helm["bpb"] < smooth_scores(records[first, "helm"])["bpb"]


def test_demo_shows_a_table_and_writes_a_page_that_needs_nothing_else(demo: Demo) -> None:
    assert "demo_facts" in demo.output
    assert re.search(r"\[\d\.\d+, \d\.\d+\]", demo.output), "no interval"
    assert "Next steps" in demo.output
    page = (demo.folder / "report.html").read_text()
    assert "<svg" in page and 'href="report-questions.html"' in page
    assert "report-questions.html" in demo.output
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def log_probabilities(record: Record, folder: Path) -> dict[tuple[int, int], float]:
    """Returns the log-likelihood of each choice of `demo_facts`, by document and choice, as lm-eval received it."""
    [samples] = (folder / record.attempt).glob("lm_eval/*/samples_demo_facts_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return {(line["doc_id"], n): float(response[0][0]) for line in lines for n, response in enumerate(line["resps"])}


def test_log_likelihoods_go_to_levanter_where_the_engine_has_none_and_agree_with_vllm(
    demo: Demo, prefect_api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[ResourceConfig | None] = []

    @contextmanager
    def noted(resources: ResourceConfig) -> Iterator[None]:
        reserved.append(resources)
        yield
        reserved.append(None)

    monkeypatch.setattr(native_jobs, "accelerators_reserved", noted)
    address, last = tmp_path / "engine.json", max(step for step, _ in records_of(demo))
    program = [str(engine_program.__file__), "--address-file", str(address), "--model", f"tiny-llama-{last}"]
    with running_program(*program, "--faults", json.dumps({"no_echo": True})):
        eventually(address.is_file)
        content = {
            "model_path": str(demo.folder / "checkpoints" / "hf" / f"step-{last}"),
            "model_name": "tiny-llama",
            "evaluation_path": str(tmp_path / "evaluations"),
            "base_url": f"{json.loads(address.read_text())['url']}/v1",
            "evals": [{"name": "demo_facts"}],
            "evaluator": {"without_prompt_logprobs": "levanter"},
        }
        evaluate_checkpoint(EvaluationConfig.model_validate(content))
    [native] = [record for record in read_records(str(tmp_path / "evaluations")) if record.succeeded]
    assert native.evaluator == "levanter_lm_evaluation_harness"
    assert native.served == {"by": "the evaluator itself"}
    assert reserved == [ResourceConfig(), None]
    [folder] = (path.parent for path in (tmp_path / "evaluations").glob(f"*/*/{native.evaluator}/*/record.json"))
    record = records_of(demo)[last, "lm_evaluation_harness"]
    [cell] = (demo.folder / "evaluations").glob(f"*/step-{last}/{record.evaluator}/{record.cell}")
    served = log_probabilities(record, cell)
    loaded = log_probabilities(native, folder)
    assert loaded.keys() == served.keys()
    assert max(abs(loaded[key] - served[key]) for key in loaded) < 1e-3
    assert smooth_scores(native) == pytest.approx(smooth_scores(record), abs=1e-4)


def smooth_scores(record: Record) -> dict[str, float]:
    return {metric.name: metric.value for metric in record.metrics if metric.smooth}


def test_everything_the_demo_makes_lies_in_its_folder(demo: Demo) -> None:
    assert [path.name for path in demo.folder.parent.iterdir()] == ["demo"]
    made = {path.name for path in Path(demo.folder).iterdir()}
    assert made == {"checkpoints", "evaluations", "prefect", "report.html", "report-questions.html"}


@pytest.fixture(scope="module")
def checkpoints(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Servable]:
    """The demo's first, middle and last checkpoint, and a checkpoint of NaN weights."""
    saved = find_checkpoints(str(demo.folder / "checkpoints"))
    useless = tmp_path_factory.mktemp("useless") / "step-9999"
    shutil.copytree(saved[-1].uri, useless)
    weights = useless / "model.safetensors"
    content = weights.read_bytes()
    (header_bytes,) = struct.unpack("<Q", content[:8])
    data = 8 + header_bytes
    weights.write_bytes(content[:data] + struct.pack("<f", float("nan")) * ((len(content) - data) // 4))
    uris = {"first": saved[0].uri, "middle": saved[2].uri, "last": saved[-1].uri, "useless": str(useless)}
    return {name: Servable.from_uri(name, uri) for name, uri in uris.items()}


@pytest.fixture(scope="module")
def pool(checkpoints: dict[str, Servable]) -> Iterator[InferencePool]:
    """A pool that has served nothing: the first load in the tests is a cold start."""
    model = {"name": "tiny", "engine_kwargs": ENGINE, "generation_params": {"temperature": 0.0}}
    config = InferencePoolConfig.model_validate({"model": model, "resource_config": {"cpu": 2}})
    with InferencePool(config, list(checkpoints.values())) as pool:
        yield pool


def client_of(running: RunningModel) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.base_url, api_key=running.api_key, max_retries=0)


def engine_pid(pool: InferencePool) -> int:
    port = int(pool.engine_urls()[0].rsplit(":", 1)[1])
    pid = listener(port, [int(folder.name) for folder in Path("/proc").glob("[0-9]*")])
    assert pid is not None, f"no engine on port {port}"
    return pid


def engine_of(pool: InferencePool) -> EngineClient:
    url = pool.engine_urls()[0]
    return EngineClient(url, engine_key(int(url.rpartition(":")[2])))


def test_reloaded_checkpoint_answers_as_after_a_cold_start(pool: InferencePool) -> None:
    answers, engines, loads = [], set(), []
    for name in ("middle", "first", "middle"):
        _, loaded = pool.load(name)
        loads.append(loaded.how)
        answers.append(engine_of(pool).canary(name, prompt_logprobs=True))
        engines.add(engine_pid(pool))
    cold, another, reloaded = answers
    assert cold == reloaded != another
    assert len(engines) == 1
    assert loads == ["cold start", "reload", "reload"], "the demo has compared a reload already"


def test_key_of_a_client_does_not_reach_the_engines_own_calls(
    pool: InferencePool, checkpoints: dict[str, Servable]
) -> None:
    running, _ = pool.load("first")
    before = engine_of(pool).canary("first", prompt_logprobs=True)
    address = pool.access.address
    call = {"method": "reload_weights", "kwargs": {"weights_path": checkpoints["last"].uri}}
    body = json.dumps({"model": "first", "prompt": "a", **call})
    for path in ("/cells%2Fa%2Fb%2Fv1%2Fcompletions?/x/y/collective_rpc", "/collective_rpc"):
        attack = http.client.HTTPConnection(address.host, address.port, timeout=60)
        attack.request("POST", path, body, {"Authorization": f"Bearer {running.api_key}"})
        assert attack.getresponse().status in (400, 404)
        attack.close()
    with pytest.raises(SwapRefused, match="401"):
        EngineClient(pool.engine_urls()[0], running.api_key).reload_weights(
            [str(checkpoints["last"].uri)], version="last"
        )
    assert engine_of(pool).canary("first", prompt_logprobs=True) == before


def test_openai_client_gets_completions_chat_streams_and_token_prompts(pool: InferencePool) -> None:
    running, _ = pool.load("last")
    assert running.prompt_logprobs
    assert running.max_model_len == 512 + 1  # the last token of a window is generated to get its score
    client = client_of(running)
    prompt = "Question: spell the word house backwards.\nAnswer:"
    text = {"min_tokens": 8}  # a model trained on another processor may end its answer at once
    whole = client.completions.create(model="last", prompt=prompt, max_tokens=8, extra_body=text)
    assert (whole.model, bool(whole.choices[0].text)) == ("last", True)
    stream = client.completions.create(model="last", prompt=prompt, max_tokens=8, stream=True, extra_body=text)
    assert "".join(event.choices[0].text for event in stream if event.choices) == whole.choices[0].text
    tokens = client.completions.create(model="last", prompt=[70, 71, 72], max_tokens=1, logprobs=1, echo=True)
    assert tokens.choices[0].logprobs is not None
    chat = client.chat.completions.create(
        model="last",
        messages=[{"role": "user", "content": "Spell the word house backwards."}],
        max_tokens=8,
        extra_body=text,
    )
    assert chat.choices[0].message.content
    assert {model.id for model in client.models.list()} == {"first", "middle", "last", "useless"}
    assert client.models.retrieve("last").id == "last"
    response = client.responses.create(model="last", input="Spell the word house backwards.", max_output_tokens=8)
    assert (response.model, response.usage and 1 <= response.usage.output_tokens <= 8) == ("last", True)
    events = client.responses.create(model="last", input="Spell it.", max_output_tokens=8, stream=True)
    assert [event.type for event in events][-1] == "response.completed"
    asked = client.with_options(base_url=str(client.base_url).removesuffix("/v1/"))
    tokens = asked.post("/tokenize", body={"model": "last", "prompt": "abc"}, cast_to=httpx.Response).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    version = asked.get("/version", cast_to=httpx.Response).json()["version"]
    assert version == pool.session.engine_identity()["version"]


def test_texts_are_written_in_bulk_with_a_schema_and_an_error_for_what_does_not_fit(
    pool: InferencePool, checkpoints: dict[str, Servable], tmp_path: Path
) -> None:
    lines = [{"prompt": "Spell a city." + "x" * (600 if number == 2 else 0)} for number in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    city = {"type": "object", "properties": {"a": {"enum": ["Rome", "Oslo"]}}, "required": ["a"]}
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": {**city, "additionalProperties": False}},
    }
    config = GenerationConfig.model_validate(
        {
            "model_path": "first",
            "prompts": {"files": [str(tmp_path / "prompts.jsonl")]},
            "sampling": {
                "samples": 2,
                "seed": 1,
                "temperature": 1,
                "max_tokens": 100,
                "response_format": response_format,
            },
            "output_path": str(tmp_path),
            "prompts_per_shard": 2,
            "max_errors": 2,
        }
    )
    output = AnswerFolder(str(tmp_path / "first"), "jsonl")
    running, _ = pool.load("first")
    origin = SharedColumns("first", "digest", "tiny", "hash")
    target = Target("first", checkpoints["first"], output, origin, {})
    planned = PlannedGeneration(config, plan_prompts(config.prompts, prompts_per_shard=2), (target,))
    supervise(planned, target, pool.session, running)
    rows = [row for number in (0, 1) for row in decoded(Path(output.part(number)).read_bytes(), "jsonl")]
    assert [(row["prompt_index"], row["sample"], row["seed"]) for row in rows] == [
        (prompt, sample, 1 + sample) for prompt in range(4) for sample in range(2)
    ]
    assert [row["error"] is None for row in rows] == [True] * 4 + [False] * 2 + [True] * 2
    assert str(rows[4]["error"]).startswith("400: ") and "maximum context length" in str(rows[4]["error"])
    # Whitespace between the parts may use up the token limit; every answer that ended by itself matches the schema.
    ended = [json.loads(str(row["text"])) for row in rows if row["finish_reason"] == "stop"]
    assert all(answer["a"] in ("Rome", "Oslo") for answer in ended)


def test_generation_params_are_the_engines_defaults(pool: InferencePool) -> None:
    running, _ = pool.load("first")
    client = client_of(running)
    # Temperature 0 is the pool's default: without it, sampled bytes of an untrained model would differ.
    texts = {client.completions.create(model="first", prompt="x", max_tokens=24).choices[0].text for _ in range(4)}
    assert len(texts) == 1
    hot = {
        client.completions.create(model="first", prompt="x", max_tokens=24, temperature=1.5).choices[0].text
        for _ in range(4)
    }
    assert len(hot) > 1


def test_engine_killed_under_load_loses_no_request(pool: InferencePool) -> None:
    running, _ = pool.load("last")
    client = client_of(running)
    texts: list[str] = []

    def ask(index: int) -> None:
        answer = client.completions.create(model="last", prompt=f"Question {index}", max_tokens=4)
        texts.append(answer.choices[0].text)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(48)]
    for thread in threads[:24]:
        thread.start()
    os.kill(engine_pid(pool), signal.SIGKILL)
    for thread in threads[24:]:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert len(texts) == 48
    eventually(lambda: pool.proxy_status().status == "ready")
    assert pool.proxy_status().held == 0


def test_template_of_the_checkpoint_is_in_use(pool: InferencePool) -> None:
    running, _ = pool.load("last")
    client = client_of(running)
    chat = client.chat.completions.create(model="last", messages=[{"role": "user", "content": "abc"}], max_tokens=1)
    # The template of the demo's tokenizer: <|user|> abc <|eos|> <|assistant|>, a token for each mark and letter.
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == 6


def test_useless_weights_are_refused(pool: InferencePool) -> None:
    pool.load("first")
    with pytest.raises(ModelUnusable, match="diverged"):
        pool.load("useless")
