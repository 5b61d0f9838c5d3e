"""The TPU slices that Google Cloud offers: the number of chips, hosts and VMs for each name.

Source: the Cloud TPU configuration tables as Levanter and Marin use them. A v4 or v5p name counts TensorCores (two per
chip); a v5litepod or v6e name counts chips.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from resources.errors import BadInput


@dataclass(frozen=True)
class TpuTopology:
    """A slice: `chips` in total, over `hosts` machines that run `vms` VMs with `chips_per_vm` chips each."""

    variant: str
    chips: int
    hosts: int
    vms: int
    chips_per_vm: int

    @property
    def generation(self) -> str:
        """Returns the beginning of its name: v5litepod for v5litepod-16."""
        return self.variant.partition("-")[0]


TPU_TYPE_VARIABLE = "ASSAY_TPU_TYPE"
"""Variable with the type of a job's slice, set for its processes if the backend knows it."""


def tpu_type_in(variables: Mapping[str, str]) -> str | None:
    """Returns the slice type of a process with these variables; None if neither backend nor machine sets it."""
    return variables.get(TPU_TYPE_VARIABLE) or variables.get("TPU_ACCELERATOR_TYPE") or None


_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_CUBE_CORES = 128
# Slices of these generations consist of any number of cubes of 4x4x4 chips, up to these TensorCores.
_MOST_CORES = {"v4": 8192, "v5p": 12288}


def _by_cores(family: str, cores: int) -> TpuTopology:
    chips = cores // 2
    return TpuTopology(f"{family}-{cores}", chips, chips // 4, chips // 4, 4)


def _by_chips(family: str, chips: int, *, per_host: int) -> TpuTopology:
    if chips <= 8:
        return TpuTopology(f"{family}-{chips}", chips, 1, 1, chips)
    # A v5e host carries eight chips, but is split into two VMs of four.
    return TpuTopology(f"{family}-{chips}", chips, chips // per_host, chips // 4, 4)


_TABLE = (
    *(_by_cores("v4", cores) for cores in _SIZES),
    *(_by_cores("v5p", cores) for cores in (*_SIZES, 12288)),
    *(_by_chips("v5litepod", chips, per_host=8) for chips in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    *(_by_chips("v6e", chips, per_host=4) for chips in (1, 4, 8, 16, 32, 64, 128, 256)),
)

CORES_PER_CHIP = {"v4": 60, "v5litepod": 24, "v5p": 52, "v6e": 22}
"""vCPUs per chip of the smallest VM of each generation."""
GIB_PER_CHIP = {"v4": 100, "v5litepod": 44, "v5p": 112, "v6e": 170}
"""Memory (GiB) per chip of the smallest VM of each generation."""

TPU_TOPOLOGIES: dict[str, TpuTopology] = {topology.variant: topology for topology in _TABLE}
"""The usual slices by name; `tpu_topology` accepts all valid names."""


def canonical_variant(name: str) -> str:
    """Returns the table's spelling of a slice name: `v5e-16` and `V5litePod-16` are both `v5litepod-16`."""
    lowered = name.strip().lower()
    return f"v5litepod-{lowered.removeprefix('v5e-')}" if lowered.startswith("v5e-") else lowered


def largest_single_vm_slice(variant: str) -> str:
    """Returns the largest single-VM slice of a slice's generation."""
    generation = tpu_topology(variant).generation
    alike = [known for known in TPU_TOPOLOGIES.values() if known.vms == 1 and known.generation == generation]
    return max(alike, key=lambda known: known.chips).variant


def tpu_topology(name: str) -> TpuTopology:
    """Returns the topology of a slice."""
    variant = canonical_variant(name)
    if variant in TPU_TOPOLOGIES:
        return TPU_TOPOLOGIES[variant]
    family, _, size = variant.partition("-")
    most = _MOST_CORES.get(family, 0)
    if size.isdecimal() and 0 < int(size) <= most and int(size) % _CUBE_CORES == 0:
        return _by_cores(family, int(size))
    near = [known for known in TPU_TOPOLOGIES if known.split("-")[0] == family]
    near = near or difflib.get_close_matches(variant, TPU_TOPOLOGIES, n=4, cutoff=0.4)
    cubes = f", or a multiple of {_CUBE_CORES} up to {most}" if most else ""
    raise BadInput(
        expected="a TPU type that Google Cloud offers",
        found=f"Unknown TPU type {name!r}",
        remedy=f"use one of {', '.join(near or sorted({v.split('-')[0] + '-N' for v in TPU_TOPOLOGIES}))}{cubes}",
    )
