"""Real vLLM behind the real proxy, on the demo's checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from fakes.demo import Demo
from fakes.polling import eventually
from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engine_client import EngineClient
from pools.inference import InferencePool
from pools.launch import ServedCheckpoint
from resources.errors import ModelUnusable
from tasks.checkpoints import find_checkpoints

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ENGINE = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M"}


@pytest.fixture(scope="module")
def checkpoints(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedCheckpoint]:
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
    return {name: ServedCheckpoint.from_uri(name, uri) for name, uri in uris.items()}


@pytest.fixture(scope="module")
def pool(checkpoints: dict[str, ServedCheckpoint]) -> Iterator[InferencePool]:
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


def test_reloaded_checkpoint_answers_as_after_a_cold_start(
    pool: InferencePool, checkpoints: dict[str, ServedCheckpoint]
) -> None:
    canary(pool, "first")
    reloaded = canary(pool, "last")
    assert canary(pool, "middle") != reloaded
    config = InferencePoolConfig.model_validate(
        {"model": {"name": "cold", "engine_kwargs": ENGINE}, "resource_config": {"cpu": 2}}
    )
    with InferencePool(config, [checkpoints["last"]]) as other:
        cold = canary(other, "last")
    assert cold == pytest.approx(reloaded, abs=1e-4)


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
    """The process that listens on the engine's port, found the way a person would: by its command line."""
    port = pool.engine_urls()[0].rsplit(":", 1)[1]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"vllm.entrypoints.openai.api_server" in arguments and port.encode() in arguments:
            return int(folder.name)
    raise AssertionError(f"no engine on port {port}")


def test_useless_weights_are_refused_and_the_next_checkpoint_is_served(pool: InferencePool) -> None:
    with pytest.raises(ModelUnusable, match="diverged"):
        pool.load("useless")
    running, _ = pool.load("last")
    assert client_of(running).completions.create(model="last", prompt="x", max_tokens=1).choices[0].text


def test_templates_of_the_checkpoint_are_in_use(pool: InferencePool, checkpoints: dict[str, ServedCheckpoint]) -> None:
    template = json.loads((checkpoints["last"].folder / "tokenizer_config.json").read_text()).get("chat_template")
    template = template or (checkpoints["last"].folder / "chat_template.jinja").read_text()
    assert "<|user|>" in template
    running, _ = pool.load("last")
    client = client_of(running)
    chat = client.chat.completions.create(
        model="last", messages=[{"role": "user", "content": "abc"}], max_tokens=1, logprobs=True
    )
    # <|user|> and <|assistant|> are one token each; the three letters and line ends are bytes.
    plain = client.completions.create(model="last", prompt="abc", max_tokens=1)
    assert chat.usage is not None
    assert plain.usage is not None
    assert chat.usage.prompt_tokens > plain.usage.prompt_tokens
