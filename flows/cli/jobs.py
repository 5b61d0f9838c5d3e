"""The commands that run any program on any backend: `assay submit` and `assay jobs`."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from flows.console.console import ERR, OUT, Json, print_json, write
from resources.errors import BackendUnavailable, BadInput, JobFailed
from resources.jobs.jobs import JobDetails, JobStatus

jobs_app = typer.Typer(help="Jobs of a backend, of all users.", no_args_is_help=True)

SUBMIT_SETTINGS = {"allow_interspersed_args": False}
"""For typer: arguments after the program belong to it, with or without `--`."""

_Backend = Annotated[
    str | None, typer.Option(help="local, ray://…, iris://…, kubernetes://… or slurm://…; see ASSAY_JOBS.")
]
_Cluster = Annotated[str | None, typer.Option(help="Region of the cluster, or local.")]
_JobId = Annotated[str, typer.Argument(help="Id of the job.")]


def submit(
    command: Annotated[list[str], typer.Argument(help="Program and arguments, such as -- python script.py.")],
    name: Annotated[str | None, typer.Option(help="Name of the job; the script's when left out.")] = None,
    backend: _Backend = None,
    cluster: _Cluster = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Show its log until it ends, or only its id.")] = True,
    auto_stop: Annotated[bool, typer.Option("--auto-stop", help="End the job when this command ends.")] = False,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="KEY=VALUE, or KEY; repeatable.")] = None,
    extra: Annotated[list[str] | None, typer.Option("--extra", help="Extras of this project, a,b; repeatable.")] = None,
    pip: Annotated[list[str] | None, typer.Option("--pip", help="Requirement for the job; repeatable.")] = None,
    cpu: Annotated[int | None, typer.Option(help="CPU cores per replica; as its device needs when left out.")] = None,
    ram: Annotated[str | None, typer.Option(help="Memory per replica; as its device needs when left out.")] = None,
    disk: Annotated[str | None, typer.Option(help="Local disk per replica; as its device needs when left out.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPUs per replica: H100:8, H100, or 8.")] = None,
    tpu: Annotated[
        str | None, typer.Option(help="TPU slice per replica, such as v5litepod-16; or several that do.")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Replicas; they succeed or fail together.")] = 1,
    region: Annotated[
        list[str] | None, typer.Option("--region", help="Region allowed, best first; repeatable.")
    ] = None,
    zone: Annotated[str | None, typer.Option(help="A zone of the region.")] = None,
    preemptible: Annotated[
        bool, typer.Option("--preemptible/--on-demand", help="Accept a machine that can be taken away.")
    ] = True,
    image: Annotated[str | None, typer.Option(help="Container image, in place of this folder.")] = None,
    retries: Annotated[int, typer.Option(help="Number of failed attempts that are tried again.")] = 0,
    preemption_retries: Annotated[int, typer.Option(help="Number of preempted attempts that are tried again.")] = 100,
) -> None:
    """Run a program as a job with this folder's code; exit code 0, 1 if it failed, 2 infrastructure, 3 bad input."""
    from flows.cli.options.jobs import SubmitOptions, client_of, request_of
    from flows.console.job_following import follow

    if auto_stop and not wait:
        raise BadInput(
            expected="--auto-stop while this command waits, or --no-wait", found="both", remedy="Omit either."
        )
    options = SubmitOptions(
        command=tuple(command),
        name=name,
        cpu=cpu,
        ram=ram,
        disk=disk,
        gpu=gpu,
        tpu=tpu,
        replicas=replicas,
        regions=tuple(region or ()),
        zone=zone,
        preemptible=preemptible,
        image=image,
        pip=tuple(pip or ()),
        extras=tuple(extra or ()),
        variables=tuple(env or ()),
        retries=retries,
        preemption_retries=preemption_retries,
        outlives_parent=not auto_stop,
    )
    request = request_of(options, workspace=Path.cwd())
    client = client_of(backend=backend, cluster=cluster)
    try:
        job = client.submit(request)
    except KeyboardInterrupt:
        _note("Interrupted while the job was being submitted. assay jobs list   shows whether it is there")
        raise typer.Exit(130) from None
    if not wait:
        OUT.print(job.job_id, highlight=False, soft_wrap=True)
        return
    _note(f"{job.job_id} on {client.description}")
    place = f" --cluster {cluster}" if cluster else f" --backend {backend}" if backend else ""
    goes_on = f"{job.job_id} goes on. assay jobs logs -f {job.job_id}{place}   comes back to it"
    try:
        details = follow(job, replicas=range(request.replica_count), write=write, note=_note)
    except BackendUnavailable:
        if not auto_stop:
            _note(goes_on)
        raise
    except (KeyboardInterrupt, SystemExit) as ended:
        if auto_stop:
            _note(f"Ending {job.job_id} …")
            job.terminate()
        else:
            _note(goes_on)
        raise typer.Exit(130 if isinstance(ended, KeyboardInterrupt) else int(ended.code or 0)) from None
    _end_with(details)


