"""The program that serves on GPUs from forks: with fakes of torch and vLLM that check which process touches a GPU."""

from __future__ import annotations

import json
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pools.engine.engines import ENGINES
from resources.backends.local.client import LocalClient
from resources.settings import process_environment
from resources.warm.fork_server import fork_server

TORCH = """
import os

class cuda:
    "Behaves as torch: a process that was forked from a process with a context cannot have a context."
    initialized = forked_from_one = False

    @classmethod
    def is_initialized(cls):
        return cls.initialized and not cls.forked_from_one

    @classmethod
    def init(cls):
        if cls.forked_from_one:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        cls.initialized = True

def _forked():
    cuda.forked_from_one = cuda.initialized

os.register_at_fork(after_in_child=_forked)
"""
PLATFORM = """
import os, torch
os.environ["SET_BY_VLLM"] = "1"
if "CUDA_TOUCHED_BY_IMPORTS" in os.environ:
    torch.cuda.init()
"""
ROWS = """
decoded = []

def convert_ids_list_to_tokens(tokenizer, token_ids):
    decoded.extend(token_ids)
    return [f"{tokenizer}{token}" for token in token_ids]
"""
SERVER = """
import json, os, socket, sys, torch
import vllm.v1.engine.logprobs as rows

IMPORTED_BY = os.getpid()

def setup_server():
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    return bound.getsockname(), bound

def main():
    address, bound = setup_server()
    told, tell = os.pipe()
    if os.fork() == 0:  # the engine
        try:
            torch.cuda.init()
            facts = {"computes": torch.cuda.is_initialized(), "has_address": bound.fileno() != -1}
        except RuntimeError as error:
            facts = {"computes": False, "reason": str(error)}
        os.write(tell, json.dumps(facts).encode())
        os._exit(0)
    os.wait()
    print(json.dumps({
        "arguments": sys.argv,
        "forked": IMPORTED_BY != os.getpid(),
        "method": os.environ["VLLM_WORKER_MULTIPROC_METHOD"],
        "set_by_vllm": os.environ.get("SET_BY_VLLM"),
        "engine": json.loads(os.read(told, 4096)),
        "texts": [rows.convert_ids_list_to_tokens("t", tokens) for tokens in ([7, 8, 7], [8, 9], [])],
        "decoded": rows.decoded,
    }))
"""
EMPTY = (
    *("uvloop", "vllm.entrypoints.launchers.cli_args", "vllm.v1.engine.async_llm", "vllm.v1.engine.core"),
    *("vllm.v1.executor.multiproc_executor", "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.gpu_worker"),
)
PROGRAM = ENGINES["cuda"].program


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the fakes and without some modules that a model may need."""
    folder = tmp_path_factory.mktemp("vllm-cuda")
    venv.EnvBuilder(symlinks=True).create(folder)
    [packages] = folder.glob("lib/*/site-packages")
    sources = {"vllm.entrypoints.launchers.api_server.entry": SERVER, "vllm.platforms.cuda": PLATFORM, "torch": TORCH}
    sources["vllm.v1.engine.logprobs"] = ROWS
    for name, text in {**dict.fromkeys(EMPTY, ""), **sources}.items():
        file = packages / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "bin" / "python"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    client = LocalClient(tmp_path / "jobs", grace_seconds=2.0)
    yield client
    client.shutdown()


def served(python: Path, client: LocalClient, variables: dict[str, str]) -> tuple[dict[str, Any], str]:
    assert PROGRAM is not None
    variables = {**ENGINES["cuda"].variables, **variables}
    with fork_server(PROGRAM, python=python, client=client, variables=variables) as server:
        command = server.command("--model", "a model")
        done = subprocess.run(
            [command.command, *command.args],
            env=process_environment(variables),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    return json.loads(done.stdout), done.stderr


def test_engine_is_forked_from_what_has_everything_imported_and_may_use_its_gpu(python: Path, client: LocalClient):
    facts, said = served(python, client, {})
    assert "no warm start" not in said
    assert facts == {
        "arguments": ["vllm", "--model", "a model"],
        "forked": True,
        "method": "fork",
        "set_by_vllm": "1",
        "engine": {"computes": True, "has_address": False},
        "texts": [["t7", "t8", "t7"], ["t8", "t9"], []],
        "decoded": [7, 8, 9],
    }


def test_imports_that_touch_a_gpu_are_never_forked_and_the_server_starts_cold(python: Path, client: LocalClient):
    facts, said = served(python, client, {"CUDA_TOUCHED_BY_IMPORTS": "1"})
    assert facts["forked"] is False and facts["arguments"] == ["vllm", "--model", "a model"]
    assert "no warm start" in said
    [job] = [job for job in client.jobs() if job.name.startswith("warm-")]
    assert "importing vLLM touched a GPU (torch has initialised CUDA)" in client.attach(job.job_id).logs()


def test_way_to_start_engine_processes_that_a_user_has_chosen_stays(python: Path, client: LocalClient):
    facts, _ = served(python, client, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    assert facts["method"] == "spawn"
