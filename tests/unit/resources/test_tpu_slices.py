"""TPU slices of a Ray cluster as its nodes describe them: whole, free and selected slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from resources.backends.ray.demand import refusal
from resources.backends.ray.nodes import (
    REGION_LABEL,
    RayNode,
    SliceState,
    TpuSlice,
    choose_slices,
    describe_slices,
    slice_variables,
    slices_of,
)
from resources.config import ResourceConfig, TpuConfig

SHARE = {"CPU": 8.0, "memory": float(2**30)}


def hosts(name: str, kind: str, *, vms: int, chips: int = 4, region: str | None = None) -> list[RayNode]:
    """Returns the nodes of a slice, as Ray describes TPU VMs of Google, with everything free."""
    nodes: list[RayNode] = []
    for worker in range(vms):
        total = {"CPU": 16.0, "memory": 64.0 * 2**30, "TPU": float(chips), name: 1.0}
        if worker == 0:
            total[f"TPU-{kind}-head"] = 1.0
        labels = {"ray.io/tpu-slice-name": name, "ray.io/tpu-worker-id": str(worker), "ray.io/tpu-pod-type": kind}
        if region:
            labels[REGION_LABEL] = region
        address = f"{name}-{worker}"
        nodes.append(RayNode(node_id=f"id-{address}", address=address, labels=labels, total=total, free=total))
    return nodes


def taken(node: RayNode, resource: str) -> RayNode:
    return replace(node, free={**node.free, resource: 0.0})


def only(nodes: Sequence[RayNode], variant: str) -> TpuSlice:
    (slice_,) = slices_of(nodes, TpuConfig(variant=variant))
    return slice_


@pytest.mark.parametrize(
    ("variant", "vms", "chips"),
    [("v4-8", 1, 4), ("v4-16", 2, 4), ("v5litepod-8", 1, 8), ("v5litepod-16", 4, 4), ("v6e-8", 2, 4), ("v5p-32", 4, 4)],
)
def test_slice_with_all_chips_is_free_on_any_number_of_vms(variant: str, vms: int, chips: int) -> None:
    slice_ = only(hosts("s", variant, vms=vms, chips=chips), variant)
    assert slice_.state(SHARE) is SliceState.FREE
    assert [host.labels["ray.io/tpu-worker-id"] for host in slice_.hosts] == [str(index) for index in range(vms)]


def test_v5e_named_by_its_short_name_is_the_same_type() -> None:
    assert only(hosts("s", "v5e-16", vms=4), "v5litepod-16").state(SHARE) is SliceState.FREE


@pytest.mark.parametrize(
    ("nodes", "state"),
    [
        (lambda s: [taken(s[0], "TPU-v4-16-head"), s[1]], SliceState.TAKEN),  # Ray's own libraries take the head first
        (lambda s: [s[0], taken(s[1], "TPU")], SliceState.TAKEN),
        (lambda s: [s[0], taken(s[1], "CPU")], SliceState.CROWDED),
        (lambda s: [s[0]], SliceState.INCOMPLETE),
        (lambda s: [s[1]], SliceState.INCOMPLETE),
        (lambda s: [*s, replace(s[1], node_id="its-former-self")], SliceState.INCOMPLETE),
        (lambda s: [s[0], replace(s[1], draining=True)], SliceState.INCOMPLETE),
    ],
)
def test_slice_that_is_not_all_there_and_free_is_not_chosen(
    nodes: Callable[[list[RayNode]], list[RayNode]], state: SliceState
) -> None:
    cluster_nodes = nodes(hosts("s", "v4-16", vms=2))
    assert only(cluster_nodes, "v4-16").state(SHARE) is state
    assert choose_slices(cluster_nodes, TpuConfig(variant="v4-16"), 1, share=SHARE) is None


def test_request_for_a_single_host_never_gets_part_of_a_slice() -> None:
    nodes = hosts("large", "v4-16", vms=2)
    assert slices_of(nodes, TpuConfig(variant="v4-8")) == []
    assert choose_slices(nodes, TpuConfig(variant="v4-8"), 1, share=SHARE) is None


def test_single_host_without_a_slice_name_is_a_slice_by_itself() -> None:
    nodes = [
        replace(node, labels={"ray.io/tpu-pod-type": "v4-8"}) for name in "ab" for node in hosts(name, "v4-8", vms=1)
    ]
    assert [tpu_slice.name for tpu_slice in slices_of(nodes, TpuConfig(variant="v4-8"))] == ["id-a-0", "id-b-0"]


def test_type_is_read_from_the_head_resource_where_labels_do_not_name_it() -> None:
    nodes = [
        replace(node, labels={key: value for key, value in node.labels.items() if key != "ray.io/tpu-pod-type"})
        for node in hosts("s", "v4-16", vms=2)
    ]
    assert only(nodes, "v4-16").state(SHARE) is SliceState.FREE


def test_other_arrangement_of_the_chips_is_not_what_was_asked_for() -> None:
    nodes = [
        replace(node, labels={**node.labels, "ray.io/tpu-topology": "4x4"})
        for node in hosts("s", "v5litepod-16", vms=4)
    ]
    assert slices_of(nodes, TpuConfig(variant="v5litepod-16", topology="2x8")) == []
    assert len(slices_of(nodes, TpuConfig(variant="v5litepod-16", topology="4x4"))) == 1


def test_slices_of_a_job_are_of_the_first_region_with_enough() -> None:
    tpu = TpuConfig(variant="v4-8")
    nodes = [
        *hosts("west", "v4-8", vms=1, region="us-west1"),
        *hosts("east-1", "v4-8", vms=1, region="us-east1"),
        *hosts("east-2", "v4-8", vms=1, region="us-east1"),
    ]
    order = ("us-west1", "us-east1")
    assert [tpu_slice.name for tpu_slice in choose_slices(nodes, tpu, 1, share=SHARE, regions=order) or []] == ["west"]
    assert [tpu_slice.name for tpu_slice in choose_slices(nodes, tpu, 2, share=SHARE, regions=order) or []] == [
        "east-1",
        "east-2",
    ]
    assert choose_slices(nodes, tpu, 3, share=SHARE, regions=order) is None


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([], "none in the cluster at present"),
        ([taken(hosts("a", "v4-16", vms=2)[0], "TPU"), hosts("a", "v4-16", vms=2)[1]], "1 slice in the cluster, taken"),
        (
            [taken(node, "TPU") for name in "ab" for node in hosts(name, "v4-16", vms=2)],
            "2 slices in the cluster, both",
        ),
        (
            [*[taken(node, "TPU") for node in hosts("a", "v4-16", vms=2)], hosts("b", "v4-16", vms=2)[1]],
            "2 slices in the cluster: 1 taken, 1 incomplete (b has 4 of 8 chips, on worker 1)",
        ),
    ],
)
def test_waiting_job_reports_the_number_of_slices_and_their_problems(nodes: list[RayNode], words: str) -> None:
    assert words in describe_slices(nodes, TpuConfig(variant="v4-16"), share=SHARE)


def test_hosts_of_a_slice_know_each_other_and_no_other_slice() -> None:
    slices = slices_of(hosts("s", "v4-16", vms=2), TpuConfig(variant="v4-16"))
    assert slice_variables(slices, 0, 1) == {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "s-0,s-1"}


def test_hosts_of_several_slices_meet_at_the_first_host_of_the_first() -> None:
    slices = slices_of([*hosts("a", "v4-8", vms=1), *hosts("b", "v4-8", vms=1)], TpuConfig(variant="v4-8"))
    assert slice_variables(slices, 1, 0) == {
        "MEGASCALE_COORDINATOR_ADDRESS": "a-0:8081",
        "MEGASCALE_PORT": "8081",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }


@pytest.mark.parametrize(
    ("resources", "replicas", "problem"),
    [
        (ResourceConfig.with_tpu("v4-32"), 1, "1 × v4-16, 2 × v4-8"),
        (ResourceConfig.with_tpu("v4-8"), 3, "1 × v4-16, 2 × v4-8"),
        (ResourceConfig.with_tpu("v4-16", cpu=17), 1, "hosts with 16 CPUs, 64 GiB of memory"),
    ],
)
def test_slices_that_the_cluster_will_never_have_are_refused(
    resources: ResourceConfig, replicas: int, problem: str
) -> None:
    nodes = [*hosts("a", "v4-8", vms=1), *hosts("b", "v4-8", vms=1), *hosts("c", "v4-16", vms=2)]
    refused = refusal(nodes, resources, replicas)
    assert refused is not None
    assert refused.found == problem


def test_slices_that_are_taken_or_incomplete_are_worth_waiting_for() -> None:
    resources = ResourceConfig.with_tpu("v4-16", cpu=16, ram="64g")
    assert refusal([taken(node, "TPU") for node in hosts("a", "v4-16", vms=2)], resources, 1) is None
    assert refusal(hosts("a", "v4-16", vms=2)[1:], resources, 1) is None
