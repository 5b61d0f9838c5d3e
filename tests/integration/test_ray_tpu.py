"""TPU slices on a real Ray of seven nodes, six of which claim to be TPU VMs: whole slices, each for a single claim."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from fakes.ray_cluster import add_node, connected, ray, ray_cluster
from resources.backends.ray.client import RayClient
from resources.backends.ray.nodes import REGION_LABEL, read_nodes
from resources.backends.ray.placement import Placement, check, place
from resources.backends.ray.replica import TPU_LOCKFILE
from resources.config import ResourceConfig
from resources.errors import UnsatisfiableResources
from resources.jobs.jobs import Entrypoint, JobHandle, JobRequest, JobStatus

pytestmark = pytest.mark.timeout(300)  # seven nodes start in 10 s, or in 60 s on a busy machine

SLICES = {"small": ("v4-8", 1), "newer": ("v6e-4", 1), "first": ("v4-16", 2), "second": ("v4-16", 2)}
V4_8, V4_16 = (ResourceConfig.with_tpu(kind, cpu=2, ram="1g") for kind in ("v4-8", "v4-16"))


class Tpus(NamedTuple):
    cluster: Any
    vms: dict[tuple[str, int], Any]


def start_vm(cluster: Any, name: str, worker: int, *, wait: bool, **labels: str) -> Any:
    """Starts a node as Ray describes a TPU VM of Google; on a real VM, Ray finds these values by itself."""
    kind, _ = SLICES[name]
    head = {f"TPU-{kind}-head": 1} if worker == 0 else {}
    own = {"ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": str(worker), "ray.io/tpu-pod-type": kind}
    return add_node(
        cluster,
        num_cpus=4,
        resources={"TPU": 4, name: 1, **head},
        labels={**own, **labels},
        env_vars={"VM": f"{name}-{worker}"},
        wait=wait,
    )


@pytest.fixture(scope="module")
def tpus() -> Iterator[Tpus]:
    # By default Ray takes 15 s to notice a death.
    with ray_cluster(num_cpus=4, _system_config={"health_check_period_ms": 500}) as cluster:
        vms = {
            (name, worker): start_vm(cluster, name, worker, wait=False)
            for name, (_, count) in SLICES.items()
            for worker in range(count)
        }
        cluster.wait_for_nodes()
        with connected(str(cluster.address)):
            yield Tpus(cluster, vms)


@asynccontextmanager
async def placed(resources: ResourceConfig, replicas: int = 1) -> AsyncIterator[Placement]:
    """Holds a placement that fits, for the length of a block; Ray may consider other waiting claims first."""
    placement = await place(ray, resources, replicas, on_waiting=lambda reason: None)
    try:
        yield placement
    finally:
        placement.release()


class Waiting:
    """A claim that is not granted yet, and the reasons reported to it."""

    def __init__(self, resources: ResourceConfig, replicas: int = 1) -> None:
        self.reasons: asyncio.Queue[str] = asyncio.Queue()
        self.claim = asyncio.ensure_future(place(ray, resources, replicas, on_waiting=self.reasons.put_nowait))

    async def reason(self) -> str:
        async with asyncio.timeout(20):
            return await self.reasons.get()

    async def granted(self) -> Placement:
        async with asyncio.timeout(20):
            return await self.claim

    async def given_up(self) -> None:
        self.claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.claim


def all_is_free() -> bool:
    """Returns True if no core or chip of any node is in use."""
    return all(
        node.free.get(name) == node.total.get(name)
        for node in read_nodes(ray)
        for name in node.total
        if name in ("CPU", "TPU") or name.endswith("-head")
    )


def heads_are_asked_for() -> bool:
    groups = ray.util.placement_group_table().values()
    return {0: {"TPU-v4-32-head": 1.0}} in [group["bundles"] for group in groups if group["state"] == "PENDING"]


async def nodes_of(placement: Placement) -> list[tuple[str, int]]:
    """Returns slice and worker of the nodes on which the placement's processes start, in the placement's order."""

    @ray.remote(max_retries=0)
    def where() -> str:
        return ray.get_runtime_context().get_node_id()

    asked = [where.options(**host.options).remote() for host in placement.hosts]
    async with asyncio.timeout(60):
        ids = await asyncio.gather(*asked)
    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    return [
        (labels[node_id].get("ray.io/tpu-slice-name", "head"), int(labels[node_id].get("ray.io/tpu-worker-id", 0)))
        for node_id in ids
    ]


async def test_two_claimants_get_whole_slices_in_order_and_a_third_waits(tpus: Tpus) -> None:
    first, second = await asyncio.gather(*[Waiting(V4_16).granted() for _ in range(2)])
    try:
        assert sorted([await nodes_of(first), await nodes_of(second)]) == [
            [("first", 0), ("first", 1)],
            [("second", 0), ("second", 1)],
        ]
        assert [
            (host.replica, host.host, host.options["resources"], host.env_vars["TPU_WORKER_ID"]) for host in first.hosts
        ] == [(0, worker, {"TPU": 4.0}, str(worker)) for worker in range(2)]
        third = Waiting(V4_16)
        assert await third.reason() == "waits for 1 × v4-16: 2 slices in the cluster, both taken"
        second.release()
        freed = await third.granted()
        freed.release()
    finally:
        first.release()
        second.release()


async def test_request_for_a_host_waits_for_its_type_despite_larger_slices(tpus: Tpus) -> None:
    async with placed(V4_8) as placement:
        assert await nodes_of(placement) == [("small", 0)]
        second = Waiting(V4_8)
        assert await second.reason() == "waits for 1 × v4-8: 1 slice in the cluster, taken"
        await second.given_up()


async def test_job_of_two_slices_holds_neither_until_it_can_have_both(tpus: Tpus) -> None:
    async with placed(V4_16):
        both = Waiting(V4_16, 2)
        assert await both.reason() == "waits for 2 × v4-16: 2 slices in the cluster: 1 free, 1 taken"
        async with placed(V4_16):  # the second slice is still free
            pass
    placement = await both.granted()
    try:
        assert len(set(await nodes_of(placement))) == 4
        assert [(host.env_vars["MEGASCALE_SLICE_ID"], host.env_vars["TPU_WORKER_ID"]) for host in placement.hosts] == [
            ("0", "0"),
            ("0", "1"),
            ("1", "0"),
            ("1", "1"),
        ]
        assert {host.env_vars["MEGASCALE_COORDINATOR_ADDRESS"] for host in placement.hosts} == {"127.0.0.1:8081"}
    finally:
        placement.release()


async def test_slice_with_its_first_host_reserved_by_another_library_is_not_used(tpus: Tpus) -> None:
    other = ray.util.placement_group([{"TPU-v4-8-head": 1}])
    await other.ready()
    claim = Waiting(V4_8)
    assert "1 slice in the cluster, taken" in await claim.reason()
    ray.util.remove_placement_group(other)
    (await claim.granted()).release()


async def test_replicas_without_a_tpu_start_together_and_leave_slices_alone_while_others_have_room(tpus: Tpus) -> None:
    small = ResourceConfig(cpu=2, ram="1g")
    async with placed(small, 2) as placement:
        assert await nodes_of(placement) == [("head", 0), ("head", 0)]
        assert [host.env_vars for host in placement.hosts] == [{"JAX_PLATFORMS": "cpu"}] * 2
        async with placed(small) as third:
            assert await nodes_of(third) != [("head", 0)]
        stays = Waiting(small.model_copy(update={"preemptible": False}))
        assert "that stays" not in (reason := await stays.reason())
        assert reason == "waits for 2 CPUs, 1 GiB of memory: 0 of 4 CPUs, 254 of 256 GiB of memory free on 1 node"
        await stays.given_up()
    async with placed(small):  # occupies one of seven nodes, all of which the next claim needs
        all_at_once = Waiting(ResourceConfig(cpu=3, ram="1g"), 7)
        await all_at_once.reason()
    (await all_at_once.granted()).release()


async def test_impossible_request_is_refused_at_once(tpus: Tpus) -> None:
    with pytest.raises(UnsatisfiableResources, match="1 × v4-32"):
        check(ray, ResourceConfig.with_tpu("v4-32"), 1)
    with pytest.raises(UnsatisfiableResources, match="no node of the cluster says where it is"):
        check(ray, ResourceConfig(regions=("us-east1",)), 1)
    check(ray, V4_16, 2)


def runs_on(job: JobHandle) -> list[str]:
    """Returns the last reported location of each host of a job's only replica."""
    hosts = [re.findall("^on (.+)$", part, re.MULTILINE) for part in job.logs().split("==> host")[1:]]
    return [reports[-1] if reports else "" for reports in hosts]


