"""The commands about clusters that run jobs: `assay cluster`."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.console.console import note, say
from resources.errors import BackendUnavailable
from resources.regions.ray_clusters import (
    CLIENT_PORT,
    DASHBOARD_PORT,
    LOCAL,
    LauncherAction,
    cluster_file,
    launcher_command,
    local_cluster,
    render,
    start_local,
    take_down_local,
)
from resources.regions.regions import known_regions, regions_file

_Region = Annotated[str, Parameter(help="A region of the regions file, or local for this machine.")]
_DryRun = Annotated[bool, Parameter(help="Only show the command that would run.")]


def cluster_up(region: _Region, /, *, cpus: int | None = None, dry_run: _DryRun = False) -> None:
    """Start a region's Ray cluster, or update it; `local` starts a cluster on this machine.

    Args:
        cpus: CPUs of a local cluster; the machine's when left out.
    """
    if region != LOCAL:
        _launch("up", region, dry_run=dry_run)
    elif dry_run:
        say("starts a Ray head of this machine that listens on loopback")
    else:
        cluster = start_local(cpus=cpus)
        say(
            f"Ray is up on this machine; its pages are at {cluster.dashboard}",
            "assay submit --cluster local -- python script.py   runs a job there",
            f"export ASSAY_JOBS={cluster.address}    sends all jobs of this shell there",
            "assay cluster down local                           ends it",
        )


def cluster_down(region: _Region, /, *, dry_run: _DryRun = False) -> None:
    """End a region's Ray cluster with all its machines; `local` ends this machine's, and no other Ray."""
    if region != LOCAL:
        _launch("down", region, dry_run=dry_run)
    elif dry_run:
        say(f"ends job {local_cluster().job_id}")
    else:
        say(f"{take_down_local().job_id} is down.")


def cluster_status(region: _Region, /, *, forward: bool = False, dry_run: _DryRun = False) -> None:
    """Show a region's cluster as its head reports it: machines, demand, errors of the launcher.

    Args:
        forward: Forward its pages and its address for jobs to this machine instead, until Ctrl-C.
    """
    if region == LOCAL:
        cluster = local_cluster()
        say(f"up: {cluster.address}, pages at {cluster.dashboard}, job {cluster.job_id}")
    elif forward:
        _launch(
            "forward",
            region,
            f"http://127.0.0.1:{DASHBOARD_PORT}   pages of {region}, while this runs",
            f"assay submit --backend ray://127.0.0.1:{CLIENT_PORT} -- python script.py   runs a job there",
            dry_run=dry_run,
        )
    else:
        _launch("status", region, dry_run=dry_run)


def cluster_write(*, check: bool = False) -> None:
    """Write the cluster files of all regions, for Ray's own launcher; `assay cluster up` needs none.

    Args:
        check: Change nothing; exit code 1 if a file is out of date.
    """
    changed: list[Path] = []
    for region in known_regions().regions:
        if region.ray_cluster is None:
            continue
        file, text = regions_file().parent / region.ray_cluster.file, render(region)
        if file.is_file() and file.read_text() == text:
            continue
        changed.append(file)
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    say(*(f"{'out of date' if check else 'written'}: {file}" for file in changed))
    if check and changed:
        raise SystemExit(1)


def _launch(action: LauncherAction, region: str, *notes: str, dry_run: bool) -> None:
    command = launcher_command(action, cluster_file(known_regions().named(region), dry_run=dry_run))
    say(*notes)
    shown = shlex.join(["ray", *command[1:]])
    if dry_run:
        say(shown)
        return
    note(f"$ {shown}")
    root = Path(__file__).parents[2]  # the cluster files name the pinned lists relative to this folder
    ended = subprocess.run(command, cwd=root, check=False)
    if ended.returncode:
        raise BackendUnavailable(
            expected=f"{shown} to end well",
            found=f"exit code {ended.returncode}",
            remedy="Read what it printed above; `gcloud auth application-default login` is needed once.",
        )
