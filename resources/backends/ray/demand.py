"""Resource requests of a job on a Ray cluster: eligible nodes, shares, and formatted reasons to wait or to refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resources.backends.ray.nodes import (
    NODE_LABEL,
    REGION_LABEL,
    ZONE_LABEL,
    RayNode,
    describe_slices,
    free_text,
    gpu_type_resource,
    most_per_region,
    room,
    share_text,
    slices_of,
    total_text,
    tpu_types,
)
from resources.config import GpuConfig, ResourceConfig, TpuConfig, size_in_bytes
from resources.errors import UnsatisfiableResources

_TRACE = 0.001  # amount of a resource that only marks the kind of a node


def share_of(nodes: Sequence[RayNode], resources: ResourceConfig) -> dict[str, float]:
    """Returns the share of a node that a replica holds, by Ray's resource names; of each host, without chips, for TPUs.

    A TPU slice belongs to the job as a whole, so each host must have the requested CPUs and memory.
    """
    share: dict[str, float] = {"CPU": float(resources.cpu), "memory": float(size_in_bytes(resources.ram))}
    if isinstance(resources.device, GpuConfig):
        share["GPU"] = float(resources.device.count)
        if resources.device.variant.lower() != "auto":
            share[gpu_type_resource(nodes, resources.device.variant)] = _TRACE
    return share


def allowed_nodes(nodes: Sequence[RayNode], resources: ResourceConfig) -> list[RayNode]:
    """Returns the nodes in the job's regions and zone and, for non-preemptible jobs, only nodes that stay.

    A node without a region label is in no region: costs and accessible data depend on the region.
    """
    return [
        node
        for node in nodes
        if (resources.regions is None or node.region in resources.regions)
        and (resources.zone is None or node.labels.get(ZONE_LABEL) == resources.zone)
        and (resources.preemptible or node.stays)
    ]


def best_selector(
    allowed: Sequence[RayNode], resources: ResourceConfig, *, share: Mapping[str, float], replicas: int
) -> dict[str, str]:
    """Returns the labels of the best nodes with room for all replicas now, else of all allowed nodes.

    Earlier regions are better. Nodes without accelerators are better: a job without accelerators could block a slice.
    """
    for region in resources.regions or (None,):
        in_region = [node for node in allowed if region is None or node.region == region]
        plain = [node for node in in_region if not node.total.get("TPU") and not node.total.get("GPU")]
        for chosen in (plain, in_region):
            if room((node.free for node in chosen), share) >= replicas:
                names = {node.node_id for node in chosen}
                avoided = [node for node in in_region if node.node_id not in names]
                return selector_of(allowed, resources, region=region, avoided=avoided)
    return selector_of(allowed, resources, region=None, avoided=())


def selector_of(
    allowed: Sequence[RayNode], resources: ResourceConfig, *, region: str | None, avoided: Sequence[RayNode]
) -> dict[str, str]:
    """Returns the labels that a node must have."""
    selector: dict[str, str] = {}
    names = [node.node_id for node in avoided]
    if resources.regions:
        selector[REGION_LABEL] = region or _any_of(resources.regions)
    if resources.zone:
        selector[ZONE_LABEL] = resources.zone
    if not resources.preemptible and allowed:
        selector[NODE_LABEL] = _any_of(sorted({node.node_id for node in allowed} - {*names}))
    elif names:
        selector[NODE_LABEL] = f"!{_any_of(names)}"
    return selector


def reason_to_wait(nodes: Sequence[RayNode], resources: ResourceConfig, replicas: int) -> str:
    """Returns the reason that a job waits: the required resources, and how much of each the nodes have and is free."""
    allowed = allowed_nodes(nodes, resources)
    share = share_of(nodes, resources)
    if isinstance(resources.device, TpuConfig):
        slices = [
            f"{replicas} × {tpu.variant}: {describe_slices(allowed, tpu, share=share)}"
            for tpu in resources.device.choices
        ]
        return f"waits for {'; or '.join(slices)}"
    required = share_text(share) if replicas == 1 else f"{replicas} × ({share_text(share)})"
    if not allowed:
        return f"waits for {required}: no node {_where(resources)} at present"
    fits = room((node.free for node in allowed), share)
    more = f"room for {fits} of {replicas} now, " if replicas > 1 else ""
    count = f"{len(allowed)} node{'' if len(allowed) == 1 else 's'}"
    return f"waits for {required}: {more}{free_text(allowed, share)} free on {count}"


def refusal(nodes: Sequence[RayNode], resources: ResourceConfig, replicas: int) -> UnsatisfiableResources | None:
    """Returns the error if these nodes can never satisfy the request, else None."""
    allowed = allowed_nodes(nodes, resources)
    if not allowed:
        return _refused_place(nodes, resources)
    if isinstance(resources.device, TpuConfig):
        refused = [_refused_slices(allowed, resources, tpu, replicas) for tpu in resources.device.choices]
        return None if None in refused else _all_of(refused)
    share = share_of(nodes, resources)
    fits = room((node.total for node in allowed), share)
    if fits >= replicas:
        return None
    largest = max(allowed, key=lambda node: tuple(node.total.get(name, 0.0) for name in ("GPU", "CPU", "memory")))
    types = sorted({name for node in allowed for name in node.gpu_types})
    nodes_with = "a node with" if replicas == 1 else f"room for {replicas} ×"
    of_types = f"; GPUs in the cluster: {', '.join(types) or 'none'}" if "GPU" in share else ""
    return UnsatisfiableResources(
        expected=f"{nodes_with} {share_text(share)}{_where(resources, before=' ')}",
        found=f"room for {fits}; the largest node has {total_text(largest, share)}{of_types}",
        remedy="Ask for less, or for fewer replicas, or add nodes to the cluster.",
    )


def _refused_place(nodes: Sequence[RayNode], resources: ResourceConfig) -> UnsatisfiableResources:
    places = sorted({f"{node.region or '?'} ({node.labels.get(ZONE_LABEL) or 'zone unknown'})" for node in nodes})
    says = any(node.region or ZONE_LABEL in node.labels for node in nodes)
    return UnsatisfiableResources(
        expected=f"a node {_where(resources)}",
        found=f"nodes in {', '.join(places)}" if says else "no node of the cluster says where it is",
        remedy="Leave out regions and zone, or start the nodes with RAY_NODE_REGION and RAY_NODE_ZONE set, and with "
        "RAY_NODE_MARKET_TYPE=on-demand where they stay.",
    )


def _refused_slices(
    nodes: Sequence[RayNode], resources: ResourceConfig, tpu: TpuConfig, replicas: int
) -> UnsatisfiableResources | None:
    share = share_of(nodes, resources)
    slices = slices_of(nodes, tpu)
    known = tpu_types(nodes)
    offered = ", ".join(f"{count} × {name}" for name, count in sorted(known.items())) or "no TPUs"
    required = f"{replicas} × {tpu.variant}" + (f" arranged as {tpu.topology}" if tpu.topology else "")
    if most_per_region(slices) < replicas:
        return UnsatisfiableResources(
            expected=f"{required} in the cluster{_where(resources, before=' ')}, all in the same region",
            found=offered,
            remedy="Ask for a type and a number that are there, or add slices to the cluster.",
        )
    lacking = [host for tpu_slice in slices for host in tpu_slice.hosts if room([host.total], share) < 1]
    unfit = {tpu_slice.name for tpu_slice in slices if any(host in lacking for host in tpu_slice.hosts)}
    if len(slices) - len(unfit) >= replicas:
        return None
    return UnsatisfiableResources(
        expected=f"{share_text(share)} on each host of {required}",
        found=f"hosts with {total_text(lacking[0], share)}",
        remedy="Ask for no more cpu and ram than a host has; the job gets the whole slice in any case.",
    )


def _all_of(refused: Sequence[UnsatisfiableResources | None]) -> UnsatisfiableResources:
    refusals = [each for each in refused if each is not None]
    return UnsatisfiableResources(
        expected=", or ".join(each.expected for each in refusals),
        found="; ".join(dict.fromkeys(each.found for each in refusals)),
        remedy=refusals[0].remedy,
    )


def _where(resources: ResourceConfig, *, before: str = "") -> str:
    clauses: Sequence[str] = [
        *([f"in {' or '.join(resources.regions)}"] if resources.regions else []),
        *([f"in zone {resources.zone}"] if resources.zone else []),
        *([] if resources.preemptible else ["that stays (the head, or bought on demand)"]),
    ]
    return before + " ".join(clauses) if clauses else ""


def _any_of(values: Sequence[str]) -> str:
    return f"in({','.join(values)})"  # Ray 2.60 treats a space after a comma as part of the value
