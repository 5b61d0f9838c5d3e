"""`assay eval-job`: an evaluation on GKE from a YAML file, and the commands of its container."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from flows.console.console import ERR, OUT, Json, print_json, write
from resources.errors import BackendUnavailable, BadInput

eval_job_app = typer.Typer(help="Evaluations on GKE, each from a YAML file.", no_args_is_help=True)

_File = Annotated[Path, typer.Argument(help="The job's file.")]
_HelmConfig = Annotated[
    Path | None, typer.Option(help="HELM's run entries; run_specs.conf next to the job's file when left out.")
]
_AllowDirty = Annotated[
    bool, typer.Option("--allow-dirty", help="Take files that are not committed or pushed; a tag says so.")
]
_Backend = Annotated[str | None, typer.Option(help="kubernetes://context/namespace; see ASSAY_JOBS.")]
_Config = Annotated[Path | None, typer.Option(help="The job's file in a container.")]
_Scratch = Annotated[Path | None, typer.Option(help="Folder for the model and, by default, the records.")]


@eval_job_app.command()
def check(file: _File, helm_config: _HelmConfig = None) -> None:
    """Read a job's file and HELM's, and report errors, or a summary of the job."""
    from tasks.eval_jobs.job_file import advice
    from tasks.eval_jobs.reading import read_job, summary

    read = read_job(file, helm_file=helm_config)
    state = read.git_state()
    for line in [*advice(read.job), *([f"git: {state.words}"] if state.words != "clean" else ())]:
        _note(f"warning: {line}")
    table = Table(show_header=False, box=None)
    for name, value in summary(read, state).items():
        table.add_row(name, Text(value))
    OUT.print(table)


@eval_job_app.command()
def render(
    file: _File,
    output: Annotated[Path | None, typer.Option(help="File for the manifests; printed when left out.")] = None,
    helm_config: _HelmConfig = None,
    allow_dirty: _AllowDirty = False,
) -> None:
    """Write the manifests of a job: the same bytes for the same files and commit."""
    from tasks.eval_jobs.manifests import written
    from tasks.eval_jobs.reading import read_job

    read = read_job(file, helm_file=helm_config)
    state = read.git_state(but=output)
    state.require_clean(allow_dirty=allow_dirty)
    text = written(read.manifests(state))
    if output is None:
        write(text)
    else:
        output.write_text(text)
        _note(f"Wrote {output}. assay eval-job submit {file} --job-spec {output}   submits it")


@eval_job_app.command()
def submit(
    file: Annotated[Path | None, typer.Argument(help="The job's file; may be left out with --job-spec.")] = None,
    job_spec: Annotated[Path | None, typer.Option(help="Manifests that render wrote, submitted as they are.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Submit under another name what was submitted before.")
    ] = False,
    helm_config: _HelmConfig = None,
    allow_dirty: _AllowDirty = False,
    backend: _Backend = None,
) -> None:
    """Submit a job to the cluster; prints its name."""
    from flows.cli.options.jobs import cluster_of
    from tasks.eval_jobs.manifests import written
    from tasks.eval_jobs.submission import job_documents, names_in, submit_manifests

    documents = job_documents(file, job_spec, helm_file=helm_config, allow_dirty=allow_dirty)
    name, namespace = names_in(documents)
    if dry_run:
        write(written(documents))
        _note(f"Nothing was submitted. {name} would run in the namespace {namespace}.")
        return
    name = submit_manifests(cluster_of(backend, namespace=namespace), documents, again=again)
    OUT.print(name, highlight=False, soft_wrap=True)
    _note(f"assay eval-job logs -f {name}   follows it")


@eval_job_app.command("list")
def list_jobs(
    backend: _Backend = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the jobs.")] = None,
    as_json: Json = False,
) -> None:
    """Show the evaluation jobs of a namespace."""
    from flows.cli.options.jobs import cluster_of
    from tasks.eval_jobs.submission import submitted_jobs

    jobs = submitted_jobs(cluster_of(backend, namespace=namespace))
    if as_json:
        print_json([job.as_values() for job in jobs])
        return
    table = Table("Job", "Status", "Submitted", "Experiment", "Commit", "Why")
    table.columns[0].overflow = "fold"
    for job in jobs:
        table.add_row(job.name, job.status, job.submitted_at, Text(job.experiment), job.commit[:8], job.reason or "")
    OUT.print(table if jobs else "No evaluation job is there.")


@eval_job_app.command()
def logs(
    name: Annotated[str, typer.Argument(help="Name of the job.")],
    since: Annotated[str | None, typer.Option(help="Lines of the last 30m, 12h, 3d or 2w; all when left out.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file for the lines, in place of printing them.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    backend: _Backend = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the job.")] = None,
    project: Annotated[str | None, typer.Option(help="Google project of the cluster, for Cloud Logging.")] = None,
) -> None:
    """Show the log of a job: from its pods while they exist, from Cloud Logging afterwards."""
    from flows.cli.options.jobs import cluster_of
    from tasks.eval_jobs.submission import log_lines, write_lines

    try:
        cluster = cluster_of(backend, namespace=namespace)
    except BackendUnavailable:
        if project is None:
            raise
        cluster = None  # only Cloud Logging can have the job
    from resources.backends.kubernetes.cloud_logging import CloudLogs

    kept = CloudLogs(cluster.namespace if cluster else namespace or "default", project=project)
    lines = log_lines(cluster, name, since=since, follow=follow, note=_note, kept=kept)
    if output is not None:
        _note(f"Wrote {write_lines(lines, output):,} lines to {output}.")
        return
    for line in lines:
        write(f"{line.text}\n")


@eval_job_app.command()
def fetch(config: _Config = None, scratch: _Scratch = None) -> None:
    """Fetch the model of a job to the scratch volume; the command of the init container."""
    from tasks.eval_jobs.here import fetch_to
    from tasks.eval_jobs.reading import container_file, read_job

    folder = fetch_to(scratch, read_job(container_file(config)).job, note=_note)
    OUT.print(folder, highlight=False, soft_wrap=True)


@eval_job_app.command()
def run(
    file: Annotated[Path | None, typer.Argument(help="The job's file, with --local.")] = None,
    config: _Config = None,
    local: Annotated[bool, typer.Option("--local", help="Run FILE here, on the CPU if there is no such GPU.")] = False,
    helm_config: _HelmConfig = None,
    scratch: _Scratch = None,
    as_json: Json = False,
) -> None:
    """Evaluate a job's model and report to MLflow; the command of the container, or on this machine."""
    from flows.cli.evaluate import show_series
    from flows.console.running import run_series
    from flows.eval_jobs import evaluate_job
    from tasks.eval_jobs.here import prepare, require_tracked
    from tasks.eval_jobs.reading import container_file, read_job

    if local != (file is not None) or (local and config is not None):
        raise BadInput(
            expected="assay eval-job run FILE --local, or in a container assay eval-job run --config FILE",
            found=" ".join(sys.argv[3:]) or "neither",
            remedy="name the file in one of these ways",
        )
    read = read_job(file or container_file(config), helm_file=helm_config)
    prepared = prepare(read, local=local, scratch=scratch, note=_note)
    _note(f"{prepared.origin.job_name}: {prepared.run_name}, records in {prepared.evaluation.evaluation_path}")
    result = run_series(
        lambda: evaluate_job(prepared),
        evaluation_path=prepared.evaluation.evaluation_path,
        run_name=prepared.run_name,
        console=ERR,
    )
    show_series(result, as_json=as_json)
    require_tracked(result.records, prepared.sink)


def _note(text: str) -> None:
    ERR.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