@jobs_app.command("list")
def jobs_list(
    backend: _Backend = None,
    cluster: _Cluster = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of jobs to show, the newest first.")] = 20,
    as_json: Json = False,
) -> None:
    """Show the jobs that are running or that the backend still remembers."""
    from flows.cli.options.jobs import client_of

    jobs = client_of(backend=backend, cluster=cluster).jobs()[:lines]
    if as_json:
        print_json([asdict(job) for job in jobs])
        return
    table = Table("Job", "Status", "Attempts", "Submitted", "Why")
    table.columns[0].overflow = "fold"
    for job in jobs:
        why = Text(job.reason or "")  # unchanged: brackets are not markup
        table.add_row(job.job_id, job.status, str(job.attempts), _when(job.submitted_at), why)
    OUT.print(table if jobs else "No job is remembered there.")


@jobs_app.command("status")
def jobs_status(job_id: _JobId, backend: _Backend = None, cluster: _Cluster = None, as_json: Json = False) -> None:
    """Show the state of a job, and its reason."""
    from flows.cli.options.jobs import client_of

    details = client_of(backend=backend, cluster=cluster).attach(job_id).details()
    if as_json:
        print_json(asdict(details))
        return
    table = Table(show_header=False, box=None)
    for label, value in asdict(details).items():
        shown = _when(details.submitted_at) if label == "submitted_at" else str(value if value is not None else "–")
        table.add_row(label.replace("_", " "), Text(shown))
    OUT.print(table)


@jobs_app.command("logs")
def jobs_logs(
    job_id: _JobId,
    backend: _Backend = None,
    cluster: _Cluster = None,
    follow_: Annotated[
        bool, typer.Option("--follow", "-f", help="All of it, until the job ends, with its exit code.")
    ] = False,
    replica: Annotated[int | None, typer.Option(help="Index of a replica; all when left out.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of last lines to show; with -f all.")] = 200,
) -> None:
    """Show the log of a job."""
    from flows.cli.options.jobs import client_of
    from flows.console.job_following import follow

    job = client_of(backend=backend, cluster=cluster).attach(job_id)
    if not follow_:
        text = job.logs(lines, replica=replica)
        write(f"{text}\n" if text else "")
        return
    replicas = [replica] if replica is not None else range(job.details().replicas or 1)
    details = follow(job, replicas=replicas, write=write, note=_note)
    _end_with(details)


@jobs_app.command("stop")
def jobs_stop(
    job_ids: Annotated[list[str], typer.Argument(help="Ids of jobs.")],
    backend: _Backend = None,
    cluster: _Cluster = None,
) -> None:
    """End jobs with all their processes."""
    from flows.cli.options.jobs import client_of
    from flows.console.job_following import ending_of

    client = client_of(backend=backend, cluster=cluster)
    for job in [client.attach(job_id) for job_id in job_ids]:
        job.terminate()
        OUT.print(ending_of(job.details()), highlight=False, markup=False, soft_wrap=True)


def _end_with(details: JobDetails) -> None:
    from flows.console.job_following import ending_of, is_lost

    if is_lost(details):
        raise JobFailed(
            expected=f"job {details.job_id} to run to its end",
            found=ending_of(details),
            remedy="Submit it again; with --preemption-retries it is started again by itself.",
        )
    _note(ending_of(details))
    raise typer.Exit(0 if details.status is JobStatus.SUCCEEDED else 1)


def _when(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


def _note(text: str) -> None:
    ERR.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
