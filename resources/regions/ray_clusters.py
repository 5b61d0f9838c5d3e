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
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError

from resources.backends.local.client import LocalClient
from resources.config import Config, ResourceConfig
from resources.errors import BackendUnavailable, BadInput, not_there
from resources.jobs.jobs import Entrypoint, JobHandle, JobRequest, create_environment
from resources.regions.region_table import Region
from resources.regions.regions import where_to_write
from resources.settings import settings
from resources.storage.files import replace_text
from resources.tpu import CORES_PER_CHIP, GIB_PER_CHIP, TPU_TOPOLOGIES, TpuTopology

LOCAL = "local"
"""The name of this machine's cluster, in place of a region's name."""
DASHBOARD_PORT, CLIENT_PORT = 8265, 10001
LauncherAction = Literal["up", "down", "status", "forward"]
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

_MOST_CHIPS = 128  # of a slice that the launcher may start
_FOR_WORKERS = 0.7  # of a machine's memory; the rest is for Ray and its object store
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


def launcher_command(action: LauncherAction, file: Path) -> list[str]:
    """Returns the command of Ray's launcher for a region's head: `up` starts or updates it, `down` ends all.

    `status` shows nodes, demand, and errors of the launcher. `forward` forwards the ports of the dashboard and of the
    job server until it is ended; `ray dashboard` would forward only the first, and Ray forwards only equal numbers.
    """
    forwarded = ["--port-forward", str(DASHBOARD_PORT), "--port-forward", str(CLIENT_PORT)]
    options, remote = {
        "up": (["up", "--yes"], []),
        "down": (["down", "--yes"], []),
        "status": (["exec"], ["~/assay-environment/bin/ray status"]),
        "forward": (["exec", *forwarded], ["sleep infinity"]),
    }[action]
    return [ray_command(), *options, str(file), *remote]


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
            expected="a Ray cluster of this machine", found="none is up", remedy="Start it: assay cluster up local"
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
            environment=create_environment(workspace=folder, env_vars=_VARIABLES),
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
    """Returns the text of a region's cluster file, in Ray's schema."""
    if region.ray_cluster is None:
        raise BadInput(
            expected=f"ray_cluster of {region.name} in the regions file",
            found="none",
            remedy="Name its zone and its file there.",
        )
    templates = Environment(
        loader=PackageLoader("resources.regions"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["memory"] = lambda gib: int(gib * _FOR_WORKERS) * 2**30
    zone = region.ray_cluster.zone
    return templates.get_template("ray_cluster.yaml.j2").render(
        region=region,
        zone=zone,
        slices=slices_in(region, zone),
        cores=CORES_PER_CHIP,
        gib=GIB_PER_CHIP,
        runtimes=_RUNTIMES,
    )


def slices_in(region: Region, zone: str) -> list[TpuTopology]:
    """Returns the slices that the launcher may start in a zone, up to 128 chips."""
    offered = [generation for generation, zones in region.tpus.items() if zone in zones]
    return [
        topology
        for topology in TPU_TOPOLOGIES.values()
        if topology.generation in offered and topology.chips <= _MOST_CHIPS
    ]
