"""Placement of a replica: translates `ResourceConfig` into Kubernetes requests and GKE's node labels.

Source of the labels: GKE's documentation of GPUs, TPUs and Spot VMs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resources.config import CpuConfig, Device, GpuConfig, ResourceConfig, TpuConfig, size_in_bytes
from resources.errors import UnsatisfiableResources
from resources.gke import TPU_NAMES, gpu_label

GPU_RESOURCE, TPU_RESOURCE = "nvidia.com/gpu", "google.com/tpu"
GPU_LABEL = "cloud.google.com/gke-accelerator"
TPU_LABEL = "cloud.google.com/gke-tpu-accelerator"
TPU_TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-topology"
NODE_POOL_LABELS = frozenset(
    {
        "cloud.google.com/gke-nodepool",
        "eks.amazonaws.com/nodegroup",
        "karpenter.sh/nodepool",
        "kubernetes.azure.com/agentpool",
    }
)
"""Labels of node pools, which may grow: of GKE, EKS, Karpenter and AKS."""
_REGION_LABEL, _ZONE_LABEL = "topology.kubernetes.io/region", "topology.kubernetes.io/zone"
_CHEAP_LABELS = ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")

_FLAT_TOPOLOGIES = {
    1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16",
}  # fmt: skip
_CUBE_CHIPS = 4**3


@dataclass(frozen=True)
class Placement:
    """Resource requests and node constraints of a replica's pods."""

    limits: dict[str, str]
    """Requests, equal to the limits, per pod."""
    vms: int = 1
    """Pods per replica: the number of VMs of its TPU slice, else 1."""
    node_selector: dict[str, str] = field(default_factory=dict)
    affinity: dict[str, Any] = field(default_factory=dict)
    tolerations: list[dict[str, str]] = field(default_factory=list)

    @property
    def node_resource(self) -> str | None:
        """Returns the extended resource that a node must have, or None."""
        return next((name for name in (GPU_RESOURCE, TPU_RESOURCE) if name in self.limits), None)


def placement(resources: ResourceConfig) -> Placement:
    """Returns the requests and node constraints of a replica's pods."""
    limits = {
        "cpu": str(resources.cpu),
        "memory": str(size_in_bytes(resources.ram)),
        "ephemeral-storage": str(size_in_bytes(resources.disk)),
    }
    selector: dict[str, str] = {}
    vms = 1
    match resources.device:
        case CpuConfig():
            pass
        case GpuConfig(variant=variant, count=count):
            limits[GPU_RESOURCE] = str(count)
            selector |= {} if variant == "auto" else {GPU_LABEL: gpu_label(variant)}
        case TpuConfig() as tpu:
            if tpu.alternatives:
                raise UnsatisfiableResources(
                    expected="a single TPU type: a pod names the labels of its nodes before it knows them",
                    found=" or ".join(tpu.types),
                    remedy="Ask for one of them, or submit to Ray or Iris, which choose.",
                )
            vms = tpu.slice.vms
            limits[TPU_RESOURCE] = str(tpu.slice.chips_per_vm)
            selector |= {TPU_LABEL: TPU_NAMES[tpu.slice.generation], TPU_TOPOLOGY_LABEL: tpu_shape(tpu)}
    tolerated = [name for name in (GPU_RESOURCE, TPU_RESOURCE) if name in limits]
    tolerated += _CHEAP_LABELS if resources.preemptible else ()
    return Placement(
        limits=limits,
        vms=vms,
        node_selector=selector,
        affinity=_affinity(resources),
        tolerations=[{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in tolerated],
    )


def require_node(where: Placement, nodes: Sequence[Mapping[str, Any]], *, device: Device) -> None:
    """Raises if no node has the device, unless nodes come in pools, which may grow from zero nodes."""
    for node in nodes:
        tags, gives = node["metadata"].get("labels", {}), node.get("status", {}).get("allocatable", {})
        resource = where.node_resource
        enough = resource is None or int(gives.get(resource, "0")) >= int(where.limits[resource])
        if not NODE_POOL_LABELS.isdisjoint(tags) or (enough and where.node_selector.items() <= tags.items()):
            return
    raise UnsatisfiableResources(
        expected=f"a node with {where.node_resource} and the labels {where.node_selector or 'of any kind'}",
        found=f"none for {device.kind} {getattr(device, 'variant', '')}, and no node pools that could grow",
        remedy="Add such nodes or their labels, or ask for another device.",
    )


def tpu_shape(tpu: TpuConfig) -> str:
    """Returns the topology of a slice as in GKE's node labels: the given topology, else the usual for its size."""
    if tpu.topology:
        return tpu.topology
    chips = tpu.slice.chips
    if tpu.slice.generation in {"v5litepod", "v6e"}:
        if chips not in _FLAT_TOPOLOGIES:
            raise UnsatisfiableResources(
                expected="a TPU slice that GKE has nodes for",
                found=f"{tpu.variant}, {chips} chips",
                remedy=f"Ask for one of {', '.join(map(str, _FLAT_TOPOLOGIES))} chips.",
            )
        return _FLAT_TOPOLOGIES[chips]
    if chips == 4:
        return "2x2x1"
    # As near to a cube as possible, the longer sides last; composed of 4x4x4 cubes from 64 chips on.
    unit, count = (4, chips // _CUBE_CHIPS) if chips >= _CUBE_CHIPS else (1, chips)
    sides = [side for side in range(1, count + 1) if count % side == 0]
    shapes = [(a, b, count // (a * b)) for a in sides for b in sides if b >= a and count % (a * b) == 0]
    return "x".join(str(unit * side) for side in min((shape for shape in shapes if shape[2] >= shape[1]), key=sum))


def _affinity(resources: ResourceConfig) -> dict[str, Any]:
    required: list[dict[str, Any]] = []
    preferred: list[dict[str, Any]] = []
    if resources.preemptible:
        preferred.append(_preference(50, _CHEAP_LABELS[0], "true"))
    else:
        required += [{"key": label, "operator": "DoesNotExist"} for label in _CHEAP_LABELS]
    if resources.regions:
        required.append({"key": _REGION_LABEL, "operator": "In", "values": list(resources.regions)})
        best_first = resources.regions[:10] if len(resources.regions) > 1 else ()
        preferred += [_preference(100 - 10 * rank, _REGION_LABEL, region) for rank, region in enumerate(best_first)]
    if resources.zone:
        required.append({"key": _ZONE_LABEL, "operator": "In", "values": [resources.zone]})
    rules: dict[str, Any] = {}
    if required:
        rules["requiredDuringSchedulingIgnoredDuringExecution"] = {
            "nodeSelectorTerms": [{"matchExpressions": required}]
        }
    if preferred:
        rules["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    return {"nodeAffinity": rules} if rules else {}


def _preference(weight: int, label: str, value: str) -> dict[str, Any]:
    return {"weight": weight, "preference": {"matchExpressions": [{"key": label, "operator": "In", "values": [value]}]}}
