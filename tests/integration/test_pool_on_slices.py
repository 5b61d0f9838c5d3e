"""A pool with replicas that are TPU slices of two VMs each, on a real Ray of nodes that claim to be these VMs.

A process of the deterministic engine on each VM replaces vLLM on TPUs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from fakes.fault_target import MODEL, pool_config
from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from fakes.polling import eventually
from fakes.pools import InferencePool
from fakes.processes import free_port
from fakes.ray_cluster import add_node, client_of, ray_cluster
from faults.scenarios.load import LoadPlan
from faults.scenarios.target import Target
from faults.scenarios.trial import tried
from pools.engine.engines import SLICE_PROGRAM
from pools.engine.launch import Servable
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.jobs.addresses import is_loopback, own_address
from resources.jobs.jobs import Command, JobHandle, JobRequest, JobStatus, create_environment
from resources.settings import settings

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]
KIND, SLICES, VMS, CLIENTS = "v4-16", ("first", "second"), 2, 16


class Slices(NamedTuple):
    cluster: Any
    vms: dict[tuple[str, int], Any]


def described(name: str, worker: int) -> dict[str, str]:
    """Returns variables that describe a VM to Ray, so that Ray does not look for a metadata server."""
    return {"TPU_NAME": name, "TPU_WORKER_ID": str(worker), "TPU_ACCELERATOR_TYPE": KIND, "TPU_TOPOLOGY": "2x2x2"}


def start_vm(cluster: Any, name: str, worker: int) -> Any:
    with patch.dict(os.environ, described(name, worker)):
        return add_node(
            cluster,
            num_cpus=2,
            resources={"TPU": 4, name: 1, **({f"TPU-{KIND}-head": 1} if worker == 0 else {})},
            wait=False,
            env_vars={"ASSAY_TEST_VM": f"{name}-{worker}", "ASSAY_INHERIT": "ASSAY_TEST_VM"},
        )


@pytest.fixture
def slices() -> Iterator[Slices]:
    with (
        pytest.MonkeyPatch.context() as changed,
        ray_cluster(num_cpus=2, _system_config={"health_check_period_ms": 500}) as cluster,
    ):
        changed.setenv("ASSAY_INSECURE", "1")  # this machine's own address, used only locally
        settings.cache_clear()
        vms = {(name, worker): start_vm(cluster, name, worker) for name in SLICES for worker in range(VMS)}
        cluster.wait_for_nodes()
        yield Slices(cluster, vms)
    settings.cache_clear()


def parts() -> dict[str, str]:
    kinds = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(line.split("=", 1) for line in (folder / "environ").read_text().split("\0") if "=" in line)
            command = (folder / "cmdline").read_text()
        except OSError:
            continue  # it has ended, or is another user's
        for kind, words in (("server", "fakes/engine.py"), ("rank", "server.sendall(label.encode())")):
            if words in command and "ASSAY_TEST_VM" in variables:
                kinds[variables["ASSAY_TEST_VM"]] = kind
    return kinds


def test_replica_slice_that_loses_a_vm_comes_back_while_another_answers(slices: Slices, tmp_path: Path) -> None:
    device = {"kind": "tpu", "variant": KIND}
    config = pool_config(
        resource_config={"device": device, "cpu": 1, "ram": "1g", "replicas": 2}, proxy_host="127.0.0.1"
    )
    client, events = client_of(str(slices.cluster.address)), []
    served = [
        Servable.from_uri(name, str(write_checkpoint(tmp_path / name, seed=seed)))
        for seed, name in enumerate((MODEL, "other"))
    ]
    launcher = FakeLauncher(tmp_path, faults={"fresh_samples": True})
    whole = {f"{name}-{worker}": "rank" if worker else "server" for name in SLICES for worker in range(VMS)}
    try:
        with InferencePool(config, served, client=client, launcher=launcher, on_event=events.append) as pool:
            pool.load(MODEL)
            target = Target(pool, MODEL, owner_pid=os.getpid(), recovery_seconds=120)
            assert asyncio.run(target.settled()) is None, events
            assert parts() == whole
            assert pool.load("other")[1].how == "restart"  # reloads of tpu-inference cannot be verified
            pool.load(MODEL)
            assert asyncio.run(target.settled()) is None, events

            async def lose_a_vm() -> None:
                await asyncio.to_thread(slices.cluster.remove_node, slices.vms["second", 1], allow_graceful=False)
                while "second-0" in await asyncio.to_thread(parts):
                    await asyncio.sleep(0.1)
                assert parts() == {vm: kind for vm, kind in whole.items() if "first" in vm}
                start_vm(slices.cluster, "second", 1)  # not possible in a thread

            trial = asyncio.run(tried(target, LoadPlan("slices", requests=600, concurrency=CLIENTS), lose_a_vm))
            assert trial.broken_rules(most_upstream=600 + CLIENTS, broken_streams=CLIENTS) == []
            eventually(lambda: parts() == whole)  # until its lease expires, a lost replica seems ready
            assert asyncio.run(target.settled()) is None, events
        eventually(lambda: parts() == {})
    finally:
        client.shutdown()


SERVER = """
import json, sys, ray
ray.init(log_to_driver=False)
chips = {node["NodeID"]: node["Resources"]["TPU"] for node in ray.nodes()}
open(sys.argv[1], "w").write(json.dumps([sorted(chips.values()), sys.argv[2:]]))
ray.shutdown()
"""


@pytest.mark.skipif(is_loopback(own_address()), reason="this machine has no address but loopback")
def test_vms_of_a_slice_make_a_ray_of_their_own_on_which_the_first_serves(tmp_path: Path) -> None:
    # Uses a fake vLLM and this interpreter's Ray, which has the version that the engine's environment pins.
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    script = (
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({str(SLICE_PROGRAM)!r}, "
        "run_name='__main__')"
    )
    place, told = (own_address(), str(free_port()), own_address(), "4"), tmp_path / "told.json"
    # Overrides this test process's value, which limits Ray to a single node.
    several = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    client = LocalClient(tmp_path / "jobs")

    def part(rank: str, *served: str) -> JobHandle:
        environment = create_environment(env_vars={**several, **described("own", int(rank))})
        command = Command(sys.executable, ("-c", script, "2", rank, *place, *served))
        return client.submit(JobRequest(f"part-{rank}", command, resources=ResourceConfig(), environment=environment))

    try:
        before = set(Path("/tmp").glob("assay-ray-*"))
        second, first = part("1"), part("0", str(told), "--port", "81")
        assert first.wait(120) is JobStatus.SUCCEEDED, first.logs()
        assert json.loads(told.read_text()) == [[4.0, 4.0], ["--port", "81"]]
        second.terminate()
        assert set(Path("/tmp").glob("assay-ray-*")) == before
    finally:
        client.shutdown()
