"""A kept pool on a real Ray, between two machines that share the cluster and the folder of published pools."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from fakes.cli import invoke
from fakes.kept_pools import machine, start_pool_and_die
from fakes.models import CONFIG, write_checkpoint, write_run
from fakes.polling import eventually, is_alive
from fakes.ray_cluster import ray_cluster
from fakes.tokenizers import write_byte_tokenizer
from pools.engine.launch import Servable
from pools.pool.kept import require
from pools.pool.session import PoolSession
from resources.backends.current import client_from_url
from resources.settings import process_environment, settings
from tasks.records.record import read_records

pytestmark = [pytest.mark.harness, pytest.mark.timeout(400)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster that every process finds, with room for the job that keeps a pool up, its proxy and a replica."""
    ray.shutdown()
    with ray_cluster(num_cpus=3) as started:
        monkeypatch.setenv("RAY_ADDRESS", str(started.address))
        monkeypatch.setenv("ASSAY_POOLS", str(tmp_path / "shared"))
        yield
        ray.shutdown()


def printed(*arguments: str) -> str:
    done = invoke(arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_kept_pool_outlives_its_machine_and_is_found_used_and_taken_down_from_another(
    cluster: None, tmp_path: Path, session_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", [7], config={**CONFIG, "num_attention_heads": 1})
    write_byte_tokenizer(run / "hf" / "step-7")
    starter = {**machine(tmp_path / "a", session_cache), "ASSAY_JOBS": "ray://auto"}
    start_pool_and_die("warm", {"run-7": run / "hf" / "step-7"}, variables=starter, folder=tmp_path)
    for name, value in machine(tmp_path / "b", session_cache).items():
        monkeypatch.setenv(name, value)
    settings.cache_clear()
    [shown] = json.loads(printed("pool", "ls", "--json"))
    assert (shown["state"], shown["backend"], shown["users"]) == ("up", "ray://auto", [])
    variables = dict(line.removeprefix("export ").split("=", 1) for line in printed("pool", "env", "warm").splitlines())
    pool = require("warm")
    other = Servable.from_uri("other", str(write_checkpoint(tmp_path / "other", seed=8)))
    with PoolSession(pool.access, [other], holder="a test") as session:
        session.load("other")
    command = ("evaluate", "--pool", variables["OPENAI_BASE_URL"], "--model", run, "--eval", "demo_facts")
    done = subprocess.run(
        [Path(sys.executable).with_name("assay"), *command, "--limit", "3", "--output", tmp_path / "evaluations"],
        env=process_environment({"ASSAY_POOL_KEY": variables["ASSAY_POOL_KEY"], "ASSAY_POOLS": ""}),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert [record.status for record in read_records(str(tmp_path / "evaluations"))] == ["succeeded"]
    assert "ready" in printed("pool", "logs", "warm")
    engines = [json.loads(path.read_text())["pid"] for path in tmp_path.glob("engine-*.json")]
    pids = [pool.access.address.pid, *engines]
    assert is_alive(pids[0]) and any(map(is_alive, engines))
    assert printed("pool", "down", "warm") == "warm is down.\n"
    eventually(lambda: not any(map(is_alive, pids)))
    assert [job.name for job in client_from_url("ray://auto").jobs() if not job.status.finished] == []
    assert json.loads(printed("pool", "ls", "--json")) == []
    assert list((tmp_path / "shared").iterdir()) == []
