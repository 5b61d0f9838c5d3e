"""Placement of a replica: translates `ResourceConfig` into Kubernetes requests and GKE's node labels.

Source of the labels: GKE's documentation of GPUs, TPUs and Spot VMs.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resources.config import CpuConfig, Device, GpuConfig, ResourceConfig, TpuConfig, size_in_bytes
from resources.errors import UnsatisfiableResources
from resources.tpu import TPU_TOPOLOGIES, canonical_variant

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

GPU_NAMES = {
    "t4": "nvidia-tesla-t4",
    "p4": "nvidia-tesla-p4",
    "p100": "nvidia-tesla-p100",
    "v100": "nvidia-tesla-v100",
    "l4": "nvidia-l4",
    "a100": "nvidia-tesla-a100",
    "a100-40gb": "nvidia-tesla-a100",
    "a100-80gb": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h100-80gb": "nvidia-h100-80gb",
    "h100-mega": "nvidia-h100-mega-80gb",
    "h200": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
    "gb200": "nvidia-gb200",
    "rtx-pro-6000": "nvidia-rtx-pro-6000",
}
"""GKE's name of each GPU model."""
TPU_NAMES = {
    "v4": "tpu-v4-podslice",
    "v5litepod": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
}
"""GKE's name of each TPU generation."""
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
            selector |= {} if variant == "auto" else {GPU_LABEL: _gpu_name(variant)}
        case TpuConfig() as tpu:
            if tpu.alternatives:
                raise UnsatisfiableResources(
                    expected="a single TPU type: a pod names the labels of its nodes before it knows them",
                    found=" or ".join(tpu.types),
                    remedy="Ask for one of them, or submit to Ray or Iris, which choose.",
                )
            vms = tpu.slice.vms
            limits[TPU_RESOURCE] = str(tpu.slice.chips_per_vm)
            selector |= {TPU_LABEL: TPU_NAMES[tpu.variant.split("-")[0]], TPU_TOPOLOGY_LABEL: tpu_shape(tpu)}
    tolerated = [name for name in (GPU_RESOURCE, TPU_RESOURCE) if name in limits]
    tolerated += _CHEAP_LABELS if resources.preemptible else ()
    return Placement(
        limits=limits,
        vms=vms,
        node_selector=selector,
        affinity=_affinity(resources),
        tolerations=[{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in tolerated],
    )


def gke_device(name: str | None, *, count: int | None = None, topology: str | None = None) -> Device:
    """Returns the device of a pod from a GPU's model, GKE's name, or the name of a TPU slice; a CPU without a name.

    Names are such as nvidia-tesla-t4, T4, tpu-v6e-slice or v6e-4. `count` is that of GPUs, or of the slice's chips.
    """
    if name is None:
        return CpuConfig()
    label = accelerator_label(name)
    if label in GPU_NAMES.values():
        return GpuConfig(variant=label, count=count or 1)
    tpu = _tpu_of(label, count=count, topology=topology)
    if tpu.slice.vms > 1:
        raise UnsatisfiableResources(
            expected="a TPU slice of a single VM, which fits a pod",
            found=f"{tpu.variant} with {tpu.slice.vms} VMs",
            remedy="take a smaller slice, or evaluate over a pool on a cluster",
        )
    return tpu


def accelerator_label(name: str) -> str:
    """Returns GKE's name of a GPU from its model or GKE's name; names of TPUs and of slices unchanged."""
    label = name.strip().lower().replace("_", "-").removeprefix("nvidia ").replace(" ", "-")
    known = [*GPU_NAMES.values(), *TPU_NAMES.values()]
    if label in known or canonical_variant(label) in TPU_TOPOLOGIES:
        return label
    if label not in GPU_NAMES:
        near = difflib.get_close_matches(label, [*known, *GPU_NAMES, *TPU_TOPOLOGIES], n=3)
        raise UnsatisfiableResources(
            expected="an accelerator that GKE has",
            found=repr(name),
            remedy=f"use one of {', '.join(near or sorted(set(known)))}",
        )
    return GPU_NAMES[label]


def _tpu_of(label: str, *, count: int | None, topology: str | None) -> TpuConfig:
    tpu = TPU_TOPOLOGIES.get(canonical_variant(label))
    if tpu is None:
        family = next(family for family, gke in TPU_NAMES.items() if gke == label)
        shape = topology if topology is not None and re.fullmatch(r"\d+(x\d+)*", topology) else None
        chips = math.prod(map(int, shape.split("x"))) if shape else count
        same = [known for known in TPU_TOPOLOGIES.values() if known.variant.split("-")[0] == family]
        tpu = next((known for known in same if known.chips == chips), None)
        if tpu is None:
            raise UnsatisfiableResources(
                expected=f"{label} with its topology, such as 2x2, or with the count of its chips",
                found=f"topology {topology}, count {count}",
                remedy=f"use one of {', '.join(str(known.chips) for known in same if known.vms == 1)} chips",
            )
    if count not in (None, tpu.chips):
        raise UnsatisfiableResources(
            expected=f"a count of {tpu.chips}, the chips of {tpu.variant}",
            found=str(count),
            remedy="leave count out",
        )
    return TpuConfig(variant=tpu.variant, topology=topology)


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
    if tpu.variant.split("-")[0] in {"v5litepod", "v6e"}:
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


def _gpu_name(variant: str) -> str:
    name = variant.strip().lower().replace("_", "-").removeprefix("nvidia ").replace(" ", "-")
    if name in GPU_NAMES:
        return GPU_NAMES[name]
    if name.startswith("nvidia-"):  # a label's value: clusters outside of GKE have their own models
        return name
    raise UnsatisfiableResources(
        expected=f"a GPU model that nodes are labelled with: {', '.join(GPU_NAMES)}, or a label's value nvidia-…",
        found=repr(variant),
        remedy='Choose one of those, or "auto" for any GPU that a node has.',
    )


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
    return {
        "weight": weight,
        "preference": {"matchExpressions": [{"key": label, "operator": "In", "values": [value]}]},
    }
