"""TPU slices of a Ray cluster: their types, their states, and the environment variables of their hosts.

A slice is claimed whole: all chips of all its hosts, and the resource `TPU-<type>-head` of its first host, which other
programs (including Ray's own libraries) claim too. Ray labels the hosts, but a single-host slice may lack the label
with the slice's name, so the type is always checked: a request for a single host never gets a part of a larger slice.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from resources.backends.ray.nodes import RayNode, room
from resources.config import TpuConfig
from resources.tpu import TpuTopology, canonical_variant

_SLICE_LABEL = "ray.io/tpu-slice-name"
_WORKER_LABEL = "ray.io/tpu-worker-id"
_TYPE_LABEL = "ray.io/tpu-pod-type"
_TOPOLOGY_LABEL = "ray.io/tpu-topology"
_HEAD_RESOURCE = re.compile(r"TPU-(.+)-head")
_MEGASCALE_PORT = 8081
_ROUNDING = 1e-6


class SliceState(StrEnum):
    """Obstacle to a claim of a slice, if any."""

    FREE = "free"
    TAKEN = "taken"
    INCOMPLETE = "incomplete"
    CROWDED = "short of CPUs or memory at the moment"


@dataclass(frozen=True, kw_only=True)
class TpuSlice:
    """A TPU slice as its nodes describe it."""

    name: str
    topology: TpuTopology
    """Topology of the type by Google's tables."""
    hosts: tuple[RayNode, ...]
    """Living hosts, in the order of their worker ids."""

    @property
    def region(self) -> str | None:
        return self.hosts[0].region

    @property
    def chips(self) -> int:
        return round(sum(host.total.get("TPU", 0.0) for host in self.hosts))

    @property
    def whole(self) -> bool:
        """Returns True if all chips are present and each host is listed once; Ray may list a restarted host twice."""
        return self.chips == self.topology.chips and [_worker(host) for host in self.hosts] == list(
            range(len(self.hosts))
        )

    def claim(self, host: int) -> dict[str, float]:
        """Returns the resources to claim on a host in addition to CPU and memory."""
        node = self.hosts[host]
        return {"TPU": node.total["TPU"], **{name: 1.0 for name in node.total if _HEAD_RESOURCE.fullmatch(name)}}

    def state(self, share: Mapping[str, float]) -> SliceState:
        """Returns FREE if it can be claimed now with this share of CPU and memory per host, else the obstacle."""
        if not self.whole or any(host.draining for host in self.hosts):
            return SliceState.INCOMPLETE
        for index, host in enumerate(self.hosts):
            if any(host.free.get(name, 0.0) + _ROUNDING < amount for name, amount in self.claim(index).items()):
                return SliceState.TAKEN
        if any(room([host.free], share) < 1 for host in self.hosts):
            return SliceState.CROWDED
        return SliceState.FREE


def slices_of(nodes: Iterable[RayNode], tpu: TpuConfig) -> list[TpuSlice]:
    """Returns all slices of the requested type, in any state, by name."""
    return [
        TpuSlice(name=name, topology=tpu.slice, hosts=tuple(sorted(hosts, key=_worker)))
        for name, hosts in sorted(_by_slice(nodes).items())
        if _types(hosts) == {tpu.variant}
        and (tpu.topology is None or {host.labels.get(_TOPOLOGY_LABEL) for host in hosts} == {tpu.topology})
    ]


def choose_slices(
    nodes: Iterable[RayNode], tpu: TpuConfig, count: int, *, share: Mapping[str, float], regions: Sequence[str] = ()
) -> list[TpuSlice] | None:
    """Returns free slices in the best region that has enough of them, or None if no region has.

    Slices of a job communicate over the data centre's network, which does not reach other regions.
    """
    by_region: dict[str | None, list[TpuSlice]] = defaultdict(list)
    for tpu_slice in slices_of(nodes, tpu):
        if tpu_slice.state(share) is SliceState.FREE:
            by_region[tpu_slice.region].append(tpu_slice)
    enough = [region for region, free in by_region.items() if len(free) >= count]
    if not enough:
        return None
    best = min(enough, key=lambda name: (regions.index(name) if name in regions else len(regions), name or ""))
    return by_region[best][:count]


