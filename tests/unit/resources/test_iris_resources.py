"""Resources that jobs request from an Iris cluster, and resources that its machine groups can give."""

from __future__ import annotations

from typing import Any

import pytest
from iris.cluster.constraints import (
    AttributeValue,
    constraints_from_resources,
    evaluate_constraint,
    merge_constraints,
    validate_tpu_request,
)
from iris.cluster.types import tpu_device
from iris.rpc import job_pb2

from resources.backends.iris.connection import constraints_of
from resources.backends.iris.resources import Group, check_groups, hosts_of
from resources.config import ResourceConfig
from resources.errors import UnsatisfiableResources

CPUS = Group(name="cpus", cpu_millicores=8000, memory_bytes=16 * 2**30, region="us-east1", zone="us-east1-b")
SPOT = Group(name="spot", device="tpu", variant="v5litepod-16", preemptible=True, region="us-west4")
GPUS = Group(name="gpus", device="gpu", variant="H100", device_count=8)


@pytest.mark.parametrize(
    ("resources", "replicas", "hosts"),
    [
        (ResourceConfig.with_tpu("v5litepod-16"), 1, 4),
        (ResourceConfig.with_tpu("v5litepod-8", slice_count=2), 2, 1),
        (ResourceConfig(cpu=3), 5, 1),
    ],
)
def test_iris_gives_each_vm_of_a_slice_a_task(resources: ResourceConfig, replicas: int, hosts: int) -> None:
    assert hosts_of(resources, replicas=replicas) == hosts


@pytest.mark.parametrize(
    "options",
    [
        {"cpu": 8},
        {"regions": ("us-east1", "us-east5")},
        {"zone": "us-east1-b"},
        {"preemptible": False},
        {"device": {"kind": "gpu", "count": 8}},
        {"device": {"kind": "gpu", "variant": "h100"}},
        {"device": {"kind": "tpu", "variant": "v5e-16"}},
        {"device": {"kind": "tpu", "variant": "v6e-16", "alternatives": ["v5e-16"]}},
        {"cpu": 100},  # groups with GPUs or TPUs do not report their number of cores
    ],
)
def test_iris_resources_of_any_matching_group_are_taken(options: dict[str, Any]) -> None:
    check_groups(ResourceConfig(**options), [CPUS, SPOT, GPUS])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": {"kind": "tpu", "variant": "v4-8"}}, "v4-8"),
        ({"device": {"kind": "tpu", "variant": "v4-8", "alternatives": ["v5p-8"]}}, "v4-8 or v5p-8"),
        ({"device": {"kind": "tpu", "variant": "v5e-16"}, "preemptible": False}, "not preemptible"),
        ({"device": {"kind": "tpu", "variant": "v5e-16"}, "regions": ("us-east1",)}, "us-east1"),
        ({"device": {"kind": "gpu", "count": 16}}, "16 × auto GPU"),
        ({"zone": "us-east1-b", "ram": "32g", "regions": ("us-east1",), "device": {"kind": "gpu"}}, "region"),
    ],
)
def test_iris_resources_that_no_group_has_are_refused_with_what_lacks(options: dict[str, Any], expected: str) -> None:
    groups = [CPUS, SPOT, Group(name="gpus", device="gpu", variant="H100", device_count=8, region="us-west4")]
    with pytest.raises(UnsatisfiableResources, match=expected):
        check_groups(ResourceConfig(**options), groups)


def test_iris_chooses_between_the_tpu_types_that_would_do() -> None:
    (either,) = constraints_of(ResourceConfig.with_tpu(["v5e-8", "v6e-8"]))
    asked = job_pb2.ResourceSpecProto(device=tpu_device("v5litepod-8"))
    assert validate_tpu_request(asked, [either]) is None  # Iris' own check
    chosen = merge_constraints(constraints_from_resources(asked), [either])
    fitting = {"v5litepod-8", "v6e-8"}
    for variant in (*fitting, "v4-8"):
        worker = {"device-type": AttributeValue("tpu"), "device-variant": AttributeValue(variant)}
        assert all(evaluate_constraint(worker.get(each.key), each) for each in chosen) == (variant in fitting)
    assert constraints_of(ResourceConfig.with_tpu("v5e-8")) == []


def test_iris_cluster_that_names_no_groups_is_taken_at_its_word() -> None:
    check_groups(ResourceConfig.with_tpu("v4-8"), [])
