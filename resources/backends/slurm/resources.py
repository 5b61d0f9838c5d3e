"""A job's resources as options of sbatch, and a check that a partition's nodes can provide them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from resources.config import GpuConfig, ResourceConfig, TpuConfig, size_in_bytes
from resources.errors import UnsatisfiableResources

_GPUS = re.compile(r"\bgpu(?::(?P<type>[^:,()]+))?:(?P<count>\d+)")
_MIB = 2**20
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_LONGEST_WARNING_SECONDS = 120
_WARNING_SHARE = 10
SHORTEST_WARNING_SECONDS = 5


@dataclass(frozen=True, kw_only=True)
class Node:
    """Nodes of a kind."""

    count: int
    cpus: int
    memory_mib: int
    """At most 1 if the cluster does not count memory."""
    disk_mib: int = 0
    """0 if the cluster does not specify it."""
    gpus: dict[str, int] = field(default_factory=dict)
    """GPUs per node by type; the type is empty if the cluster does not name it."""


def nodes_of(listing: str, *, default_only: bool = False) -> list[Node]:
    """Parses `sinfo --exact --format=%D|%c|%m|%d|%P|%G`; with `default_only`, only nodes of the default partition."""
    nodes = []
    for line in listing.splitlines():
        count, cpus, memory, disk, partition, gres = line.strip().split("|", 5)
        if default_only and not partition.endswith("*"):
            continue
        gpus: dict[str, int] = {}
        for match in _GPUS.finditer(gres):
            kind = match["type"] or ""
            gpus[kind] = gpus.get(kind, 0) + int(match["count"])
        nodes.append(Node(count=int(count), cpus=int(cpus), memory_mib=int(memory), disk_mib=int(disk), gpus=gpus))
    return nodes


def refuse_what_slurm_lacks(resources: ResourceConfig, *, image: str | None) -> None:
    """Raises `UnsatisfiableResources` for requests that no Slurm cluster supports: TPUs, regions, zones and images."""
    if isinstance(resources.device, TpuConfig):
        raise UnsatisfiableResources(
            expected="CPUs or GPUs, which Slurm gives",
            found=f"a TPU slice {resources.device.variant}",
            remedy="Submit to Ray, Iris or Kubernetes, or use ResourceConfig.with_gpu().",
        )
    if resources.regions or resources.zone:
        raise UnsatisfiableResources(
            expected="no region or zone: a Slurm cluster has a single location, which the address names",
            found=f"regions={resources.regions}, zone={resources.zone}",
            remedy="Leave them out, and name the cluster's partition: slurm://partition.",
        )
    if image := image or resources.image:
        raise UnsatisfiableResources(
            expected="a workspace and packages; on Slurm we run no containers",
            found=f"the image {image}",
            remedy="Give a workspace and pip_packages, or submit to a backend that runs containers.",
        )


def check_nodes(resources: ResourceConfig, nodes: Sequence[Node], *, replicas: int) -> None:
    """Raises `UnsatisfiableResources` if the nodes of a partition could not run the replicas even when idle."""
    if sum(node.count * _replicas_on(node, resources) for node in nodes) >= replicas:
        return
    gpus = resources.device
    gpu_text = f"{gpus.count} × {gpus.variant} GPU, " if isinstance(gpus, GpuConfig) else ""
    raise UnsatisfiableResources(
        expected=f"nodes for {replicas} × ({gpu_text}cpu {resources.cpu}, ram {resources.ram}, disk {resources.disk})",
        found="; ".join(_described(node) for node in nodes),
        remedy="Ask for less, or name another partition: slurm://partition.",
    )


def sbatch_options(resources: ResourceConfig, nodes: Sequence[Node], *, replicas: int) -> list[str]:
    """Returns the options that request all replicas at once: Slurm starts a job on all of its nodes or on none.

    Memory and disk are requested only if the cluster counts them; otherwise Slurm would refuse the job.
    """
    options = [f"--ntasks={replicas}", f"--cpus-per-task={resources.cpu}"]
    memory_mib = math.ceil(size_in_bytes(resources.ram) / _MIB)
    if any(node.memory_mib > 1 for node in nodes):
        # Slurm counts memory per node or per core only, and several replicas may share a node.
        several = f"--mem-per-cpu={math.ceil(memory_mib / resources.cpu)}M"
        options.append(f"--mem={memory_mib}M" if replicas == 1 else several)
    if any(node.disk_mib for node in nodes):
        options.append(f"--tmp={math.ceil(size_in_bytes(resources.disk) / _MIB)}M")
    if replicas == 1:
        options.append("--nodes=1")
    if isinstance(resources.device, GpuConfig):
        kinds = [kind for node in nodes for kind in node.gpus if _is_of(kind, resources.device.variant)]
        kind = f"{kinds[0]}:" if resources.device.variant != "auto" and kinds else ""
        gpus = f"{kind}{resources.device.count}"
        options.append(f"--gres=gpu:{gpus}" if replicas == 1 else f"--gpus-per-task={gpus}")
    return options


def warning_seconds(time_limit: str | None) -> int:
    """Returns how long before its time limit a job is signalled: 120 s, or a tenth of a short limit, at least 5 s.

    `time_limit` is as in `sbatch --time`: minutes, or [days-]hours:minutes[:seconds]; None if unknown.
    """
    match = _TIME.fullmatch(time_limit or "")
    if not match:
        return _LONGEST_WARNING_SECONDS
    days, first, second, third = (int(part) if part else 0 for part in match.groups())
    if match[1]:
        seconds = days * 86400 + first * 3600 + second * 60 + third
    elif match[4]:
        seconds = first * 3600 + second * 60 + third
    else:
        seconds = first * 60 + second
    return max(SHORTEST_WARNING_SECONDS, min(_LONGEST_WARNING_SECONDS, seconds // _WARNING_SHARE))


def _replicas_on(node: Node, resources: ResourceConfig) -> int:
    rooms = [node.cpus // resources.cpu]
    if node.memory_mib > 1:
        rooms.append(node.memory_mib * _MIB // size_in_bytes(resources.ram))
    if isinstance(resources.device, GpuConfig):
        counts = [count for kind, count in node.gpus.items() if _is_of(kind, resources.device.variant)]
        rooms.append(max(counts, default=0) // resources.device.count)
    if node.disk_mib and node.disk_mib * _MIB < size_in_bytes(resources.disk):
        return 0
    return min(rooms)


def _is_of(kind: str, variant: str) -> bool:
    words = re.split(r"[^a-z0-9]+", kind.lower())
    return variant == "auto" or variant.lower() in (kind.lower(), *words)


def _described(node: Node) -> str:
    gpus = [f"{count} × {kind or 'GPU'}" for kind, count in node.gpus.items()]
    memory = [f"{node.memory_mib / 1024:g} GiB of memory"] if node.memory_mib > 1 else []
    disk = [f"{node.disk_mib / 1024:g} GiB of disk"] if node.disk_mib else []
    return f"{node.count} with {', '.join([f'{node.cpus} cores', *memory, *disk, *gpus])}"