def most_per_region(slices: Iterable[TpuSlice]) -> int:
    """Returns the largest number of slices, in any state, that a region has."""
    return max(Counter(tpu_slice.region for tpu_slice in slices).values(), default=0)


def describe_slices(nodes: Sequence[RayNode], tpu: TpuConfig, *, share: Mapping[str, float]) -> str:
    """Returns the formatted number and states of a type's slices: `2 slices in the cluster, both taken`."""
    slices = slices_of(nodes, tpu)
    if not slices:
        return "none in the cluster at present"
    states = Counter(tpu_slice.state(share) for tpu_slice in slices)
    total = f"{len(slices)} slice{'' if len(slices) == 1 else 's'} in the cluster"
    if len(states) == 1:
        (state,) = states
        every = {1: "", 2: "both "}.get(len(slices), "all ")
        return f"{total}, {every}{state}{_missing(slices)}"
    counted = ", ".join(f"{states[state]} {state}" for state in SliceState if states[state])
    return f"{total}: {counted}{_missing(slices)}"


def tpu_types(nodes: Iterable[RayNode]) -> Counter[str]:
    """Returns the number of slices in the cluster by type."""
    return Counter(next(iter(types)) for hosts in _by_slice(nodes).values() if len(types := _types(hosts)) == 1)


def head_resource(variant: str) -> str:
    """Returns the name of the resource that the first host of each slice of this type has once."""
    return f"TPU-{variant}-head"


def slice_variables(slices: Sequence[TpuSlice], replica: int, host: int) -> dict[str, str]:
    """Returns libtpu's environment variables for a host of these slices; several slices work together."""
    own = slices[replica]
    variables: dict[str, str] = {}
    if len(own.hosts) > 1:
        variables["TPU_WORKER_ID"] = str(host)
        variables["TPU_WORKER_HOSTNAMES"] = ",".join(node.address for node in own.hosts)
    if len(slices) > 1:
        variables["MEGASCALE_COORDINATOR_ADDRESS"] = f"{slices[0].hosts[0].address}:{_MEGASCALE_PORT}"
        variables["MEGASCALE_PORT"] = str(_MEGASCALE_PORT)
        variables["MEGASCALE_NUM_SLICES"] = str(len(slices))
        variables["MEGASCALE_SLICE_ID"] = str(replica)
    return variables


def _by_slice(nodes: Iterable[RayNode]) -> dict[str, list[RayNode]]:
    groups: dict[str, list[RayNode]] = defaultdict(list)
    for node in nodes:
        if node.total.get("TPU", 0.0) > 0:
            groups[node.labels.get(_SLICE_LABEL) or node.node_id].append(node)
    return groups


def _worker(node: RayNode) -> int:
    label = node.labels.get(_WORKER_LABEL, "")
    return int(label) if label.isdecimal() else 0


def _types(hosts: Iterable[RayNode]) -> set[str]:
    named = {label for host in hosts if (label := host.labels.get(_TYPE_LABEL))}
    heads = {match[1] for host in hosts for resource in host.total if (match := _HEAD_RESOURCE.fullmatch(resource))}
    return {canonical_variant(name) for name in named or heads}


def _missing(slices: Sequence[TpuSlice]) -> str:
    broken = next((tpu_slice for tpu_slice in slices if not tpu_slice.whole), None)
    if broken is None:
        return ""
    workers = ", ".join(str(_worker(host)) for host in broken.hosts)
    return (
        f" ({broken.name} has {broken.chips} of {broken.topology.chips} chips, on worker"
        f"{'' if len(broken.hosts) == 1 else 's'} {workers})"
    )
