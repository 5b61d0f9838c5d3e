"""Ray clusters: a region's file for Ray's cluster launcher with its commands, and a local Ray head for experiments.

A region's file lists the allowed machines with their setup. Node types have the resource `TPU-<type>-head` and the
labels for claiming slices. Machines get the pinned lists; jobs bring their own code.
The local head is a job that outlives its parent. `take_down_local` ends only its processes; `ray stop` would end all.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from resources.backends.local.client import LocalClient
from resources.config import Config, ResourceConfig
from resources.errors import BackendUnavailable, BadInput, not_there
from resources.jobs.jobs import Entrypoint, JobHandle, JobRequest, create_environment
from resources.regions.region_table import Region, tpu_generation
from resources.regions.regions import where_to_write
from resources.settings import settings
from resources.storage.files import replace_text
from resources.tpu import CORES_PER_CHIP, GIB_PER_CHIP, TPU_TOPOLOGIES, TpuTopology

LOCAL = "local"
"""The name of this machine's cluster, in place of a region's name."""
DASHBOARD_PORT, CLIENT_PORT = 8265, 10001
_VARIABLES = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps Ray on 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # else the server for Ray Clients sometimes crashes when it forks
}
_START_SECONDS = 120.0  # it takes 8 s on two idle cores
_PORTS: tuple[str, ...] = (
    "port",
    "ray-client-server-port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
)
_GRACE_SECONDS = 3.0  # the cluster's jobs are ended before; Ray itself has nothing to save
_OBJECT_STORE_BYTES = 200 * 2**20

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


class LocalCluster(Config):
    """A Ray head of this machine that was started by `assay cluster up local`."""

    job_id: str
    """Its job on the local backend."""
    address: str
    """Address for submitting jobs, as in `ASSAY_JOBS`."""
    dashboard: str
    """URL of its dashboard."""
    folder: Path
    """Folder of its temporary files."""


def ray_command() -> str:
    """Returns the path of Ray's own command in the environment of this process."""
    command = Path(sys.executable).with_name("ray")
    if not command.exists():
        raise not_there("Ray's command", command, "install the extra: pip install 'assay-evals[ray]'")
    return str(command)


def up_command(file: Path) -> list[str]:
    """Returns the command that starts or updates a region's head."""
    return [ray_command(), "up", "--yes", str(file)]


def down_command(file: Path) -> list[str]:
    """Returns the command that ends a region's head and all its workers."""
    return [ray_command(), "down", "--yes", str(file)]


def status_command(file: Path) -> list[str]:
    """Returns the command that shows the status of a region's head: nodes, demand, errors of the launcher."""
    return [ray_command(), "exec", str(file), "~/assay-environment/bin/ray status"]


def tunnel_command(file: Path, *, port: int = DASHBOARD_PORT, client_port: int = CLIENT_PORT) -> list[str]:
    """Returns the command that forwards two local ports to a region's head, for its dashboard and its job server.

    It runs until it is ended. `ray dashboard` would forward only the first port, and Ray only forwards equal port
    numbers.
    """
    forwarded = ["--port-forward", str(port), "--port-forward", str(client_port)]
    return [ray_command(), "exec", *forwarded, str(file), "sleep infinity"]


def start_local_command(ports: Mapping[str, int], *, folder: Path, cpus: int | None) -> list[str]:
    """Returns the command that starts a Ray head on loopback only, in the foreground."""
    return [
        ray_command(),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
        *(f"--{name}={number}" for name, number in ports.items()),
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={folder}",
        *([f"--num-cpus={cpus}"] if cpus is not None else []),
    ]


def cluster_file(region: Region, *, dry_run: bool = False) -> Path:
    """Returns a region's file for Ray's launcher, written into the cache as the regions file describes it now.

    Without `dry_run`, the region must name the project that pays for the cluster.
    """
    if not dry_run and (line := region.unwritten().get("project")) is not None:
        raise BadInput(
            expected=f"the Google Cloud project that pays for the cluster in {region.name}",
            found="no project",
            remedy=where_to_write(region.name, line),
        )
    text, file = render(region), _folder() / f"{region.name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, text)
    return file


def local_cluster() -> LocalCluster:
    """Returns the cluster of this machine."""
    known = find_local()
    if known is None:
        raise BadInput(
            expected="a Ray cluster of this machine",
            found="none is up",
            remedy="Start it: assay cluster up local",
        )
    return known


def find_local() -> LocalCluster | None:
    """Returns the cluster of this machine if it runs, else None."""
    try:
        known = LocalCluster.model_validate_json(_record().read_text())
        return known if not LocalClient().attach(known.job_id).status().finished else None
    except (OSError, ValidationError, BadInput):
        return None


def start_local(*, cpus: int | None = None) -> LocalCluster:
    """Starts the cluster of this machine, if it is not up, and returns once jobs can be submitted.

    `cpus` limits the CPUs that Ray uses; all when None.
    """
    if known := find_local():
        return known
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    # Paths of sockets in it have at most 107 bytes, too few for a deep cache folder.
    folder = Path(tempfile.mkdtemp(prefix="assay-ray-"))
    program, *arguments = start_local_command(ports, folder=folder, cpus=cpus)
    job = LocalClient(grace_seconds=_GRACE_SECONDS).submit(
        JobRequest(
            "ray-head",
            Entrypoint.from_binary(program, arguments),
            resources=ResourceConfig.with_cpu(),
            environment=create_environment(
                workspace=folder,
                env_vars=_VARIABLES,
            ),
            max_retries_preemption=0,
            outlives_parent=True,
        )
    )
    cluster = LocalCluster(
        job_id=job.job_id,
        address=f"ray://127.0.0.1:{ports['ray-client-server-port']}",
        dashboard=f"http://127.0.0.1:{ports['dashboard-port']}",
        folder=folder,
    )
    try:
        _wait_until_up(job, [ports[name] for name in _PORTS[:3]])
        _record().parent.mkdir(parents=True, exist_ok=True)
        replace_text(_record(), cluster.model_dump_json())
    except BaseException:  # Ctrl-C too: without a record, the head would outlive this process unnoticed
        _end(cluster)
        raise
    return cluster


def _wait_until_up(job: JobHandle, ports: Sequence[int]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not all(map(_answers, ports)):
        if (status := job.status()).finished or time.monotonic() > deadline:
            raise BackendUnavailable(
                expected=f"a Ray head on this machine after {_START_SECONDS:g} s",
                found=f"it is {status}\n{job.logs(20)}",
                remedy="Read the log; free memory or ports where it complains of them.",
            )
        time.sleep(0.1)


def take_down_local() -> LocalCluster:
    """Ends the cluster of this machine with all its processes, and no other Ray."""
    cluster = local_cluster()
    _end(cluster)
    return cluster


def _end(cluster: LocalCluster) -> None:
    LocalClient().attach(cluster.job_id).terminate()
    _record().unlink(missing_ok=True)
    shutil.rmtree(cluster.folder, ignore_errors=True)


def _record() -> Path:
    return _folder() / f"{LOCAL}.json"


def _folder() -> Path:
    return settings().cache_dir / "clusters"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


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