async def soon(condition: Callable[[], bool]) -> None:
    """Polls in a thread: the test's event loop is busy with claims."""
    while not await asyncio.to_thread(condition):
        await asyncio.sleep(0.1)


async def test_job_with_several_possible_types_gets_and_receives_the_first_free(tpus: Tpus) -> None:
    either = ResourceConfig.with_tpu(["v4-8", "v6e-4"], cpu=2, ram="1g")
    await soon(all_is_free)  # the previous holder may still be ending
    async with placed(either) as placement:
        assert await nodes_of(placement) == [("small", 0)]
        client = RayClient(str(tpus.cluster.address), grace_seconds=2)
        command = Entrypoint.from_binary("sh", ["-c", "echo on $VM as $ASSAY_TPU_TYPE with $LIBTPU_INIT_ARGS"])
        job = await asyncio.to_thread(client.submit, JobRequest("either", command, resources=either))
        await soon(lambda: job.status().finished)
        assert job.logs() == "on newer-0 as v6e-4 with --xla_tpu_scoped_vmem_limit_kib=98304"
        await asyncio.to_thread(client.shutdown)
        async with placed(either):
            third = Waiting(either)
            taken = "1 slice in the cluster, taken"
            assert await third.reason() == f"waits for 1 × v4-8: {taken}; or 1 × v6e-4: {taken}"
        granted = await third.granted()  # whichever comes first
    try:
        assert await nodes_of(granted) == [("newer", 0)]
    finally:
        granted.release()
    # All slices of a job have the same type.
    with pytest.raises(UnsatisfiableResources, match=r"2 × v4-8 .*, or 2 × v6e-4"):
        check(ray, either, 2)


