"""A pool with proxy and replicas as jobs of a real Ray: loss of agents, proxy and owner during requests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.cluster_utils import Cluster

from fakes.fault_target import MODEL, pool_config
from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint, write_nano_llama
from fakes.polling import eventually
from fakes.pools import InferencePool
from fakes.processes import running_program
from fakes.ray_cluster import client_of, ray_cluster
from fakes.tokenizers import write_byte_tokenizer
from faults.scenarios.load import LoadPlan
from faults.scenarios.processes import command_line, descendants, job_of, send
from faults.scenarios.target import Target
from faults.scenarios.trial import Fault, Trial, tried
from pools.engine.launch import Launcher, Servable
from resources.jobs.addresses import is_loopback, own_address
from resources.settings import settings

pytestmark = [
    pytest.mark.timeout(600),  # 30 s; 200 s with ten times as many runnable processes as cores
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

TESTS = Path(__file__).parents[1]
REPLICAS = 2
CLIENTS = 16
MARK = {"ASSAY_TEST_CLUSTER": f"pool-on-ray-{os.getpid()}"}
"""Variable in the environment of every process on the cluster."""
MARKED = {**MARK, "ASSAY_INHERIT": next(iter(MARK))}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, ray_cluster(num_cpus=1 + REPLICAS, env_vars=MARKED) as cluster:
        patch.setenv("ASSAY_INSECURE", "1")  # this machine's own address, used only locally
        settings.cache_clear()
        yield cluster
    settings.cache_clear()


@contextmanager
def running_pool(
    cluster: Cluster, checkpoint: Path, *, launcher: Launcher | None = None, replicas: int = REPLICAS, **fields: Any
) -> Iterator[Target]:
    """Starts a pool with all replicas ready; asserts at the end that no process of it is left."""
    config = pool_config(resource_config={"replicas": replicas}, **fields)
    client = client_of(str(cluster.address))
    events: list[str] = []
    try:
        served = [Servable.from_uri(MODEL, str(checkpoint))]
        with InferencePool(config, served, client=client, launcher=launcher, on_event=events.append) as pool:
            pool.load(MODEL)
            target = Target(pool, MODEL, owner_pid=os.getpid(), recovery_seconds=300)
            assert asyncio.run(target.settled()) is None, events
            yield target
        eventually(lambda: job_processes() == {})  # leftovers of a killed agent end by themselves
    finally:
        client.shutdown()


def job_processes() -> dict[int, str]:
    """Returns the processes of the jobs of the cluster and of the engines started by them, each with its job."""
    [mark] = (f"{name}={value}".encode() for name, value in MARK.items())
    jobs = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended, or is another user's
        if mark in variables and (job := job_of(int(folder.name))):
            jobs[int(folder.name)] = job
    return jobs


def agent_of(replica: str) -> int:
    [pid] = [
        pid
        for pid, job in job_processes().items()
        if job.startswith(f"{replica}-") and "run_call.py" in " ".join(command_line(pid))
    ]
    return pid


def under_load(target: Target, fault: Fault, *, requests: int, retries: int = 0) -> Trial:
    plan = LoadPlan(f"ray-{os.urandom(4).hex()}", requests=requests, concurrency=CLIENTS, retries=retries)
    return asyncio.run(tried(target, plan, fault))


def test_owner_that_is_killed_leaves_no_process_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "step-1", seed=1)
    script = f"""
import sys, threading
from pathlib import Path
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
from fakes import ray_variables
from fakes.fault_target import MODEL, pool_config
from fakes.launcher import FakeLauncher
from fakes.ray_cluster import client_of
from fakes.pools import InferencePool
from pools.engine.launch import Servable

served = [Servable.from_uri(MODEL, {str(checkpoint)!r})]
launcher = FakeLauncher(Path({str(tmp_path)!r}))
with InferencePool(pool_config(), served, client=client_of({str(cluster.address)!r}), launcher=launcher) as pool:
    pool.load(MODEL)
    Path({str(tmp_path / "answers")!r}).touch()
    threading.Event().wait()
"""
    others = set(job_processes())
    with running_program("-c", script) as owner:
        eventually(lambda: (tmp_path / "answers").exists() or owner.poll() is not None)
        assert len(set(job_processes()) - others) >= 3  # the proxy, an agent, its engine
    eventually(lambda: not set(job_processes()) - others)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_byte_tokenizer(write_nano_llama(tmp_path / "step-4", hidden=64))


@pytest.mark.engine
@pytest.mark.skipif(is_loopback(own_address()), reason="this machine has no address but loopback")
def test_vllm_behind_an_ingress_survives_the_loss_of_its_agent_with_the_engine(cluster: Cluster, model: Path) -> None:
    kwargs = {"enforce_eager": True, "max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M"}
    engine = {"name": "run", "engine_kwargs": kwargs}
    with running_pool(cluster, model, replicas=1, model=engine, startup_timeout_seconds=180) as target:
        [ingress] = [str(replica.announcement.url) for replica in target.status().replicas]
        assert httpx.URL(ingress).host == own_address() == httpx.URL(target.pool.base_url).host
        with pytest.raises(httpx.TransportError):  # the request has no key
            httpx.get(f"{ingress}/health", timeout=10)
        before = set(target.instances().values())

        async def kill_the_agent() -> None:
            agent = agent_of("replica-0")
            send(signal.SIGKILL, [agent, *descendants(agent)])

        trial = under_load(target, kill_the_agent, requests=120)
        assert trial.broken_rules(most_upstream=120 + CLIENTS, broken_streams=CLIENTS) == []
        assert len(before) == 1 and before.isdisjoint(target.instances().values())


@pytest.fixture(scope="module")
def pool(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A pool on the deterministic engine for the remaining tests of this module: it fills the node."""
    folder = tmp_path_factory.mktemp("pool")
    checkpoint = write_checkpoint(folder / "step-1", seed=1)
    launcher = FakeLauncher(folder, faults={"fresh_samples": True})
    with running_pool(cluster, checkpoint, launcher=launcher, proxy_host="127.0.0.1") as target:
        yield target


def test_proxy_killed_under_load_is_a_new_job_on_its_address_and_clients_that_ask_again_see_no_error(
    pool: Target,
) -> None:
    killed, address = pool.proxy_pid, pool.pool.base_url
    before = pool.instances()

    async def kill() -> None:
        send(signal.SIGKILL, [killed])

    trial = under_load(pool, kill, requests=600, retries=1)
    rules = trial.broken_rules()
    if trial.duplicates <= CLIENTS:  # recorded, but the proxy died before sending it: its client retried
        rules = [rule for rule in rules if "the journal holds" not in rule]
    assert rules == []
    assert (pool.proxy_pid != killed, pool.pool.base_url) == (True, address)
    assert pool.instances() == before
