"""lm-eval in forks of one process: the same numbers as in a process of its own, cell after cell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fakes.engine import FakeEngine
from fakes.polling import eventually
from fakes.tokenizers import BOS, write_byte_tokenizer
from pools.endpoint import RunningModel
from resources.backends.local import LocalClient
from resources.config import ResourceConfig
from resources.environments import ENVIRONMENTS, ensure_environment
from resources.fork_server import ForkServer
from resources.jobs import Command, JobRequest, create_environment
from tasks.config import EvalTaskConfig, EvaluationConfig
from tasks.evaluators.harness import HarnessCommand, Parsed, verify_counts
from tasks.evaluators.lm_eval import LmEval

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[2] / "tasks" / "programs" / "run_lm_eval.py"
DEMO = ("demo_facts", "demo_backwards")
KEY = "OPENAI_API_KEY"


@pytest.fixture(scope="session")
def python() -> Path:
    return ensure_environment(ENVIRONMENTS["lm-eval"]).python


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    client = LocalClient(tmp_path / "jobs", grace_seconds=2.0)
    yield client
    client.shutdown()


@pytest.fixture
def caches(tmp_path: Path) -> dict[str, str]:
    return {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1"}


def cell(
    engine: FakeEngine, tokenizer: Path, *benchmarks: str, **changes: Any
) -> tuple[RunningModel, EvaluationConfig]:
    evals = tuple(EvalTaskConfig(name=name) for name in benchmarks)
    model = RunningModel(
        base_url=f"{engine.url}/v1",
        model="m",
        tokenizer=str(tokenizer),
        capacity=8,
        prompt_logprobs=True,
        request_timeout_seconds=60.0,
        max_model_len=2048,
        api_key="sk-a-key",
    )
    given = {"model_path": "checkpoint", "base_url": "http://unused/v1", "max_eval_instances": 10, **changes}
    return model, EvaluationConfig(evals=evals, **given)


def import_variables(command: HarnessCommand, caches: Mapping[str, str]) -> dict[str, str]:
    """What a fork server is started with: all that every cell has, but the key of one endpoint."""
    return {**caches, **{name: value for name, value in command.variables.items() if name != KEY}}


async def run(
    prepared: tuple[RunningModel, EvaluationConfig],
    output: Path,
    *,
    python: Path,
    client: LocalClient,
    caches: Mapping[str, str],
    server: ForkServer | None = None,
) -> tuple[int, str]:
    """Exit code and log of one cell, in a fork of `server` or in a process of its own."""
    model, config = prepared
    command = LmEval().command(model, config, output, python=python)
    folder = output / "work"
    folder.mkdir(parents=True)
    for name, text in command.files.items():
        (folder / name).write_text(text)
    request = JobRequest(
        output.name,
        server.command(command.argv[-1]) if server else Command(command.argv[0], command.argv[1:]),
        resources=ResourceConfig(),
        environment=create_environment(workspace=folder, python=python, env_vars={**caches, **command.variables}),
        max_retries_preemption=0,
    )
    job = client.submit(request)
    await asyncio.to_thread(job.wait, 300, raise_on_failure=False)
    return job.details()["replicas"][0]["exit_code"], job.logs(10_000)


def parsed(prepared: tuple[RunningModel, EvaluationConfig], output: Path) -> Parsed:
    return LmEval().parse(output, prepared[1])


def samples(folder: Path) -> dict[str, list[Any]]:
    return {
        path.name.rpartition("_")[0]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.rglob("samples_*.jsonl"))
    }


async def test_cells_from_forks_have_the_numbers_and_samples_of_a_process_of_their_own(
    tmp_path: Path, python: Path, client: LocalClient, caches: dict[str, str]
):
    plain, with_bos = (write_byte_tokenizer(tmp_path / f"tokenizer-{bos}", adds_bos=bos) for bos in (False, True))
    options: dict[str, Any] = {"python": python, "client": client, "caches": caches}
    async with FakeEngine(models=("m",)) as engine:
        prepared = cell(engine, plain, *DEMO)
        command = LmEval().command(*prepared, tmp_path, python=python)
        variables = import_variables(command, caches)
        with ForkServer(PROGRAM, python=python, client=client, variables=variables) as server:
            both = await asyncio.gather(
                run(prepared, tmp_path / "warm-1", server=server, **options),
                run(prepared, tmp_path / "warm-2", server=server, **options),
            )
            assert [code for code, _ in both] == [0, 0], both
            assert "no warm start" not in both[0][1] + both[1][1]
            engine.bodies.clear()
            other = await run(cell(engine, with_bos, DEMO[1]), tmp_path / "bos", server=server, **options)
            assert other[0] == 0 and "no warm start" not in other[1]
            assert {json.loads(body)["prompt"][0][0] for body in engine.bodies} == {BOS}
            assert "threads run after preloading" not in eventually(server.logs)
        code, log = await run(prepared, tmp_path / "cold", **options)
        assert code == 0, log
    expected = parsed(prepared, tmp_path / "cold")
    verify_counts(expected)
    for folder in ("warm-1", "warm-2"):
        assert parsed(prepared, tmp_path / folder) == expected
        assert samples(tmp_path / folder) == samples(tmp_path / "cold")


async def test_refusal_of_a_cell_in_a_fork_is_the_same_file(
    tmp_path: Path, python: Path, client: LocalClient, caches: dict[str, str]
):
    options: dict[str, Any] = {"python": python, "client": client, "caches": caches}
    async with FakeEngine(models=("m",)) as engine:
        prepared = cell(engine, write_byte_tokenizer(tmp_path / "tokenizer"), "no_such_benchmark")
        variables = import_variables(LmEval().command(*prepared, tmp_path, python=python), caches)
        server = ForkServer(
            PROGRAM, python=python, client=client, variables=variables, preload_arguments=["--built-in"]
        )
        with server:
            code, log = await run(prepared, tmp_path / "warm", server=server, **options)
        assert code == 1 and "no warm start" not in log
        code, _ = await run(prepared, tmp_path / "cold", **options)
        assert code == 1
    assert (tmp_path / "warm" / "refused.json").read_text() == (tmp_path / "cold" / "refused.json").read_text()
    assert json.loads((tmp_path / "warm" / "refused.json").read_text())["kind"] == "UnknownBenchmark"


async def test_cell_whose_variables_were_not_there_at_import_starts_cold_and_is_right(
    tmp_path: Path, python: Path, client: LocalClient, caches: dict[str, str]
):
    """The marker for a missing answer is read at import: without it, no answer would be scored as a wrong one."""
    options: dict[str, Any] = {"python": python, "client": client, "caches": caches}
    async with FakeEngine(models=("m",)) as engine:
        prepared = cell(engine, write_byte_tokenizer(tmp_path / "tokenizer"), DEMO[1])
        with ForkServer(PROGRAM, python=python, client=client, variables=caches) as server:
            code, log = await run(prepared, tmp_path / "cell", server=server, **options)
    assert code == 0
    assert "imported with other values of LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER" in log
    verify_counts(parsed(prepared, tmp_path / "cell"))
