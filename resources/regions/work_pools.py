"""Choice of the Prefect work pool for a `ResourceConfig`, and its job variables; pure functions of their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from resources.backends.kubernetes.devices import GPU_RESOURCE, TPU_RESOURCE, placement, tpu_shape
from resources.config import CpuConfig, GpuConfig, ResourceConfig, TpuConfig, size_in_bytes
from resources.errors import NoUsableWorkPool, UnsatisfiableResources
from resources.regions.region_table import ADDRESS_LINE, ImageKind, Region, Regions, gpu_model
from resources.regions.regions import described, known_regions, price_per_hour, regions_for, where_to_write
from resources.settings import MAX_EGRESS_VARIABLE, REGION_VARIABLE
from resources.tpu import largest_single_vm_slice

_GB, _GIB = 10**9, 2**30
_COORDINATOR_CORES, _COORDINATOR_MEMORY = 4, 16 * _GIB

_IMAGE_KINDS: dict[str, ImageKind] = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
_CLOUD_RUN_CORES = (1, 2, 4, 8)
_CLOUD_RUN_MEMORY = 32 * _GIB
_CLOUD_RUN_GPU_CORES, _CLOUD_RUN_GPU_MEMORY = 4, 16 * _GIB


@dataclass(frozen=True)
class _Machine:
    name: str
    cores: int
    memory_gib: int
    model: str = ""
    gpus: int = 0

    def __str__(self) -> str:
        kind = f"{self.gpus} x {self.model}" if self.gpus else self.name
        return f"{kind} with {self.cores} cores and {self.memory_gib} GiB"


def _with_gpus(model: str, name: str, cores: int, memory_gib: int, *, most: int = 8) -> list[_Machine]:
    return [
        _Machine(name.format(gpus=gpus, cores=cores * gpus), cores * gpus, memory_gib * gpus, model, gpus)
        for gpus in (1, 2, 4, 8)
        if gpus <= most
    ]


_MACHINES = (
    *(
        _Machine(f"n2-{family}-{cores}", cores, cores * per_core)
        for cores in (2, 4, 8, 16, 32, 48, 64, 80, 96, 128)
        for family, per_core in (("standard", 4), ("highmem", 8))
        if (family, cores) != ("highmem", 128)  # has less memory per core than the rest of its family
    ),
    *_with_gpus("A100", "a2-highgpu-{gpus}g", 12, 85),
    _Machine("a2-megagpu-16g", 96, 1360, "A100", 16),
    *_with_gpus("A100-80GB", "a2-ultragpu-{gpus}g", 12, 170),
    *_with_gpus("H100", "a3-highgpu-{gpus}g", 26, 234),
    *_with_gpus("L4", "g2-standard-{cores}", 12, 48),
    *_with_gpus("T4", "n1-standard-{cores}", 8, 30, most=4),
)
_GPU_TYPES = {
    "A100": "NVIDIA_TESLA_A100",
    "A100-80GB": "NVIDIA_A100_80GB",
    "H100": "NVIDIA_H100_80GB",
    "L4": "NVIDIA_L4",
    "T4": "NVIDIA_TESLA_T4",
}
_TPU_MACHINES = {
    f"{generation}-{chips}": f"{machine}-{chips}t"
    for generation, machine in (("v5litepod", "ct5lp-hightpu"), ("v6e", "ct6e-standard"))
    for chips in (1, 4, 8)
}


@dataclass(frozen=True)
class WorkPoolState:
    """State of a work pool, as the Prefect server reports it."""

    exists: bool = True
    paused: bool = False
    live_workers: int = 1
    limit: int | None = None
    """Maximum number of concurrent flow runs, which `active` counts; no limit when None."""
    active: int = 0

    @property
    def obstacle(self) -> str | None:
        """Returns the reason why a flow run would not start now; None if it would."""
        if not self.exists:
            return "does not exist"
        if self.paused:
            return "is paused"
        if self.live_workers == 0:
            return "has no live worker"
        if self.limit is not None and self.active >= self.limit:
            return f"is full ({self.active} of {self.limit} flow runs)"
        return None


@dataclass(frozen=True)
class Source:
    """Location of the checkpoints of a run."""

    region: str
    size_bytes: int
    """Bytes to read, over all checkpoints of the flow run."""


@dataclass(frozen=True)
class WorkPoolChoice:
    """The work pool for a flow run, with its job variables."""

    work_pool: str
    region: Region
    job_variables: dict[str, Any]
    egress_usd: Decimal = Decimal(0)
    price_per_hour: Decimal | None = None
    """USD per hour for the requested resources; None without a price."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Reasons why better regions were not chosen, by region name."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "work_pool": self.work_pool,
            "region": self.region.name,
            "job_variables": self.job_variables,
            "egress_usd": float(self.egress_usd),
            "usd_per_hour": None if self.price_per_hour is None else float(self.price_per_hour),
            "passed_over": dict(self.passed_over),
        }

    def described(self) -> str:
        """Returns a line with the work pool, its costs, and why better regions were not chosen."""
        price = f", {self.price_per_hour:.2f} USD an hour" if self.price_per_hour is not None else ""
        egress = f", {self.egress_usd:.2f} USD for reading from another region" if self.egress_usd else ""
        why = "; ".join(f"{region} {reason}" for region, reason in self.passed_over.items())
        return f"work pool {self.work_pool} in {self.region.name}{price}{egress}" + (f" ({why})" if why else "")


