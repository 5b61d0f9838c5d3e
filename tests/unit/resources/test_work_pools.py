"""From the resources of a run to a work pool and its job variables, and from these to a worker's submission."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import kubernetes_validate
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.templating import apply_values
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from fakes.broken_servers import broken_server
from resources.config import ResourceConfig
from resources.errors import BadInput, NoUsableWorkPool, UnsatisfiableResources
from resources.regions.region_table import Regions, WorkPoolType
from resources.regions.regions import load_regions
from resources.regions.work_pools import Source, WorkPoolState, choose_work_pool
from resources.tpu import TPU_TOPOLOGIES
from tasks.errors import PrefectUnavailable
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL, base_job_template, wanted_work_pools, work_pool_states

REPOSITORY = Path(__file__).parents[3]
OURS = load_regions(REPOSITORY / "deployments" / "regions.yaml")
PRICES = {
    "as_of": "2026-01-01",
    "chip_hour": {"v6e": {"on_demand": 2, "preemptible": 1}, "H100": {"on_demand": 10, "preemptible": 4}},
    "vcpu_hour": {"on_demand": 0.03, "preemptible": 0.01},
    "memory_gb_hour": {"on_demand": 0.004, "preemptible": 0.001},
    "egress_gb": {"same_continent": 0.02, "other_continent": 0.08},
}
TYPES: tuple[WorkPoolType, ...] = ("process", "kubernetes", "cloud-run-v2", "vertex-ai")
REQUIRED: dict[WorkPoolType, dict[str, Any]] = {
    "process": {},
    "kubernetes": {"image": "registry.example/assay:1"},
    "cloud-run-v2": {"image": "registry.example/assay:1", "region": "us-east5"},
    "vertex-ai": {"image": "registry.example/assay:1", "region": "us-east5"},
}
"""Job variables that a work pool of each type requires in addition to those from the resources."""


def region(name: str, kind: WorkPoolType = "kubernetes", **more: Any) -> dict[str, Any]:
    zones = [f"{name}-a"]
    return {
        "name": name,
        "continent": "europe" if name.startswith("europe") else "north-america",
        "zones": zones,
        "tpus": dict.fromkeys(("v4", "v5litepod", "v5p", "v6e"), zones),
        "gpus": dict.fromkeys(("H100", "A100", "A100-80GB", "L4", "T4"), zones),
        "work_pool": f"pool-{name}",
        "work_pool_type": kind,
        **more,
    }


def regions(*listed: dict[str, Any]) -> Regions:
    return Regions.model_validate({"prices": PRICES, "regions": list(listed)})


THREE = regions(region("us-east5"), region("us-central1"), region("europe-west4"))
V6E = ResourceConfig.with_tpu("v6e-8")


def rendered(kind: WorkPoolType, variables: dict[str, Any]) -> dict[str, Any]:
    template = base_job_template(kind)
    declared = template["variables"]["properties"]
    defaults = {name: schema["default"] for name, schema in declared.items() if "default" in schema}
    return apply_values(template["job_configuration"], {**defaults, **REQUIRED[kind], **variables})


# --- Choosing --------------------------------------------------------------------------------------------------------


def test_choice_is_the_first_region_allowed_that_offers_the_device() -> None:
    choice = choose_work_pool(V6E, regions=THREE)
    assert (choice.work_pool, choice.price_per_hour) == ("pool-us-east5", 8)
    resources = V6E.model_copy(update={"regions": ("europe-west4", "us-central1")})
    assert choose_work_pool(resources, regions=THREE).work_pool == "pool-europe-west4"


def test_choice_without_allowed_regions_prefers_the_one_of_the_checkpoints() -> None:
    choice = choose_work_pool(V6E, regions=THREE, source=Source("us-central1", 10**12))
    assert (choice.work_pool, choice.egress_usd) == ("pool-us-central1", 0)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (WorkPoolState(exists=False), "does not exist"),
        (WorkPoolState(paused=True), "is paused"),
        (WorkPoolState(live_workers=0), "has no live worker"),
        (WorkPoolState(limit=3, active=3), "is full (3 of 3 flow runs)"),
    ],
)
def test_choice_passes_over_a_work_pool_that_would_not_start_it_and_says_why(state: WorkPoolState, reason: str) -> None:
    choice = choose_work_pool(V6E, regions=THREE, states={"pool-us-east5": state})
    assert choice.work_pool == "pool-us-central1"
    assert reason in choice.passed_over["us-east5"]
    assert reason in choice.described()


def test_failover_costs_egress_which_is_shown_and_refused_above_the_limit() -> None:
    paused = {"pool-us-east5": WorkPoolState(paused=True)}
    source = Source("us-east5", 500 * 10**9)
    with pytest.raises(NoUsableWorkPool, match=r"us-central1 .* 10\.00 USD.*europe-west4 .* 40\.00 USD"):
        choose_work_pool(V6E, regions=THREE, states=paused, source=source)
    choice = choose_work_pool(V6E, regions=THREE, states=paused, source=source, max_egress_usd=Decimal(10))
    assert (choice.work_pool, choice.egress_usd) == ("pool-us-central1", Decimal("10.00"))
    # The limit, or the job would be refused in that region; the region, for the price in its records.
    assert choice.job_variables["env"] == {"ASSAY_MAX_EGRESS_USD": "10", "ASSAY_REGION": "us-central1"}
    assert "10.00 USD for reading from another region" in choice.described()


def test_no_work_pool_left_names_the_reason_of_each() -> None:
    states = {
        "pool-us-east5": WorkPoolState(paused=True),
        "pool-us-central1": WorkPoolState(live_workers=0),
        "pool-europe-west4": WorkPoolState(limit=1, active=1),
    }
    with pytest.raises(NoUsableWorkPool, match=r"paused; us-central1 .* no live worker; europe-west4 .* full"):
        choose_work_pool(V6E, regions=THREE, states=states)


def test_request_that_no_work_pool_can_express_names_what_comes_nearest() -> None:
    only = regions(region("us-east5", "vertex-ai"))
    with pytest.raises(UnsatisfiableResources, match="v5litepod-8"):
        choose_work_pool(ResourceConfig.with_tpu("v4-8"), regions=only)
    with pytest.raises(UnsatisfiableResources, match="1 L4"):
        choose_work_pool(ResourceConfig.with_gpu("H100"), regions=regions(region("us-east5", "cloud-run-v2")))


def test_work_pool_that_cannot_express_it_is_passed_over() -> None:
    both = regions(region("us-east5", "cloud-run-v2"), region("us-central1"))
    assert choose_work_pool(ResourceConfig.with_gpu("H100"), regions=both).work_pool == "pool-us-central1"


# --- Every device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", sorted(TPU_TOPOLOGIES))
def test_every_tpu_type_becomes_a_node_on_kubernetes_or_a_run_that_reaches_the_cluster(variant: str) -> None:
    slice_ = TPU_TOPOLOGIES[variant]
    resources = ResourceConfig.with_tpu(variant)
    if slice_.vms > 1:
        with pytest.raises(UnsatisfiableResources, match=r"nearest: 1 .* ray_address: ray://HEAD:10001"):
            choose_work_pool(resources, regions=THREE)
        near = regions(region("us-east5", ray_address="ray://10.0.0.2:10001"))
        variables = choose_work_pool(resources, regions=near).job_variables
        assert variables["env"] == {"ASSAY_JOBS": "ray://10.0.0.2:10001", "ASSAY_REGION": "us-east5"}
        assert "tpu_chips" not in variables
    elif variant == "v5litepod-2":  # Compute Engine has it, GKE has no node pool of it
        with pytest.raises(UnsatisfiableResources):
            choose_work_pool(resources, regions=THREE)
    else:
        variables = choose_work_pool(resources, regions=THREE).job_variables
        assert variables["tpu_chips"] == slice_.chips
        rows, columns, *depth = map(int, variables["node_selector"]["cloud.google.com/gke-tpu-topology"].split("x"))
        assert rows * columns * (depth or [1])[0] == slice_.chips


@pytest.mark.parametrize(
    ("variant", "count", "kubernetes", "vertex"),
    [
        ("T4", 2, "nvidia-tesla-t4", ("n1-standard-16", "NVIDIA_TESLA_T4", 2)),
        ("A100", 8, "nvidia-tesla-a100", ("a2-highgpu-8g", "NVIDIA_TESLA_A100", 8)),
        ("A100-80GB", 3, "nvidia-a100-80gb", ("a2-ultragpu-4g", "NVIDIA_A100_80GB", 4)),
        ("H100", 8, "nvidia-h100-80gb", ("a3-highgpu-8g", "NVIDIA_H100_80GB", 8)),
        ("L4", 1, "nvidia-l4", ("g2-standard-12", "NVIDIA_L4", 1)),
    ],
)
def test_every_gpu_model_becomes_a_node_or_a_machine(
    variant: str, count: int, kubernetes: str, vertex: tuple[str, str, int]
) -> None:
    resources = ResourceConfig.with_gpu(variant, count)
    variables = choose_work_pool(resources, regions=THREE).job_variables
    assert variables["gpus"] == count
    assert variables["node_selector"] == {"cloud.google.com/gke-accelerator": kubernetes}
    machine = choose_work_pool(resources, regions=regions(region("us-east5", "vertex-ai"))).job_variables
    assert (machine["machine_type"], machine["accelerator_type"], machine["accelerator_count"]) == vertex


def test_replicas_of_a_machine_share_it() -> None:
    resources = ResourceConfig.with_gpu("H100", 2, replicas=4, cpu=8, ram="64g", disk="100g")
    variables = choose_work_pool(resources, regions=THREE).job_variables
    shared = [variables[name] for name in ("gpus", "cpu", "memory", "disk")]
    assert shared == [8, "32", str(4 * 64 * 2**30), str(400 * 2**30)]


@pytest.mark.parametrize(
    ("cpu", "ram", "machine"),
    [(1, "4g", "n2-standard-2"), (4, "32g", "n2-highmem-4"), (8, "8g", "n2-standard-8"), (2, "100g", "n2-highmem-16")],
)
def test_cpu_machine_is_the_smallest_that_fits(cpu: int, ram: str, machine: str) -> None:
    only = regions(region("us-east5", "vertex-ai"))
    assert choose_work_pool(ResourceConfig(cpu=cpu, ram=ram), regions=only).job_variables["machine_type"] == machine


def test_gpu_machine_has_the_cores_and_the_memory_that_are_asked_for() -> None:
    only = regions(region("us-east5", "vertex-ai"))
    resources = ResourceConfig.with_gpu("L4", cpu=16, ram="80g")
    variables = choose_work_pool(resources, regions=only).job_variables
    assert (variables["machine_type"], variables["accelerator_count"]) == ("g2-standard-24", 2)
    with pytest.raises(UnsatisfiableResources, match="8 x L4 with 96 cores and 384 GiB"):
        choose_work_pool(ResourceConfig.with_gpu("L4", ram="500g"), regions=only)


def test_preemptible_is_said_in_the_words_of_each_type() -> None:
    spot = {"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"}
    vertex = regions(region("us-east5", "vertex-ai"))
    cheap, kept = ResourceConfig.with_gpu("L4"), ResourceConfig.with_gpu("L4", preemptible=False)
    assert spot in choose_work_pool(cheap, regions=THREE).job_variables["tolerations"]
    assert spot not in choose_work_pool(kept, regions=THREE).job_variables["tolerations"]
    assert choose_work_pool(cheap, regions=vertex).job_variables["scheduling"] == {"strategy": "SPOT"}
    assert "scheduling" not in choose_work_pool(kept, regions=vertex).job_variables


# --- Templates as workers render them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    "resources",
    [ResourceConfig(cpu=4, ram="16g"), ResourceConfig.with_gpu("L4"), ResourceConfig.with_tpu("v6e-8")],
    ids=["cpu", "gpu", "tpu"],
)
def test_job_variables_are_all_declared_by_the_template(kind: WorkPoolType, resources: ResourceConfig) -> None:
    if kind == "cloud-run-v2" and resources.device.kind == "tpu":
        pytest.skip("Cloud Run has no TPUs")
    variables = choose_work_pool(resources, regions=regions(region("us-east5", kind))).job_variables
    assert set(variables) <= set(base_job_template(kind)["variables"]["properties"])
    rendered(kind, variables)


@pytest.mark.parametrize(
    ("resources", "image"),
    [
        (ResourceConfig(), "assay-cpu:1"),
        (ResourceConfig.with_gpu("H100"), "assay-cuda:1"),
        (ResourceConfig.with_tpu("v6e-8"), "assay-tpu:1"),
        (ResourceConfig.with_tpu("v6e-16"), "assay-orchestrator:1"),
        (ResourceConfig.with_gpu("H100", image="own:2"), "own:2"),
    ],
)
def test_image_of_a_flow_run_is_the_regions_for_its_device_unless_it_names_its_own(
    resources: ResourceConfig, image: str
) -> None:
    images = {name: f"assay-{name}:1" for name in ("orchestrator", "cpu", "cuda", "tpu")}
    own_region = region("us-east5", "kubernetes", images=images, ray_address="ray://10.0.0.2:10001")
    assert choose_work_pool(resources, regions=regions(own_region)).job_variables["image"] == image


def test_work_pool_gets_the_first_tpu_type_that_its_region_offers() -> None:
    only = regions(region("us-east5", tpus={"v6e": ["us-east5-a"], "v5p": ["us-east5-a"]}))
    choice = choose_work_pool(ResourceConfig.with_tpu(["v4-8", "v6e-4", "v5p-8"]), regions=only)
    assert choice.job_variables["node_selector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu-v6e-slice"
    assert choice.price_per_hour == 4


def test_kubernetes_job_is_valid_and_asks_for_the_slice() -> None:
    variables = choose_work_pool(ResourceConfig.with_tpu("v5litepod-8"), regions=THREE).job_variables
    values = rendered("kubernetes", variables | {"service_account_name": "assay", "queue_name": "team"})
    configuration = KubernetesWorkerJobConfiguration.model_validate(values)
    configuration.prepare_for_flow_run(FlowRun(name="evaluate", flow_id=uuid4()))
    manifest = configuration.job_manifest
    kubernetes_validate.validate(manifest, "1.30", strict=True)
    pod = manifest["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x4"
    assert pod["serviceAccountName"] == "assay"
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "kueue" not in str(rendered("kubernetes", variables))
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["google.com/tpu"] == resources["requests"]["google.com/tpu"] == 8
    assert "nvidia.com/gpu" not in resources["limits"]


def test_cloud_run_job_without_a_gpu_names_no_gpu() -> None:
    only = regions(region("us-east5", "cloud-run-v2"))
    plain = rendered("cloud-run-v2", choose_work_pool(ResourceConfig(cpu=3), regions=only).job_variables)
    template = plain["job_body"]["template"]["template"]
    assert "nodeSelector" not in template
    assert template["containers"][0]["resources"]["limits"] == {"cpu": "4000m", "memory": "4Gi"}
    gpu = rendered("cloud-run-v2", choose_work_pool(ResourceConfig.with_gpu("L4"), regions=only).job_variables)
    assert gpu["job_body"]["template"]["template"]["nodeSelector"] == {"accelerator": "nvidia-l4"}


def test_vertex_job_of_a_slice_names_machine_and_topology() -> None:
    only = regions(region("us-east5", "vertex-ai"))
    spec = rendered("vertex-ai", choose_work_pool(V6E, regions=only).job_variables)["job_spec"]
    assert spec["worker_pool_specs"][0]["machine_spec"] == {"machine_type": "ct6e-standard-8t", "tpu_topology": "2x4"}


# --- The work pools themselves ---------------------------------------------------------------------------------------


def test_each_own_region_gets_its_work_pool_and_the_local_pool() -> None:
    names = [spec.name for spec in wanted_work_pools(OURS)]
    assert names == [LOCAL_WORK_POOL, *(own_region.work_pool for own_region in OURS.regions if own_region.work_pool)]


def test_region_defaults_reach_the_template_and_unknown_keys_are_refused() -> None:
    configured = region("us-east5", "vertex-ai", work_pool_variables={"image": "registry.example/assay:2"})
    properties = wanted_work_pools(regions(configured))[1].base_job_template["variables"]["properties"]
    assert (properties["region"]["default"], properties["image"]["default"]) == ("us-east5", "registry.example/assay:2")
    with pytest.raises(BadInput, match="'imgae'"):
        wanted_work_pools(regions(region("us-east5", work_pool_variables={"imgae": "x"})))


@pytest.mark.parametrize("kind", TYPES)
def test_template_uses_every_variable_it_declares_and_no_other(kind: WorkPoolType) -> None:
    template = base_job_template(kind)
    used = {part.split("}}")[0].strip() for part in json.dumps(template["job_configuration"]).split("{{")[1:]}
    assert used == set(template["variables"]["properties"])


def test_server_that_refuses_access_is_reported_without_a_traceback() -> None:
    with (
        broken_server("401") as address,
        temporary_settings({PREFECT_API_URL: f"{address}/api"}),
        pytest.raises(PrefectUnavailable, match="401"),
    ):
        work_pool_states(["pool"])