async def test_slice_that_lost_a_host_is_used_again_once_it_is_back(tpus: Tpus) -> None:
    # Runs last: it changes the cluster.
    client = RayClient(str(tpus.cluster.address), grace_seconds=2)
    command = Entrypoint.from_binary(
        "sh",
        [
            "-c",
            "echo on $VM $ASSAY_REPLICA_INDEX $ASSAY_HOST_INDEX of $ASSAY_HOST_COUNT $TPU_WORKER_ID; exec sleep 600",
        ],
    )
    request = JobRequest("train", command, resources=V4_16)
    TPU_LOCKFILE.touch()  # left by a killed process
    job = await asyncio.to_thread(client.submit, request)
    await soon(lambda: len(runs_on(job)) == 2 and all(runs_on(job)))
    assert not TPU_LOCKFILE.exists()
    name = runs_on(job)[0].split("-")[0]
    on_first = [f"{name}-0 0 0 of 2 0", f"{name}-1 0 1 of 2 1"]
    assert runs_on(job) == on_first
    other = ({"first", "second"} - {name}).pop()
    tpus.cluster.remove_node(tpus.vms[name, 1], allow_graceful=False)
    await soon(lambda: runs_on(job) == [f"{other}-0 0 0 of 2 0", f"{other}-1 0 1 of 2 1"])
    details = job.details()
    assert (details.status, details.preemptions, details.failures) == (JobStatus.RUNNING, 1, 0)

    second = await asyncio.to_thread(client.submit, JobRequest("train-too", command, resources=V4_16))
    lacks = f"2 slices in the cluster: 1 taken, 1 incomplete ({name} has 4 of 8 chips, on worker 0)"
    await soon(lambda: lacks in (second.details().reason or ""))
    start_vm(tpus.cluster, name, 1, wait=True, **{REGION_LABEL: "us-east1", "ray.io/node-group": "added"})
    await soon(lambda: runs_on(second) == on_first)
    await asyncio.to_thread(client.shutdown)
    assert (job.status(), second.status()) == (JobStatus.STOPPED, JobStatus.STOPPED)

    # A node of a group implies an autoscaler: missing nodes may be added once there is demand for them.
    check(ray, ResourceConfig.with_tpu("v4-32"), 1)
    large = Waiting(ResourceConfig.with_tpu("v4-32"))
    assert await large.reason() == "waits for 1 × v4-32: none in the cluster at present"
    await soon(heads_are_asked_for)
    await large.given_up()