def choose_work_pool(
    resources: ResourceConfig,
    *,
    regions: Regions | None = None,
    states: Mapping[str, WorkPoolState] | None = None,
    source: Source | None = None,
    max_egress_usd: Decimal = Decimal(0),
) -> WorkPoolChoice:
    """Returns the work pool of the best region that offers the device, can express the request, and would start it now.

    Regions are tried in the order of `resources.regions`, else the source's region first, then in the order of the
    file.

    Args:
        states: states of work pools by name; a pool without a state counts as ready.
        source: location of the checkpoints; reading from another region costs egress.
        max_egress_usd: highest accepted cost of reading the checkpoints.
    """
    known = regions or known_regions()
    offering = regions_for(resources, known)
    if source is not None and not resources.regions:
        offering.sort(key=lambda region: region.name != source.region)
    passed_over: dict[str, str] = {}
    impossible: UnsatisfiableResources | None = None
    nearest: str | None = None
    for region in offering:
        if region.work_pool is None:
            passed_over[region.name] = "has no work pool"
            continue
        try:
            variables = job_variables(resources, region)
        except UnsatisfiableResources as error:
            impossible = impossible or error
            passed_over[region.name] = f"cannot: {error.found}; {error.remedy}"
            continue
        if obstacle := (states or {}).get(region.work_pool, WorkPoolState()).obstacle:
            passed_over[region.name] = f"has a work pool, {region.work_pool}, that {obstacle}"
            nearest = nearest or f"{region.work_pool}, which {obstacle}"
            continue
        egress = Decimal(0)
        if source is not None:
            egress = known.egress_price(source.region, region.name) * Decimal(source.size_bytes) / _GB
        if egress > max_egress_usd:
            nearest = nearest or f"{region.work_pool}, for {egress:.2f} USD of egress"
            passed_over[region.name] = f"would cost {egress:.2f} USD for reading the checkpoints from another region"
            continue
        environment = {REGION_VARIABLE: region.name, **variables.get("env", {})}
        if egress:  # the job checks the limit again
            environment[MAX_EGRESS_VARIABLE] = str(max_egress_usd)
        variables |= {"env": environment}
        price = price_per_hour(region, resources)
        return WorkPoolChoice(region.work_pool, region, variables, egress, price, passed_over)
    if impossible is not None and all(reason.startswith("cannot: ") for reason in passed_over.values()):
        raise impossible
    raise NoUsableWorkPool(
        expected=f"a work pool that starts a flow run now, for {described(resources)}",
        found="; ".join(f"{name} {reason}" for name, reason in passed_over.items()),
        remedy=(f"nearest: {nearest}; " if nearest else "")
        + "resume a work pool, start a worker for it, wait, allow more regions, or raise the limit for egress "
        f"(now {max_egress_usd:.2f} USD)",
    )


def job_variables(resources: ResourceConfig, region: Region) -> dict[str, Any]:
    """Returns the variables that give a flow run the resources of a replica; its pool runs on the same machine.

    A job of a work pool cannot hold a slice of several VMs: if the region has a cluster, the flow run gets a machine
    without accelerators, and submits its replicas to the cluster. Of several TPU types, the first that the region
    offers is taken. Several replicas of a single machine share it.
    """
    resources = region.offered(resources) or resources.choices[0]
    shares_a_slice = isinstance(resources.device, TpuConfig) and resources.replicas > 1
    if resources.hosts_per_replica > 1 or shares_a_slice:
        if region.backend_url is None:
            raise _too_large(resources, region)
        coordinator = resources.model_copy(
            update={
                "device": CpuConfig(),
                "cpu": _COORDINATOR_CORES,
                "ram": f"{_COORDINATOR_MEMORY // _GIB}g",
                "replicas": 1,
                "preemptible": False,
            }
        )
        return _on_single_machine(coordinator, region, "orchestrator") | {"env": {"ASSAY_JOBS": region.backend_url}}
    return _on_single_machine(resources, region, _IMAGE_KINDS[resources.device.kind])


def _on_single_machine(resources: ResourceConfig, region: Region, kind: ImageKind) -> dict[str, Any]:
    named = resources.image or region.images.get(kind)
    image = {"image": named} if named else {}
    match region.work_pool_type:
        case "process":
            return {}
        case "kubernetes":
            return image | _kubernetes(resources.model_copy(update={"regions": (region.name,)}))
        case "cloud-run-v2":
            return image | {"region": region.name} | _cloud_run(resources)
        case "vertex-ai":
            return image | {"region": region.name} | _vertex_ai(resources)


