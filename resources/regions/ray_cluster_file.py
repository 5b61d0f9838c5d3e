"""A region's cluster file for Ray's cluster launcher: the allowed machines, and the setup of each.

`render` gives the file from `deployments/regions.yaml`. Node types have the resource
`TPU-<type>-head` and the labels for claiming slices. Machines get the pinned lists; jobs bring their own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from resources.errors import BadInput
from resources.regions.region_table import Region, tpu_generation
from resources.tpu import CORES_PER_CHIP, GIB_PER_CHIP, TPU_TOPOLOGIES, TpuTopology

_HEADER = (
    "# Written by `assay cluster write` from deployments/regions.yaml: change that file, and run the command again.\n"
)
_LISTS = ("orchestrator.txt", "backends.txt")
_ENVIRONMENT = "~/assay-environment"
_PYTHON = "3.11"  # of the pinned lists; Ray's driver and nodes must have the same version
_MOST_CHIPS = 128  # of a slice that the launcher may start
_SLICES, _CPU_MACHINES = 32, 64
_IDLE_MINUTES = 10
_FOR_WORKERS = 0.7  # of a machine's memory; the rest is for Ray and its object store
_GIB = 2**30

_RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


def render(region: Region) -> str:
    """Returns the text of a region's cluster file."""
    return _HEADER + yaml.safe_dump(cluster_content(region), sort_keys=False, width=120)


def cluster_content(region: Region) -> dict[str, Any]:
    """Returns the content of a region's cluster file, in Ray's schema."""
    if region.ray_cluster is None:
        raise BadInput(
            expected=f"ray_cluster of {region.name} in the regions file",
            found="none",
            remedy="Name its zone and its file there.",
        )
    zone = region.ray_cluster.zone
    ray = f"{_ENVIRONMENT}/bin/ray"
    start = f"ulimit -n 65536; {ray} start --disable-usage-stats --object-manager-port=8076"
    return {
        "cluster_name": f"assay-{region.name}",
        "max_workers": 1024,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": _IDLE_MINUTES,
        "provider": {
            "type": "gcp",
            "region": region.name,
            "availability_zone": zone,
            "project_id": region.ray_cluster.project,
        },
        "auth": {"ssh_user": "ubuntu"},
        "file_mounts": {f"~/assay-lists/{name}": f"resources/environments/requirements/{name}" for name in _LISTS},
        "cluster_synced_files": [],
        "setup_commands": [
            "command -v ~/.local/bin/uv || python3 -m pip install --user uv",
            f"~/.local/bin/uv venv --allow-existing --python {_PYTHON} {_ENVIRONMENT}",
            f"~/.local/bin/uv pip install --python {_ENVIRONMENT}/bin/python "
            + " ".join(f"-r ~/assay-lists/{name}" for name in _LISTS),
        ],
        "head_node_type": "head",
        "available_node_types": {
            "head": _machine(
                region, zone=zone, machine_type="n2-standard-8", cores=8, gib=32, preemptible=False, most=0
            )
            # Runs the jobs that request a machine without preemption; no other job should.
            | {"resources": {"CPU": 8, "memory": _memory(32), "head_node": 1}},
            "cpu": _machine(
                region,
                zone=zone,
                machine_type="n2-standard-32",
                cores=32,
                gib=128,
                preemptible=True,
                most=_CPU_MACHINES,
            ),
            **{f"tpu-{topology.variant}": _slice(region, topology, zone=zone) for topology in slices_in(region, zone)},
        },
        "head_start_ray_commands": [
            f"{ray} stop",
            f"{start} --head --port=6379 --ray-client-server-port=10001 --dashboard-host=127.0.0.1 "
            "--autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": [f"{ray} stop", f"{start} --address=$RAY_HEAD_IP:6379"],
    }


def slices_in(region: Region, zone: str) -> Iterator[TpuTopology]:
    """Yields the slices that the launcher may start in a zone, up to 128 chips."""
    for topology in TPU_TOPOLOGIES.values():
        if zone in region.tpus.get(tpu_generation(topology.variant), ()) and topology.chips <= _MOST_CHIPS:
            yield topology


def _slice(region: Region, topology: TpuTopology, *, zone: str) -> dict[str, Any]:
    generation, chips = tpu_generation(topology.variant), topology.chips_per_vm
    return {
        "min_workers": 0,
        "max_workers": _SLICES,
        # Per VM; the launcher sets the head resource only on the first VM of a slice.
        "resources": {
            "CPU": CORES_PER_CHIP[generation] * chips,
            "memory": _memory(GIB_PER_CHIP[generation] * chips),
            "TPU": chips,
            f"TPU-{topology.variant}-head": 1,
        },
        "labels": {**_labels(region, zone=zone, preemptible=True), "ray.io/tpu-pod-type": topology.variant},
        "node_config": {
            "acceleratorType": topology.variant,
            "runtimeVersion": _RUNTIMES[generation],
            "schedulingConfig": {"preemptible": True},
        },
    }


def _machine(
    region: Region, *, zone: str, machine_type: str, cores: int, gib: int, preemptible: bool, most: int
) -> dict[str, Any]:
    boot = {
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "initializeParams": {
            "diskSizeGb": 200,
            "sourceImage": "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts",
        },
    }
    return {
        "min_workers": 0,
        "max_workers": most,
        "resources": {"CPU": cores, "memory": _memory(gib)},
        "labels": _labels(region, zone=zone, preemptible=preemptible),
        "node_config": {
            "machineType": machine_type,
            "disks": [boot],
            **({"scheduling": [{"preemptible": True}]} if preemptible else {}),
        },
    }


def _labels(region: Region, *, zone: str, preemptible: bool) -> dict[str, str]:
    return {
        "ray.io/availability-region": region.name,
        "ray.io/availability-zone": zone,
        "ray.io/market-type": "spot" if preemptible else "on-demand",
    }


def _memory(gib: int) -> int:
    return int(gib * _FOR_WORKERS) * _GIB
