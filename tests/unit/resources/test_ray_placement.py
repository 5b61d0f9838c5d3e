"""Nodes of a Ray cluster that a job may use, reasons for waiting, and immediate refusals."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from resources.backends.ray.demand import allowed_nodes, best_selector, reason_to_wait, refusal, share_of
from resources.backends.ray.nodes import NODE_LABEL, REGION_LABEL, ZONE_LABEL, RayNode
from resources.backends.ray.placement import place
from resources.config import ResourceConfig

GIB = 2**30
HEAD: dict[str, Any] = {"node:__internal_head__": 1.0}
GPUS: dict[str, Any] = {"GPU": 4.0, "accelerator_type:H100": 1.0}


def node(
    name: str,
    *,
    cpus: float = 8,
    memory_gib: float = 32,
    free_cpus: float | None = None,
    labels: dict[str, str] | None = None,
    **more: float,
) -> RayNode:
    """Returns a node with everything free but CPUs in use."""
    total = {"CPU": float(cpus), "memory": memory_gib * GIB, **more}
    free = {**total, "CPU": float(cpus if free_cpus is None else free_cpus)}
    return RayNode(node_id=name, address=f"10.0.0.{len(name)}", labels=labels or {}, total=total, free=free)


def in_region(name: str, region: str, zone: str = "a") -> RayNode:
    return node(name, labels={REGION_LABEL: region, ZONE_LABEL: f"{region}-{zone}"})


def test_job_that_must_not_be_preempted_goes_to_the_head_or_to_nodes_bought_on_demand() -> None:
    nodes = [
        node("head", **HEAD),
        node("kept", labels={"ray.io/market-type": "on-demand"}),
        node("spot", labels={"ray.io/market-type": "spot"}),
        node("unknown"),
    ]
    assert [node.node_id for node in allowed_nodes(nodes, ResourceConfig(preemptible=False))] == ["head", "kept"]
    assert allowed_nodes(nodes, ResourceConfig()) == nodes


def test_job_that_names_places_goes_nowhere_else_and_not_to_nodes_that_say_nothing() -> None:
    nodes = [in_region("a", "us-east1"), in_region("b", "us-east1", "b"), in_region("c", "us-west1"), node("silent")]
    east = ResourceConfig(regions=("us-east1",))
    assert [node.node_id for node in allowed_nodes(nodes, east)] == ["a", "b"]
    assert [node.node_id for node in allowed_nodes(nodes, east.model_copy(update={"zone": "us-east1-b"}))] == ["b"]


def selector(nodes: list[RayNode], resources: ResourceConfig, replicas: int = 1) -> dict[str, str]:
    allowed = allowed_nodes(nodes, resources)
    return best_selector(allowed, resources, share=share_of(nodes, resources), replicas=replicas)


def test_first_region_with_room_for_all_replicas_is_taken_and_any_of_them_while_none_has() -> None:
    nodes = [in_region("a", "us-west1"), in_region("b", "us-east1"), in_region("c", "us-east1")]
    both = ResourceConfig(cpu=8, regions=("us-west1", "us-east1"))
    assert selector(nodes, both) == {REGION_LABEL: "us-west1"}
    assert selector(nodes, both, 2) == {REGION_LABEL: "us-east1"}
    # A space after the comma would be a part of the second name.
    assert selector(nodes, both, 3) == {REGION_LABEL: "in(us-west1,us-east1)"}


def test_job_without_accelerator_avoids_accelerator_nodes_while_others_have_room() -> None:
    nodes = [node("plain"), node("gpus", **GPUS), node("tpus", TPU=4.0)]
    assert selector(nodes, ResourceConfig(cpu=8)) == {NODE_LABEL: "!in(gpus,tpus)"}
    assert selector(nodes, ResourceConfig(cpu=8), 2) == {}
    assert selector(nodes, ResourceConfig.with_gpu()) == {}
    kept = [node("head", **HEAD), node("gpus", labels={"ray.io/market-type": "on-demand"}, **GPUS), node("other")]
    assert selector(kept, ResourceConfig(cpu=8, preemptible=False)) == {NODE_LABEL: "in(head)"}
    assert selector(kept, ResourceConfig(cpu=8, preemptible=False), 2) == {NODE_LABEL: "in(gpus,head)"}


@pytest.mark.parametrize(
    ("resources", "replicas", "words"),
    [
        (ResourceConfig(cpu=4, ram="8g"), 1, "waits for 4 CPUs, 8 GiB of memory: 1 of 16 CPUs, 64 of 64 GiB of memory"),
        (ResourceConfig(cpu=1, ram="512m"), 3, "3 × (1 CPU, 0.5 GiB of memory): room for 1 of 3 now, 1 of 16 CPUs"),
        (ResourceConfig(regions=("mars-1",)), 1, "no node in mars-1 at present"),
        (ResourceConfig.with_gpu("h100", count=2), 1, "2 GPUs, of type H100: 1 of 16 CPUs, 64 of 64 GiB"),
        (ResourceConfig.with_tpu("v4-8"), 2, "waits for 2 × v4-8: none in the cluster at present"),
    ],
)
def test_reason_to_wait_says_what_is_asked_for_and_what_is_free(
    resources: ResourceConfig, replicas: int, words: str
) -> None:
    nodes = [node("a", free_cpus=1), node("b", free_cpus=0, **GPUS)]
    assert words in reason_to_wait(nodes, resources, replicas)


@pytest.mark.parametrize(
    ("resources", "replicas"),
    [
        (ResourceConfig(cpu=8, ram="32g"), 2),
        (ResourceConfig(cpu=1, ram="1g"), 16),
        (ResourceConfig.with_gpu("H100", count=4, cpu=8, ram="32g"), 1),
        (ResourceConfig.with_gpu("auto", count=2, cpu=4, ram="16g"), 2),
        (ResourceConfig(regions=("mars-1", "us-east1")), 1),
        (ResourceConfig(preemptible=False), 1),
    ],
)
def test_request_that_the_cluster_can_give_once_it_is_idle_is_not_refused(
    resources: ResourceConfig, replicas: int
) -> None:
    east = {REGION_LABEL: "us-east1"}
    nodes = [node("a", free_cpus=0, **HEAD), node("b", labels=east, **GPUS)]
    assert refusal(nodes, resources, replicas) is None


@pytest.mark.parametrize(
    ("resources", "replicas", "expected", "problem"),
    [
        (ResourceConfig(cpu=9), 1, "a node with 9 CPUs", "room for 0; the largest node has 8 CPUs, 32 GiB of memory"),
        (ResourceConfig(cpu=5), 3, "room for 3 × 5 CPUs", "room for 2"),
        (ResourceConfig(ram="33g"), 1, "33 GiB of memory", "32 GiB of memory"),
        (ResourceConfig.with_gpu("L4"), 1, "1 GPU, of type L4", "4 GPUs; GPUs in the cluster: H100"),
        (ResourceConfig.with_gpu("H100", count=8), 1, "8 GPUs", "4 GPUs; GPUs in the cluster: H100"),
        (ResourceConfig(regions=("us-west1",)), 1, "a node in us-west1", "nodes in ? (zone unknown), us-east1"),
        (ResourceConfig(zone="us-east1-b"), 1, "a node in zone us-east1-b", "nodes in"),
        (ResourceConfig.with_gpu("H100", preemptible=False), 1, "that stays", "room for 0"),
        (ResourceConfig.with_tpu("v4-8"), 1, "1 × v4-8", "no TPUs"),
    ],
)
def test_request_that_no_waiting_would_help_is_refused_with_the_nearest_that_is_there(
    resources: ResourceConfig, replicas: int, expected: str, problem: str
) -> None:
    nodes = [node("a", **HEAD), node("b", labels={REGION_LABEL: "us-east1"}, **GPUS)]
    refused = refusal(nodes, resources, replicas)
    assert refused is not None
    assert expected in refused.expected
    assert problem in refused.found


def test_gpu_type_in_any_spelling_becomes_the_one_of_the_nodes() -> None:
    nodes = [node("b", **GPUS)]
    assert "accelerator_type:H100" in share_of(nodes, ResourceConfig.with_gpu("nvidia-h100"))
    assert "accelerator_type:L4" in share_of(nodes, ResourceConfig.with_gpu("L4"))


class DecidingRay:
    """The part of the module `ray` that a claim needs; it grants a placement group when `granted` has a result."""

    def __init__(self) -> None:
        self.granted: Future[object] = Future()
        self.scheduling = "SCHEDULING_STARTED"
        self.asked = self.looked_at = self.removed = 0
        self.util = SimpleNamespace(
            client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: True)),
            placement_group=self._ask,
            placement_group_table=self._table,
            remove_placement_group=self._remove,
        )

    def nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": 8.0, "memory": 32.0 * GIB}
        return [{"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Resources": resources, "Alive": True}]

    def _ask(self, *_: object, **__: object) -> DecidingRay:
        self.asked += 1
        return self

    def ready(self) -> DecidingRay:
        return self

    def future(self) -> Future[object]:
        return self.granted

    def _table(self, _: object) -> dict[str, Any]:
        self.looked_at += 1
        return {"stats": {"scheduling_state": self.scheduling}}

    def _remove(self, _: object) -> None:
        self.removed += 1


@pytest.mark.parametrize("granted", [True, False])
async def test_places_given_up_while_ray_decides_on_them_are_given_back_once_it_has(granted: bool) -> None:
    ray = DecidingRay()
    placing = asyncio.ensure_future(place(ray, ResourceConfig(), 1, on_waiting=lambda reason: None))
    while not ray.asked:
        await asyncio.sleep(0)
    placing.cancel()
    while not placing.done() and ray.looked_at < 3:
        await asyncio.sleep(0)
    assert not placing.done() and ray.removed == 0
    if granted:
        ray.granted.set_result(object())
    else:
        ray.scheduling = "NO_RESOURCES"
    await asyncio.wait({placing})
    assert placing.cancelled() and ray.removed == 1
