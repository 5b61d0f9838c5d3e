"""Bulk generation on a kept pool while its processes are killed; the deterministic engine replaces vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

from fakes.command import run_command
from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from fakes.polling import eventually
from faults.scenarios.processes import state_of
from flows.generation import generate_text
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.kept import keep_up, require, take_down
from resources.backends.current import set_current_client
from resources.backends.local.client import LocalClient
from resources.errors import BadInput
from resources.settings import process_environment, settings
from tasks.errors import TooManyErrors
from tasks.generation.config import GenerationConfig

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES, PER_SHARD = 60, 2, 5
SAMPLING = {"samples": SAMPLES, "temperature": 0.8, "max_tokens": 8}
POOL = "bulk"


@dataclass(frozen=True)
class Warm:
    """A kept pool with two checkpoints and an engine that returns a different sample each time."""

    folder: Path
    prompts: Path

    def config(self, output: Path, **fields: Any) -> GenerationConfig:
        content = {
            "pool_name": POOL,
            "model_path": str(self.folder / "run" / "hf" / "step-1"),
            "prompts": {"files": [str(self.prompts)], "id_column": "id"},
            "sampling": SAMPLING,
            "output_path": str(output),
            "prompts_per_shard": PER_SHARD,
            "workers": 2,
        }
        return GenerationConfig.model_validate({**content, **fields})

    def engine(self) -> str | None:
        """Returns the address of the engine that answers, None before it runs; other engines only check reloads."""
        for file in self.folder.glob("engine-*.json"):
            url = json.loads(file.read_text())["url"]
            with suppress(httpx.TransportError):
                httpx.get(f"{url}/fake/stats")
                return url
        return None

    def asked(self) -> int:
        return httpx.get(f"{self.engine()}/fake/stats").json()["requests"]

    def slow_down(self, seconds: float) -> None:
        httpx.put(f"{self.engine()}/fake/faults", json={"delay_seconds": seconds})


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    folder = tmp_path_factory.mktemp("warm")
    checkpoints = [
        Servable.from_uri(f"run-{step}", str(write_checkpoint(folder / "run" / "hf" / f"step-{step}", seed=step)))
        for step in (1, 2)
    ]
    lines = [json.dumps({"prompt": f"Question {number}?", "id": f"q{number}"}) for number in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    pool = {"model": {"name": "run", "engine_kwargs": {"max_num_seqs": 4}}, "lease_seconds": 5}
    config, launcher = InferencePoolConfig.model_validate(pool), FakeLauncher(folder, faults={"fresh_samples": True})
    with set_current_client(LocalClient()):
        keep_up(POOL, config, checkpoints, idle_seconds=3600, launcher=launcher)
        try:
            yield Warm(folder, folder / "prompts.jsonl")
        finally:
            take_down(POOL)


def parts(output: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in output.glob("*/part-*.parquet")}


def rows(output: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(output.glob("*/part-*.parquet")) for row in pq.read_table(file).to_pylist()]


def pids_of(job: str) -> list[int]:
    pids: list[int] = []
    for status in settings().jobs_dir.glob(f"{job}-*/status.json"):
        with suppress(OSError, ValueError):
            details = json.loads(status.read_text())
            pids += [each["pid"] for each in details["replicas"] if details["status"] == "running" and each["pid"]]
    return pids


def kill_a(job: str) -> None:
    pid = require(POOL).access.address.pid if job == "proxy" else eventually(lambda: pids_of(job))[0]
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_command_writes_both_checkpoints_of_the_pool_side_by_side_and_stops_at_too_many_errors(
    warm: Warm, tmp_path: Path, prefect_api: str
) -> None:
    output, prompts = tmp_path / "out", tmp_path / "prompts.jsonl"
    lines = [{"prompt": "x" * (5000 if number == 3 else 5)} for number in range(8)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--pool", POOL, "--prompts", prompts, "--prompts-per-shard", "4", "--format", "jsonl")

    done = run_command("generate", *options, "--output", output, "--max-errors", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert [(row["checkpoint"], row["rows"], row["errors"]) for row in json.loads(done.stdout)] == [
        ("run-1", 8, 1),
        ("run-2", 8, 1),
    ]
    texts = {}
    for name in ("run-1", "run-2"):
        written = [json.loads(line) for part in (0, 1) for line in (output / name / f"part-0000{part}.jsonl").open()]
        assert [row["prompt_index"] for row in written if row["error"]] == [3]
        assert "maximum context length" in written[3]["error"]
        texts[name] = [row["text"] for row in written]
        assert {row["checkpoint"] for row in written} == {name}
    assert texts["run-1"] != texts["run-2"]

    done = run_command("generate", *options, "--output", tmp_path / "strict", "--max-errors", "0")
    assert done.returncode == TooManyErrors.exit_code == 1
    assert "at most 0 errors among 8 answers of run-1" in done.stderr and "maximum context length" in done.stderr
    kinds = {"progress", "table"}
    artifacts = httpx.post(f"{prefect_api}/artifacts/filter", json={}).json()
    assert kinds <= {artifact["type"] for artifact in artifacts if str(artifact["key"]).startswith(POOL)}


# Runs last: for a minute the lease of the killed flow makes the only replica keep its checkpoint.
@pytest.mark.usefixtures("prefect_api")
def test_every_sample_is_written_once_though_worker_queue_proxy_and_flow_are_killed(warm: Warm, tmp_path: Path) -> None:
    output, config = tmp_path / "out", tmp_path / "generation.json"
    config.write_text(warm.config(output).model_dump_json())
    command = [sys.executable, "-c", "from flows.cli.app import main; main()", "generate", "--config", str(config)]
    environment = process_environment({"PYTHONPATH": str(ROOT)})
    with (tmp_path / "log").open("wb") as log:
        flow = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        eventually(warm.engine)
        warm.slow_down(0.1)
        for number, job in enumerate(("worker-0-run-1", "actor-queue-run-1", "proxy", "worker-1-run-1"), start=1):
            eventually(lambda number=number: len(parts(output)) >= number)
            kill_a(job)
        eventually(lambda: len(parts(output)) >= 6)
        working = pids_of("worker-0-run-1") + pids_of("worker-1-run-1")
    finally:
        flow.kill()
        flow.wait()
    eventually(lambda: all(state_of(pid) in ("", "Z") for pid in working))  # they send no more requests
    before, asked = parts(output), warm.asked()
    warm.slow_down(0.0)

    [totals] = generate_text(warm.config(output))

    written = rows(output)
    expected = {(f"q{prompt}", sample) for prompt in range(PROMPTS) for sample in range(SAMPLES)}
    assert Counter((row["prompt_id"], row["sample"]) for row in written) == Counter(expected)
    assert {row["error"] for row in written} == {None} and totals["rows"] == len(written)
    assert before.items() <= parts(output).items()  # new samples would differ
    missing = PROMPTS // PER_SHARD - len(before)
    assert warm.asked() - asked <= missing * PER_SHARD * SAMPLES
    assert [row for row in written if row["text"] is None] == []

    again = warm.asked()
    assert generate_text(warm.config(output)) == [totals]
    assert warm.asked() == again
    with pytest.raises(BadInput, match=r"parameters\.sampling\.seed: 5 now, null there"):
        generate_text(
            warm.config(output, sampling={"samples": SAMPLES, "temperature": 0.8, "max_tokens": 8, "seed": 5})
        )
