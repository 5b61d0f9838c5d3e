"""Nodes and TPU slices of a Ray cluster as plain values: resources, their free part, and the shares that fit.

A slice is claimed whole: all chips of all its hosts, and the resource `TPU-<type>-head` of its first host, which other
programs (including Ray's own libraries) claim too. Ray labels the hosts, but a single-host slice may lack the label
with the slice's name, so the type is always checked: a request for a single host never gets a part of a larger slice.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from resources.config import TpuConfig
from resources.tpu import TpuTopology, canonical_variant

REGION_LABEL = "ray.io/availability-region"
ZONE_LABEL = "ray.io/availability-zone"
NODE_LABEL = "ray.io/node-id"
_MARKET_LABEL = "ray.io/market-type"
_GROUP_LABEL = "ray.io/node-group"
_HEAD_RESOURCE = "node:__internal_head__"
_GPU_TYPE_PREFIX = "accelerator_type:"
_AUTOSCALER_STATUS = "__autoscaling_status"
_STATIC_NODE_TYPE_PREFIX = "node_"  # prefix of node types in clusters without an autoscaler
_ROUNDING = 1e-6  # Ray counts in ten-thousandths; sums of them are floats
_SLICE_LABEL = "ray.io/tpu-slice-name"
_WORKER_LABEL = "ray.io/tpu-worker-id"
_TYPE_LABEL = "ray.io/tpu-pod-type"
_TOPOLOGY_LABEL = "ray.io/tpu-topology"
_SLICE_HEAD = re.compile(r"TPU-(.+)-head")
_MEGASCALE_PORT = 8081


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A living node."""

    node_id: str
    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    total: Mapping[str, float] = field(default_factory=dict)
    """Resources by Ray's names: CPU, GPU, TPU, memory (bytes), and those defined by the cluster."""
    free: Mapping[str, float] = field(default_factory=dict)
    """Currently unused part of the resources."""
    draining: bool = False
    """True if the node is about to be removed and takes no new work."""

    @property
    def region(self) -> str | None:
        return self.labels.get(REGION_LABEL)

    @property
    def stays(self) -> bool:
        """Returns True for nodes that are not preemptible: the cluster's head, and nodes labelled on-demand."""
        return _HEAD_RESOURCE in self.total or self.labels.get(_MARKET_LABEL) == "on-demand"

    @property
    def gpu_types(self) -> set[str]:
        """Returns its GPU types by Ray's names, such as H100."""
        return {name.removeprefix(_GPU_TYPE_PREFIX) for name in self.total if name.startswith(_GPU_TYPE_PREFIX)}


def read_nodes(ray: Any) -> list[RayNode]:
    """Returns the living nodes of the cluster by id; through a Ray client all their resources count as free."""
    connected = not ray.util.client.ray.is_connected()
    free = ray._private.state.available_resources_per_node() if connected else {}
    draining = ray._private.state.state.get_draining_nodes() if connected else {}
    nodes = [
        RayNode(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            labels=node.get("Labels") or {},
            total=node["Resources"],
            # A new node is listed before its first report of free resources.
            free=free.get(node["NodeID"], node["Resources"]),
            draining=node["NodeID"] in draining,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.node_id)


def has_autoscaler(ray: Any, nodes: Iterable[RayNode]) -> bool:
    """Returns True if the cluster may get more nodes, by labels of node groups and names of node types."""
    if any(_GROUP_LABEL in node.labels for node in nodes):
        return True
    status = ray.experimental.internal_kv._internal_kv_get(_AUTOSCALER_STATUS)
    report = (json.loads(status).get("autoscaler_report") or {}) if status else {}
    return any(not name.startswith(_STATIC_NODE_TYPE_PREFIX) for name in report.get("active_nodes") or {})


def room(resources: Iterable[Mapping[str, float]], share: Mapping[str, float]) -> int:
    """Returns the number of shares that fit into nodes with these resources, each share on a single node."""
    return sum(
        min(int((have.get(name, 0.0) + _ROUNDING) / amount) for name, amount in share.items()) for have in resources
    )


def gpu_type_resource(nodes: Iterable[RayNode], variant: str) -> str:
    """Returns the resource name for GPUs of this type, spelled as on the nodes if any has it."""
    names = {name for node in nodes for name in node.gpu_types}
    model = variant.lower().removeprefix("nvidia-")
    return next(
        (_GPU_TYPE_PREFIX + name for name in sorted(names) if name.lower() == model), _GPU_TYPE_PREFIX + variant
    )


def share_text(share: Mapping[str, float]) -> str:
    """Returns a formatted share: `4 CPUs, 8 GiB of memory`."""
    return ", ".join(_amount(name, f"{_scaled(name, amount):g}", amount) for name, amount in share.items())


def total_text(node: RayNode, share: Mapping[str, float]) -> str:
    """Returns a node's formatted totals of a share's resources: `8 CPUs, 23 GiB of memory`."""
    return share_text({name: node.total.get(name, 0.0) for name in share if not name.startswith(_GPU_TYPE_PREFIX)})


def free_text(nodes: Sequence[RayNode], share: Mapping[str, float]) -> str:
    """Returns the nodes' formatted free amounts of a share's resources: `1 of 8 CPUs, 10 of 23 GiB of memory`."""
    amounts: list[str] = []
    for name in share:
        if not name.startswith(_GPU_TYPE_PREFIX):
            free = _scaled(name, sum(node.free.get(name, 0.0) for node in nodes))
            total = _scaled(name, sum(node.total.get(name, 0.0) for node in nodes))
            amounts.append(_amount(name, f"{free:g} of {total:g}", 2))
    return ", ".join(amounts)


def _amount(name: str, number: str, amount: float) -> str:
    if name == "memory":
        return f"{number} GiB of memory"
    if name.startswith(_GPU_TYPE_PREFIX):
        return f"of type {name.removeprefix(_GPU_TYPE_PREFIX)}"
    return f"{number} {name}{'' if amount == 1 else 's'}"


def _scaled(name: str, amount: float) -> float:
    return round(amount / 2**30, 1) if name == "memory" else round(amount, 2)


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
        return {"TPU": node.total["TPU"], **{name: 1.0 for name in node.total if _SLICE_HEAD.fullmatch(name)}}

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
    heads = {match[1] for host in hosts for resource in host.total if (match := _SLICE_HEAD.fullmatch(resource))}
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
