"""A job's resources in Iris' units, and a check that some group of the cluster's machines can provide them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resources.config import CpuConfig, Device, GpuConfig, ResourceConfig, TpuConfig, size_in_bytes
from resources.errors import UnsatisfiableResources


@dataclass(frozen=True, kw_only=True)
class Group:
    """Machines of a kind that the cluster can start."""

    name: str
    device: str = "cpu"
    """`cpu`, `gpu` or `tpu`."""
    variant: str = ""
    device_count: int = 0
    """Accelerators per machine; 0 if the cluster does not specify it."""
    cpu_millicores: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    preemptible: bool = False
    region: str = ""
    zone: str = ""


def hosts_of(resources: ResourceConfig, *, replicas: int) -> int:
    """Returns the number of tasks per replica: of VMs of its TPU slice, else 1; refuses several multi-host slices."""
    hosts = resources.hosts_per_replica
    if hosts > 1 and replicas > 1:
        raise UnsatisfiableResources(
            expected="a single slice of several VMs, or several slices of a single VM each, per job",
            found=f"{replicas} slices {_device_name(resources.device)} of {hosts} VMs each: Iris looks for a slice "
            "that holds all tasks of a job, and would wait for ever",
            remedy="Submit a job for each slice, or all slices to Ray.",
        )
    return hosts


def check_groups(resources: ResourceConfig, groups: Sequence[Group]) -> None:
    """Raises `UnsatisfiableResources` if no group has such machines; without listed groups it accepts everything."""
    if not groups:
        return
    fitting = list(groups)
    for requirement, fits in (
        (f"device {_device_name(resources.device)}", lambda group: _has_device(group, resources.device)),
        (f"one of the regions {resources.regions}", lambda group: _is_one_of(group.region, resources.regions)),
        (f"zone {resources.zone}", lambda group: _is_one_of(group.zone, resources.zone and (resources.zone,))),
        ("not preemptible", lambda group: resources.preemptible or not group.preemptible),
        (f"cpu {resources.cpu}", lambda group: _is_enough(group.cpu_millicores, resources.cpu * 1000)),
        (f"ram {resources.ram}", lambda group: _is_enough(group.memory_bytes, size_in_bytes(resources.ram))),
        (f"disk {resources.disk}", lambda group: _is_enough(group.disk_bytes, size_in_bytes(resources.disk))),
    ):
        left = [group for group in fitting if fits(group)]
        if not left:
            raise UnsatisfiableResources(
                expected=f"machines with {requirement}",
                found="; ".join(_described(group) for group in fitting),
                remedy="Ask for less or for another device, or add a scale group to the cluster's configuration.",
            )
        fitting = left


def _device_name(device: Device) -> str:
    match device:
        case CpuConfig():
            return "cpu"
        case GpuConfig(variant=variant, count=count):
            return f"{count} × {variant} GPU"
        case TpuConfig(types=types):
            return " or ".join(types)


def _has_device(group: Group, device: Device) -> bool:
    match device:
        case CpuConfig():
            return True
        case GpuConfig(variant=variant, count=count):
            same = variant == "auto" or group.variant.lower() == variant.lower()
            return group.device == "gpu" and same and _is_enough(group.device_count, count)
        case TpuConfig(types=types):
            return group.device == "tpu" and group.variant.lower() in types


def _is_one_of(place: str, allowed: Sequence[str] | str | None) -> bool:
    return not allowed or not place or place in allowed


def _is_enough(offered: int, required: int) -> bool:
    return offered == 0 or offered >= required


def _described(group: Group) -> str:
    numbers = [f"{group.cpu_millicores / 1000:g} cores"] if group.cpu_millicores else []
    numbers += [f"{group.memory_bytes / 2**30:g} GiB of memory"] if group.memory_bytes else []
    numbers += [f"{group.disk_bytes / 2**30:g} GiB of disk"] if group.disk_bytes else []
    numbers += [group.region] if group.region else []
    numbers += ["preemptible"] if group.preemptible else []
    return f"{group.name}: {group.variant or group.device}, {', '.join(numbers)}"
