"""Names of GPUs and TPUs on Google Kubernetes Engine, as its nodes are labelled; source: GKE's documentation."""

from __future__ import annotations

import math
import re
from difflib import get_close_matches

from resources.config import CpuConfig, Device, GpuConfig, TpuConfig
from resources.errors import UnsatisfiableResources
from resources.tpu import TPU_TOPOLOGIES, canonical_variant

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
    label = _as_label(name)
    known = [*GPU_NAMES.values(), *TPU_NAMES.values()]
    if label in known or canonical_variant(label) in TPU_TOPOLOGIES:
        return label
    if label not in GPU_NAMES:
        near = get_close_matches(label, [*known, *GPU_NAMES, *TPU_TOPOLOGIES], n=3)
        raise UnsatisfiableResources(
            expected="an accelerator that GKE has",
            found=repr(name),
            remedy=f"use one of {', '.join(near or sorted(set(known)))}",
        )
    return GPU_NAMES[label]


def gpu_label(variant: str) -> str:
    """Returns the label's value of a GPU model; values `nvidia-…` unchanged, since other clusters have own models."""
    label = _as_label(variant)
    if label not in GPU_NAMES and not label.startswith("nvidia-"):
        raise UnsatisfiableResources(
            expected=f"a GPU model that nodes are labelled with: {', '.join(GPU_NAMES)}, or a label's value nvidia-…",
            found=repr(variant),
            remedy='Choose one of those, or "auto" for any GPU that a node has.',
        )
    return GPU_NAMES.get(label, label)


def _as_label(name: str) -> str:
    return name.strip().lower().replace("_", "-").removeprefix("nvidia ").replace(" ", "-")


def _tpu_of(label: str, *, count: int | None, topology: str | None) -> TpuConfig:
    tpu = TPU_TOPOLOGIES.get(canonical_variant(label))
    if tpu is None:
        family = next(family for family, gke in TPU_NAMES.items() if gke == label)
        shape = topology if topology is not None and re.fullmatch(r"\d+(x\d+)*", topology) else None
        chips = math.prod(map(int, shape.split("x"))) if shape else count
        same = [known for known in TPU_TOPOLOGIES.values() if known.generation == family]
        tpu = next((known for known in same if known.chips == chips), None)
        if tpu is None:
            raise UnsatisfiableResources(
                expected=f"{label} with its topology, such as 2x2, or with the count of its chips",
                found=f"topology {topology}, count {count}",
                remedy=f"use one of {', '.join(str(known.chips) for known in same if known.vms == 1)} chips",
            )
    if count not in (None, tpu.chips):
        raise UnsatisfiableResources(
            expected=f"a count of {tpu.chips}, the chips of {tpu.variant}", found=str(count), remedy="leave count out"
        )
    return TpuConfig(variant=tpu.variant, topology=topology)
