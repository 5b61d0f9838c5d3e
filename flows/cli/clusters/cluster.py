"""The commands about clusters that run jobs: `assay cluster`."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flows.console.console import ERR, OUT
from resources.errors import BackendUnavailable

cluster_app = typer.Typer(help="Ray clusters of regions, and a local cluster.", no_args_is_help=True)

_Region = Annotated[str, typer.Argument(help="A region of the regions file, or local for this machine.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show the command that would run.")]


@cluster_app.command("up")
def cluster_up(
    region: _Region,
    cpus: Annotated[int | None, typer.Option(help="CPUs of a local cluster; the machine's when left out.")] = None,
    dry_run: _DryRun = False,
) -> None:
    """Start a region's Ray cluster, or update it; `local` starts a cluster on this machine."""
    from resources.regions.ray_clusters import LOCAL, start_local, up_command

    if region != LOCAL:
        _run(up_command(_file(region, dry_run=dry_run)), dry_run=dry_run)
        return
    if dry_run:
        OUT.print("starts a Ray head of this machine that listens on loopback", highlight=False)
        return
    cluster = start_local(cpus=cpus)
    OUT.print(
        f"Ray is up on this machine; its pages are at {cluster.dashboard}\n"
        f"assay submit --cluster local -- python script.py   runs a job there\n"
        f"export ASSAY_JOBS={cluster.address}    sends all jobs of this shell there\n"
        "assay cluster down local                           ends it",
        highlight=False,
        soft_wrap=True,
    )


@cluster_app.command("down")
def cluster_down(region: _Region, dry_run: _DryRun = False) -> None:
    """End a region's Ray cluster with all its machines; `local` ends this machine's, and no other Ray."""
    from resources.regions.ray_clusters import LOCAL, down_command, local_cluster, take_down_local

    if region != LOCAL:
        _run(down_command(_file(region, dry_run=dry_run)), dry_run=dry_run)
    elif dry_run:
        OUT.print(f"ends job {local_cluster().job_id}", highlight=False)
    else:
        cluster = take_down_local()
        OUT.print(f"{cluster.job_id} is down.", highlight=False)


@cluster_app.command("dashboard")
def cluster_dashboard(
    region: _Region,
    dry_run: _DryRun = False,
) -> None:
    """Forward a region's pages and its address for jobs to this machine, until Ctrl-C."""
    from resources.regions.ray_clusters import CLIENT_PORT, DASHBOARD_PORT, LOCAL, local_cluster, tunnel_command

    if region == LOCAL:
        OUT.print(local_cluster().dashboard, highlight=False)
        return
    command = tunnel_command(_file(region, dry_run=dry_run))
    OUT.print(
        f"http://127.0.0.1:{DASHBOARD_PORT}   pages of {region}, while this runs\n"
        f"assay submit --backend ray://127.0.0.1:{CLIENT_PORT} -- python script.py   runs a job there",
        highlight=False,
        soft_wrap=True,
    )
    _run(command, dry_run=dry_run)


@cluster_app.command("status")
def cluster_status(region: _Region, dry_run: _DryRun = False) -> None:
    """Show a region's cluster as its head reports it: machines, demand, errors of the launcher."""
    from resources.regions.ray_clusters import LOCAL, local_cluster, status_command

    if region == LOCAL:
        cluster = local_cluster()
        OUT.print(f"up: {cluster.address}, pages at {cluster.dashboard}, job {cluster.job_id}", highlight=False)
        return
    _run(status_command(_file(region, dry_run=dry_run)), dry_run=dry_run)


@cluster_app.command("write")
def cluster_write(
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit code 1 if a file is out of date.")
    ] = False,
) -> None:
    """Write the cluster files of all regions, for Ray's own launcher; `assay cluster up` needs none."""
    from resources.regions.ray_clusters import render
    from resources.regions.regions import known_regions, regions_file

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
    for file in changed:
        OUT.print(f"{'out of date' if check else 'written'}: {file}", highlight=False, soft_wrap=True)
    if check and changed:
        raise typer.Exit(1)


def _file(region: str, *, dry_run: bool) -> Path:
    from resources.regions.ray_clusters import cluster_file
    from resources.regions.regions import known_regions

    return cluster_file(known_regions().named(region), dry_run=dry_run)


def _run(command: Sequence[str], *, dry_run: bool) -> None:
    shown = shlex.join(["ray", *command[1:]])
    if dry_run:
        OUT.print(shown, highlight=False, soft_wrap=True)
        return
    ERR.print(f"$ {shown}", style="dim", markup=False, highlight=False, soft_wrap=True)
    root = Path(__file__).parents[3]  # the cluster files name the pinned lists relative to this folder
    ended = subprocess.run(command, cwd=root, check=False)
    if ended.returncode:
        raise BackendUnavailable(
            expected=f"{shown} to end well",
            found=f"exit code {ended.returncode}",
            remedy="Read what it printed above; `gcloud auth application-default login` is needed once.",
        )