def _kubernetes(resources: ResourceConfig) -> dict[str, Any]:
    placed = placement(resources)
    share = resources.replicas  # engines that share a node
    variables: dict[str, Any] = {
        "cpu": str(resources.cpu * share),
        "memory": str(size_in_bytes(resources.ram) * share),
        "disk": str(size_in_bytes(resources.disk) * share),
        "node_selector": placed.node_selector,
        "affinity": placed.affinity,
        "tolerations": placed.tolerations,
    }
    if GPU_RESOURCE in placed.limits:
        variables["gpus"] = int(placed.limits[GPU_RESOURCE]) * share
    if TPU_RESOURCE in placed.limits:
        variables["tpu_chips"] = int(placed.limits[TPU_RESOURCE])
    return {name: value for name, value in variables.items() if value}


def _cloud_run(resources: ResourceConfig) -> dict[str, Any]:
    cores, memory = resources.cpu * resources.replicas, size_in_bytes(resources.ram) * resources.replicas
    variables: dict[str, Any] = {}
    match resources.device:
        case TpuConfig(variant=variant):
            raise _beyond("Cloud Run", variant, "1 L4, or no accelerator")
        case GpuConfig(variant=variant, count=count):
            if gpu_model(variant) not in ("L4", "AUTO") or count * resources.replicas != 1:
                raise _beyond("Cloud Run", f"{count * resources.replicas} x {variant}", "1 L4")
            cores, memory = max(cores, _CLOUD_RUN_GPU_CORES), max(memory, _CLOUD_RUN_GPU_MEMORY)
            variables = {"gpus": "1", "node_selector": {"accelerator": "nvidia-l4"}}
        case CpuConfig():
            pass
    fitting = [size for size in _CLOUD_RUN_CORES if size >= cores]
    if not fitting or memory > _CLOUD_RUN_MEMORY:
        request = f"{cores} cores and {memory / _GIB:g} GiB"
        raise _beyond("Cloud Run", request, f"{_CLOUD_RUN_CORES[-1]} cores and {_CLOUD_RUN_MEMORY // _GIB} GiB")
    return variables | {"cpu": f"{fitting[0] * 1000}m", "memory": f"{max(1, -(-memory // _GIB))}Gi"}


def _vertex_ai(resources: ResourceConfig) -> dict[str, Any]:
    share = resources.replicas
    cores, memory = resources.cpu * share, size_in_bytes(resources.ram) * share
    variables: dict[str, Any] = {"boot_disk_size_gb": max(100, -(-size_in_bytes(resources.disk) * share // 10**9))}
    if resources.preemptible:
        variables["scheduling"] = {"strategy": "SPOT"}
    model, gpus, requested = "", 0, ""
    match resources.device:
        case TpuConfig(variant=variant) as tpu:
            if variant not in _TPU_MACHINES:
                raise _beyond("Vertex AI", variant, ", ".join(_TPU_MACHINES))
            return variables | {"machine_type": _TPU_MACHINES[variant], "tpu_topology": tpu_shape(tpu)}
        case GpuConfig(variant=variant, count=count):
            model, gpus = "T4" if variant == "auto" else gpu_model(variant), count * share
            requested = f"{gpus} x {variant} with "
        case CpuConfig():
            pass
    fitting = [
        machine
        for machine in _MACHINES
        if machine.model == model
        and machine.gpus >= gpus
        and machine.cores >= cores
        and machine.memory_gib * _GIB >= memory
    ]
    if not fitting:
        models = [model] if model in ("", *_GPU_TYPES) else _GPU_TYPES
        largest = [max((m for m in _MACHINES if m.model == model), key=lambda m: m.memory_gib) for model in models]
        request = f"{requested}{cores} cores and {memory / _GIB:g} GiB"
        raise _beyond("Vertex AI", request, ", ".join(map(str, largest)))
    machine = min(fitting, key=lambda machine: (machine.memory_gib, machine.cores))
    accelerators = {"accelerator_type": _GPU_TYPES[model], "accelerator_count": machine.gpus} if gpus else {}
    return variables | {"machine_type": machine.name} | accelerators


def _beyond(service: str, request: str, nearest: str) -> UnsatisfiableResources:
    return UnsatisfiableResources(
        expected=f"resources that a job of {service} can have",
        found=request,
        remedy=f"nearest: {nearest}; or use a work pool of type kubernetes",
    )


def _too_large(resources: ResourceConfig, region: Region) -> UnsatisfiableResources:
    tpu, machines = resources.device, resources.hosts_per_replica
    kind, nearest = ("replicas", "1 machine for each")
    if isinstance(tpu, TpuConfig):
        kind, nearest = tpu.variant, f"1 {largest_single_vm_slice(tpu.variant)}"
    return UnsatisfiableResources(
        expected=f"replicas that a job of the work pool {region.work_pool} can hold, or a cluster in {region.name}",
        found=f"{resources.replicas} x {kind}, {machines} {'VMs' if isinstance(tpu, TpuConfig) else 'machines'} each, "
        f"and no ray_address or iris_address for {region.name}",
        remedy=f"nearest: {nearest}; or {where_to_write(region.name, ADDRESS_LINE)}",
    )
