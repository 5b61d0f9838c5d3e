"""Nodes of a Ray cluster as plain values: resources, their free part, and the number of equal shares that fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        (_GPU_TYPE_PREFIX + name for name in sorted(names) if name.lower() == model),
        _GPU_TYPE_PREFIX + variant,
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
            free, total = (_scaled(name, sum(have.get(name, 0.0) for have in side)) for side in _sides(nodes))
            amounts.append(_amount(name, f"{free:g} of {total:g}", 2))
    return ", ".join(amounts)


def _sides(nodes: Sequence[RayNode]) -> tuple[list[Mapping[str, float]], list[Mapping[str, float]]]:
    return [node.free for node in nodes], [node.total for node in nodes]


def _amount(name: str, number: str, amount: float) -> str:
    if name == "memory":
        return f"{number} GiB of memory"
    if name.startswith(_GPU_TYPE_PREFIX):
        return f"of type {name.removeprefix(_GPU_TYPE_PREFIX)}"
    return f"{number} {name}{'' if amount == 1 else 's'}"


def _scaled(name: str, amount: float) -> float:
    return round(amount / 2**30, 1) if name == "memory" else round(amount, 2)
