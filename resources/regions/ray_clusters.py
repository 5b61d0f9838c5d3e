"""Ray clusters: the commands that start and end a region's cluster, and a local Ray head for experiments.

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

from pydantic import ValidationError

from resources.backends.local.client import LocalClient
from resources.config import Config, ResourceConfig
from resources.errors import BackendUnavailable, BadInput, not_there
from resources.jobs.jobs import Entrypoint, JobHandle, JobRequest, create_environment
from resources.regions.ray_cluster_file import render
from resources.regions.region_table import Region
from resources.regions.regions import where_to_write
from resources.settings import settings
from resources.storage.files import replace_text

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
