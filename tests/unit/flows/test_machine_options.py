"""Options for the machine of an engine: from the command line to what each backend and each work pool is asked for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flows.cli.options.evaluations import evaluation_from_options
from flows.cli.options.groups import POOL_OPTIONS, EngineOptions, EvaluationOptions, MachineOptions, flattened
from resources.backends.iris.resources import Group, check_groups
from resources.backends.iris.resources import placement as on_iris
from resources.backends.kubernetes.devices import placement as on_kubernetes
from resources.backends.ray.demand import allowed_nodes, selector_of, share_of
from resources.backends.ray.nodes import REGION_LABEL, ZONE_LABEL, RayNode
from resources.config import GpuConfig, ResourceConfig, TpuConfig
from resources.errors import BadInput, UnsatisfiableResources
from resources.regions.regions import known_regions
from resources.regions.work_pool_variables import job_variables

GIB = 2**30
GIVEN = {
    "gpu": "H100:2",
    "replicas": 3,
    "cpu": 11,
    "ram": "77g",
    "disk": "200g",
    "region": "us-central1",
    "zone": "us-central1-a",
    "image": "team/image:1",
}
ON_DEMAND = [*(part for name, value in GIVEN.items() for part in (f"--{name}", str(value))), "--on-demand"]


def options_of(*arguments: str) -> EvaluationOptions:
    """The options that a command reads from its command line."""
    parsed: list[EvaluationOptions] = []

    @flattened
    def evaluate(engines: EngineOptions, machine: MachineOptions) -> None:
        parsed.append(EvaluationOptions(model="runs/a", evals=("piqa",), **asdict(engines), **asdict(machine)))

    command = typer.Typer()
    command.command()(evaluate)
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return parsed[0]


def resources_of(*arguments: str) -> ResourceConfig:
    """The resources of the pool that the command would start."""
    pool = evaluation_from_options(options_of(*arguments)).pool_config
    assert pool is not None
    return pool.resource_config


def test_options_are_all_those_of_a_pool() -> None:
    assert set(POOL_OPTIONS) == {*EngineOptions.__annotations__, *MachineOptions.__annotations__} - {"chat"}
    assert set(options_of(*ON_DEMAND, "--engine", "seed=1").given(*POOL_OPTIONS)) == {
        f"--{name.replace('_', '-')}" for name in POOL_OPTIONS if name != "tpu"
    }


def test_options_become_resources() -> None:
    found = resources_of(*ON_DEMAND)
    assert found.device == GpuConfig(variant="H100", count=2)
    assert (found.replicas, found.cpu, found.ram, found.disk) == (3, 11, "77g", "200g")
    assert (found.regions, found.zone, found.preemptible) == (("us-central1",), "us-central1-a", False)
    assert found.image == "team/image:1"
    assert resources_of("--gpu", "H100:2", "--preemptible").preemptible


def test_options_that_are_left_out_go_with_the_device() -> None:
    plain = resources_of()
    assert (plain.cpu, plain.ram, plain.disk, plain.preemptible) == (2, "4g", "16g", True)
    beside = resources_of("--tpu", "v5e-8")
    assert beside.device == TpuConfig(variant="v5litepod-8")
    assert (beside.cpu, beside.ram, beside.disk) == (32, "128g", "50g")


def test_region_that_nobody_described_is_refused() -> None:
    with pytest.raises(BadInput, match="us-central1"):
        evaluation_from_options(options_of("--region", "us-centrl1"))


def test_options_reach_the_pods_of_kubernetes() -> None:
    where = on_kubernetes(resources_of(*ON_DEMAND), replicas=3)
    assert where.limits == {
        "cpu": "11",
        "memory": str(77 * GIB),
        "ephemeral-storage": str(200 * GIB),
        "nvidia.com/gpu": "2",
    }
    assert where.node_selector == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    asked = str(where.affinity)
    assert "us-central1" in asked and "us-central1-a" in asked
    assert not [tolerated for tolerated in where.tolerations if "spot" in tolerated["key"]]


def test_options_reach_the_nodes_of_ray() -> None:
    found = resources_of(*ON_DEMAND)
    there = {REGION_LABEL: "us-central1", ZONE_LABEL: "us-central1-a", "ray.io/market-type": "on-demand"}
    total = {"CPU": 64.0, "memory": 640.0 * GIB, "GPU": 8.0, "accelerator_type:H100": 1.0}
    nodes = [
        RayNode(node_id=name, address=name, labels={**there, **other}, total=total, free=total)
        for name, other in {
            "right": {},
            "elsewhere": {ZONE_LABEL: "us-central1-b"},
            "passing": {"ray.io/market-type": "spot"},
        }.items()
    ]
    allowed = allowed_nodes(nodes, found)
    assert [node.node_id for node in allowed] == ["right"]
    share = share_of(nodes, found)
    assert (share["CPU"], share["memory"], share["GPU"]) == (11.0, 77.0 * GIB, 2.0)
    assert "accelerator_type:H100" in share
    selector = selector_of(allowed, found, region=None, avoided=())
    assert (selector[REGION_LABEL], selector[ZONE_LABEL]) == ("in(us-central1)", "us-central1-a")


def test_options_reach_iris() -> None:
    found = resources_of(*ON_DEMAND)
    placed = on_iris(found, replicas=found.replicas)
    assert (placed.cpu_millicores, placed.memory_bytes, placed.disk_bytes) == (11_000, 77 * GIB, 200 * GIB)
    assert placed.tasks == 3
    right: dict[str, Any] = {
        "name": "a",
        "device": "gpu",
        "variant": "H100",
        "device_count": 8,
        "region": "us-central1",
        "zone": "us-central1-a",
    }
    check_groups(found, [Group(**right)])
    for other in ({"variant": "A100"}, {"zone": "us-central1-b"}, {"region": "us-east5"}, {"preemptible": True}):
        with pytest.raises(UnsatisfiableResources):
            check_groups(found, [Group(**{**right, **other})])


def test_options_reach_the_job_of_a_work_pool() -> None:
    region = known_regions().named("us-central1").model_copy(update={"work_pool_type": "kubernetes"})
    variables = job_variables(resources_of(*ON_DEMAND), region)
    assert (variables["cpu"], variables["memory"], variables["disk"]) == (
        str(3 * 11),
        str(3 * 77 * GIB),
        str(3 * 200 * GIB),
    )
    assert (variables["gpus"], variables["image"]) == (6, "team/image:1")
    assert "us-central1-a" in str(variables["affinity"])
