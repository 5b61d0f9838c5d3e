"""A replica of two machines with vLLM itself, on a real multi-node Ray: answers, swaps, and the loss of a machine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.cluster_utils import Cluster

from fakes.fault_target import MODEL, pool_config
from fakes.models import write_nano_llama
from fakes.polling import eventually
from fakes.pools import InferencePool
from fakes.ray_cluster import add_node, client_of, ray_cluster
from fakes.tokenizers import write_byte_tokenizer
from faults.scenarios.load import LoadPlan
from faults.scenarios.processes import command_line, descendants, job_of
from faults.scenarios.target import Target
from faults.scenarios.trial import tried
from pools.engine.launch import Servable
from resources.settings import settings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),  # 250 s with three times as many runnable processes as cores
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]
OTHER, CLIENTS, REQUESTS = "run-2", 16, 120


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head with room for the proxy, and three machines with room for a host each, including a spare."""
    with pytest.MonkeyPatch.context() as patch, ray_cluster(num_cpus=1) as cluster:
        patch.setenv("ASSAY_INSECURE", "1")  # this machine's own address, used only locally
        settings.cache_clear()
        for _ in range(3):
            add_node(cluster, num_cpus=1)
        yield cluster
    settings.cache_clear()


@contextmanager
def running_pool(cluster: Cluster, checkpoints: list[Servable], *, hosts: int) -> Iterator[Target]:
    kwargs = {"enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M"}
    config = pool_config(
        resource_config={"hosts": hosts},
        model={"name": "run", "engine_kwargs": kwargs},
        proxy_host="127.0.0.1",
        startup_timeout_seconds=240,
        proxy_timeout_seconds=400,
    )
    client = client_of(str(cluster.address))
    try:
        with InferencePool(config, checkpoints, client=client) as pool:
            pool.load(MODEL)
            target = Target(pool, MODEL, owner_pid=os.getpid(), recovery_seconds=300)
            assert asyncio.run(target.settled()) is None
            yield target
    finally:
        client.shutdown()


def loaded(target: Target, name: str) -> tuple[str, list[float]]:
    """Loads a checkpoint; returns how it was loaded and its log-probabilities of a text's tokens."""
    running, report = target.pool.load(name)
    fields = {"prompt": "The quick brown fox jumps", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    answer = httpx.post(
        f"{running.base_url}/completions",
        json={"model": running.model, **fields},
        headers={"Authorization": f"Bearer {target.pool.key}"},
        timeout=60,
    )
    return report.how, answer.json()["choices"][0]["logprobs"]["token_logprobs"][1:]


def machines_by_rank(cluster: Cluster) -> dict[int, Any]:
    nodes = {}
    for node in cluster.worker_nodes:
        for pid in descendants(node.all_processes["raylet"][0].process.pid):
            if job_of(pid).startswith("replica-0-") and "run_call.py" in " ".join(command_line(pid)):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                [rank] = [part.partition(b"=")[2] for part in variables if part.startswith(b"ASSAY_REPLICA_INDEX=")]
                nodes[int(rank)] = node
    return nodes


def test_vllm_on_two_machines_answers_as_locally_swaps_and_survives_a_loss(cluster: Cluster, tmp_path: Path) -> None:
    folders = [write_byte_tokenizer(write_nano_llama(tmp_path / f"{seed}", hidden=64, seed=seed)) for seed in (1, 2)]
    checkpoints = [Servable.from_uri(name, str(folder)) for name, folder in zip((MODEL, OTHER), folders, strict=True)]
    with running_pool(cluster, checkpoints, hosts=1) as alone:
        expected = {name: pytest.approx(loaded(alone, name)[1], abs=1e-4) for name in (MODEL, OTHER)}
    with running_pool(cluster, checkpoints, hosts=2) as target:
        swaps = [loaded(target, name) for name in (MODEL, OTHER, MODEL)]
        assert [values for _, values in swaps] == [expected[MODEL], expected[OTHER], expected[MODEL]]
        assert swaps[1][1] != expected[MODEL]
        assert [how for how, _ in swaps][::2] == ["already loaded", "reload"]

        machines = machines_by_rank(cluster)
        assert set(machines) == {0, 1} and machines[0] is not machines[1]
        before = set(target.instances().values())

        async def lose_the_second() -> None:
            await asyncio.to_thread(cluster.remove_node, machines[1], allow_graceful=False)

        plan = LoadPlan("two-machines", requests=REQUESTS, concurrency=CLIENTS)
        trial = asyncio.run(tried(target, plan, lose_the_second))
        most = REQUESTS + 2 * CLIENTS  # vLLM answers 500, and may do so again for retries until it is gone
        assert trial.broken_rules(most_upstream=most, broken_streams=CLIENTS) == []
        eventually(lambda: before.isdisjoint(target.instances().values()))  # Ray may notice after the last answer
        assert asyncio.run(target.settled()) is None
        assert loaded(target, MODEL)[1] == expected[MODEL]
