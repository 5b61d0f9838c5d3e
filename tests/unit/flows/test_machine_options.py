"""Options for the machine of an engine: from the command line to the request at each backend and each work pool."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from fakes.jobs import FakeClient
from fakes.models import write_run
from fakes.records import make_record
from flows.cli.evaluate import DryRun, plan_of
from flows.cli.options.evaluations import EvaluationOptions, evaluation_from_options
from flows.cli.options.pools import POOL_OPTIONS, PoolOptions
from resources.backends.current import set_current_client
from resources.backends.iris.resources import Group, check_groups
from resources.backends.kubernetes.devices import placement as on_kubernetes
from resources.backends.local.client import LocalClient
from resources.backends.ray.demand import allowed_nodes, selector_of, share_of
from resources.backends.ray.nodes import REGION_LABEL, ZONE_LABEL, RayNode
from resources.config import GpuConfig, ResourceConfig, TpuConfig
from resources.errors import BadInput, UnsatisfiableResources
from resources.jobs.jobs import Command, JobRequest
from resources.regions.regions import known_regions, price_per_hour
from resources.regions.work_pools import job_variables
from tasks.checkpoints.discovery import find_checkpoints
from tasks.records.cost import Cost
from tasks.records.provenance import hardware
from tasks.records.record import write_record
from tasks.running.cells import as_served, plan_cells
from tasks.running.planning import Request
from tasks.spec.evaluation import EvaluationConfig

GIB = 2**30
PLAIN = PoolOptions()
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


def options_of(*arguments: str) -> PoolOptions:
    """Returns the options that a command parses from its command line."""
    command = App(result_action="return_value")

    @command.default
    def up(*, engines: PoolOptions = PLAIN) -> PoolOptions:
        return engines

    return command(arguments, exit_on_error=False)


def evaluation(*arguments: str, **others: Any) -> EvaluationConfig:
    options = EvaluationOptions(**{"model": "runs/a", "evals": ("piqa",), **others})
    return evaluation_from_options(options, options_of(*arguments))


def resources_of(*arguments: str) -> ResourceConfig:
    pool = evaluation(*arguments).pool_config
    assert pool is not None
    return pool.resource_config


def test_given_options_are_those_of_a_pool() -> None:
    given = options_of(*ON_DEMAND, "--hosts", "2", "--engine", "seed=1").given(*POOL_OPTIONS)
    assert set(given) == {f"--{name.replace('_', '-')}" for name in POOL_OPTIONS if name != "tpu"}


def test_options_become_resources() -> None:
    resources = resources_of(*ON_DEMAND)
    assert resources.device == GpuConfig(variant="H100", count=2)
    assert (resources.replicas, resources.cpu, resources.ram, resources.disk) == (3, 11, "77g", "200g")
    assert (resources.regions, resources.zone, resources.preemptible) == (("us-central1",), "us-central1-a", False)
    assert resources.image == "team/image:1"
    assert resources_of("--gpu", "H100:2", "--preemptible").preemptible


def test_machines_of_a_replica_reach_its_jobs_its_price_and_its_cluster(tmp_path: Path) -> None:
    given, usual = resources_of(*ON_DEMAND, "--hosts", "2"), resources_of(*ON_DEMAND)
    assert (given.hosts, given.chip_count(), given.chips_per_replica) == (2, 12, 4)
    by_machine = given.by_machine()
    assert (by_machine.replicas, by_machine.hosts, by_machine.chips_per_replica) == (6, 1, 2)
    region = known_regions().named("us-central1").model_copy(update={"work_pool_type": "kubernetes"})
    assert price_per_hour(region, given) == 2 * (price_per_hour(region, usual) or 0)
    with pytest.raises(UnsatisfiableResources, match="2 machines each"):
        job_variables(given, region)
    with set_current_client(CloudClient()):
        *_, machine, _, _, _ = planned(*ON_DEMAND, "--hosts", "2", folder=tmp_path).lines()
    assert machine.startswith("3 × 2 × 2 H100 GPUs, 11 cores")
    with pytest.raises(BadInput, match="a single machine for each replica of a job"):
        JobRequest("job", Command("true"), resources=given)
    with pytest.raises(ValueError, match="expected no hosts with a TPU"):
        ResourceConfig.with_tpu("v6e-8", hosts=2)


def test_options_that_are_left_out_go_with_the_device() -> None:
    plain = resources_of()
    assert (plain.cpu, plain.ram, plain.disk, plain.preemptible) == (2, "4g", "16g", True)
    tpu_resources = resources_of("--tpu", "v5e-8")
    assert tpu_resources.device == TpuConfig(variant="v5litepod-8")
    assert (tpu_resources.cpu, tpu_resources.ram, tpu_resources.disk) == (32, "128g", "50g")
    assert resources_of("--tpu", "v5e-8,v6e-8").device == TpuConfig(variant="v5litepod-8", alternatives=("v6e-8",))


def test_region_without_a_description_is_refused() -> None:
    with pytest.raises(BadInput, match="us-central1"):
        evaluation("--region", "us-centrl1")


def test_options_reach_the_pods_of_kubernetes() -> None:
    where = on_kubernetes(resources_of(*ON_DEMAND))
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
    resources = resources_of(*ON_DEMAND)
    labels = {REGION_LABEL: "us-central1", ZONE_LABEL: "us-central1-a", "ray.io/market-type": "on-demand"}
    total = {"CPU": 64.0, "memory": 640.0 * GIB, "GPU": 8.0, "accelerator_type:H100": 1.0}
    nodes = [
        RayNode(node_id=name, address=name, labels={**labels, **other}, total=total, free=total)
        for name, other in {
            "right": {},
            "elsewhere": {ZONE_LABEL: "us-central1-b"},
            "passing": {"ray.io/market-type": "spot"},
        }.items()
    ]
    allowed = allowed_nodes(nodes, resources)
    assert [node.node_id for node in allowed] == ["right"]
    share = share_of(nodes, resources)
    assert (share["CPU"], share["memory"], share["GPU"]) == (11.0, 77.0 * GIB, 2.0)
    assert "accelerator_type:H100" in share
    selector = selector_of(allowed, resources, region=None, avoided=())
    assert (selector[REGION_LABEL], selector[ZONE_LABEL]) == ("in(us-central1)", "us-central1-a")


def test_options_reach_iris() -> None:
    resources = resources_of(*ON_DEMAND)
    right: dict[str, Any] = {
        "name": "a",
        "cpu_millicores": 11_000,
        "memory_bytes": 77 * GIB,
        "device": "gpu",
        "variant": "H100",
        "device_count": 8,
        "region": "us-central1",
        "zone": "us-central1-a",
    }
    check_groups(resources, [Group(**right)])
    places: list[dict[str, Any]] = [{"zone": "us-central1-b"}, {"region": "us-east5"}, {"preemptible": True}]
    for other in ({"variant": "A100"}, {"cpu_millicores": 10_000}, {"memory_bytes": 76 * GIB}, *places):
        with pytest.raises(UnsatisfiableResources):
            check_groups(resources, [Group(**{**right, **other})])


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


class CloudClient(FakeClient):
    @property
    def description(self) -> str:
        return "iris://controller:10000"

    @property
    def is_local(self) -> bool:
        return False


def planned(*arguments: str, folder: Path) -> DryRun:
    """Plans two checkpoints, with all questions and with two; the record of the first with all took an hour."""
    run, output = write_run(folder / "run-a", [100, 200]), str(folder / "out")
    config = evaluation(*arguments, model=str(run), evals=("demo_facts",), output=output)
    first = plan_cells.fn([as_served(config)], find_checkpoints(str(run)))[0]
    measured = make_record(
        checkpoint=first.reference,
        evaluation_hash=first.evaluation_hash,
        evaluation=first.config.model_dump(mode="json"),
        hardware=hardware(first.config),
        seconds={"evaluate": 3600.0},
        cost=Cost(replica_seconds=3600.0),
        requests={"answered": 120, "prompt_tokens": 12_000},
    )
    write_record(first.uri, measured)
    return plan_of(Request((config, config.model_copy(update={"max_eval_instances": 2}))))


def test_dry_run_says_what_would_be_asked_for_where_and_at_what_price(tmp_path: Path) -> None:
    with set_current_client(CloudClient()):
        plan = planned(*ON_DEMAND, folder=tmp_path)
    first, *cells, machine, price, expected, guess = plan.lines()
    assert first == "4 cells wanted, 1 recorded already, 3 to evaluate"
    assert sorted(cells) == ["  run-a-100 · lm-eval: demo_facts"] + [
        "  run-a-100 · lm-eval: demo_facts (recorded)"
    ] + 2 * ["  run-a-200 · lm-eval: demo_facts"]
    assert [cell["recorded"] for cell in plan.as_dict()["cells"]].count(True) == 1
    assert machine == (
        "3 × 2 H100 GPUs, 11 cores, 77g of memory, 200g of disk, on demand, zone us-central1-a, image team/image:1; "
        "on iris://controller:10000"
    )
    usd = price_per_hour(known_regions().named("us-central1"), resources_of(*ON_DEMAND))
    assert usd is not None and usd > 3 * 2 * Decimal("10.98")
    assert price == f"  us-central1: {usd:.2f} USD an hour"
    (asked,) = plan.as_dict()["machines"]
    assert (asked["resources"]["cpu"], asked["backend"]) == (11, "iris://controller:10000")
    assert asked["usd_per_hour"] == {"us-central1": pytest.approx(float(usd), abs=1e-4)}
    hours = 1 + 2 * 2 / 120
    assert f"{2 * hours:.3f} chip-hours, {float(usd) / 3 * hours:.2f} USD; partly a guess" in expected
    assert expected.endswith("(1 measured, 2 guess)")
    assert guess.startswith("  guess: 2 questions × 100 tokens (1 record of demo_facts) ÷ 3 tokens/s")
    assert plan.as_dict()["expected"]["usd"] == pytest.approx(float(usd) / 3 * hours, rel=1e-4)


def test_dry_run_on_this_machine_costs_nothing_and_refuses_what_it_has_not(tmp_path: Path) -> None:
    plan = planned("--replicas", "2", folder=tmp_path)
    *_, machine, expected, _ = plan.lines()
    assert machine == "2 × 2 cores, 4g of memory, 16g of disk; on this machine"
    assert "0.000 chip-hours, unknown (this machine is in no region that has prices)" in expected
    client = LocalClient(tmp_path / "jobs", device_root=tmp_path)
    with set_current_client(client), pytest.raises(UnsatisfiableResources, match="2 NVIDIA GPUs"):
        planned("--gpu", "H100:2", folder=tmp_path / "other")
