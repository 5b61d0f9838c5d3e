"""`assay eval-job`: an evaluation on GKE from a YAML file, and the commands of its container."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter
from rich.table import Column

from flows.cli.evaluate import show_series
from flows.console.console import OUT, Json, note, print_json, say, table_of, write
from flows.console.running import run_series
from resources.errors import BackendUnavailable, BadInput
from resources.settings import settings
from tasks.eval_jobs.here import fetch_to, prepare, require_tracked
from tasks.eval_jobs.job_file import advice
from tasks.eval_jobs.manifests import CONFIGS_FOLDER, JOB_CONFIGURATION, SCRATCH_FOLDER, written
from tasks.eval_jobs.reading import read_job, summary
from tasks.eval_jobs.submission import job_documents, log_lines, names_in, submit_manifests, submitted_jobs, write_lines
from tasks.records.record import Record

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster

_HelmConfig = Annotated[
    Path | None, Parameter(help="HELM's run entries; run_specs.conf next to the job's file when left out.")
]
_Backend = Annotated[str | None, Parameter(help="kubernetes://context/namespace; see ASSAY_JOBS.")]
_Namespace = Annotated[str | None, Parameter(help="Namespace of the jobs.")]


def submit(
    file: Annotated[Path | None, Parameter(help="The job's file; may be left out with --job-spec.")] = None,
    /,
    *,
    check: bool = False,
    dry_run: bool = False,
    output: Path | None = None,
    job_spec: Path | None = None,
    again: bool = False,
    helm_config: _HelmConfig = None,
    allow_dirty: bool = False,
    backend: _Backend = None,
) -> None:
    """Submit a job to the cluster, and print its name; or check its files, or write its manifests.

    Args:
        check: Read the files, and report errors, or a summary of the job.
        dry_run: Print the manifests that would be submitted: the same bytes for the same files and commit.
        output: File for the manifests, which are not submitted; see --job-spec.
        job_spec: Manifests that --output wrote, submitted as they are.
        again: Submit under another name what was submitted before.
        allow_dirty: Take files that are not committed or pushed; a tag says so.
    """
    if check or output is not None:
        if file is None or job_spec is not None or (check and output is not None):
            raise BadInput(
                expected="FILE with --check or with --output", found="another combination", remedy="name the job's file"
            )
        _check(file, helm_config) if check else _render(file, output, helm_config, allow_dirty=allow_dirty)
        return
    documents = job_documents(file, job_spec, helm_file=helm_config, allow_dirty=allow_dirty)
    name, namespace = names_in(documents)
    if dry_run:
        write(written(documents))
        note(f"Nothing was submitted. {name} would run in the namespace {namespace}.")
        return
    name = submit_manifests(cluster_of(backend, namespace=namespace), documents, again=again)
    say(name)
    note(f"assay eval-job logs -f {name}   follows it")


def _check(file: Path, helm_config: Path | None) -> None:
    read = read_job(file, helm_file=helm_config)
    state = read.git_state()
    for line in [*advice(read.job), *([f"git: {state.words}"] if state.words != "clean" else ())]:
        note(f"warning: {line}")
    OUT.print(table_of(rows=summary(read, state).items()))


def _render(file: Path, output: Path | None, helm_config: Path | None, *, allow_dirty: bool) -> None:
    assert output is not None
    read = read_job(file, helm_file=helm_config)
    state = read.git_state(but=output)
    state.require_clean(allow_dirty=allow_dirty)
    output.write_text(written(read.manifests(state)))
    note(f"Wrote {output}. assay eval-job submit {file} --job-spec {output}   submits it")


def list_jobs(*, backend: _Backend = None, namespace: _Namespace = None, as_json: Json = False) -> None:
    """Show the evaluation jobs of a namespace."""
    jobs = submitted_jobs(cluster_of(backend, namespace=namespace))
    if as_json:
        print_json([asdict(job) for job in jobs])
        return
    headings = (Column("Job", overflow="fold"), "Status", "Submitted", "Experiment", "Commit", "Why")
    rows = [(job.name, job.status, job.submitted_at, job.experiment, job.commit[:8], job.reason or "") for job in jobs]
    OUT.print(table_of(*headings, rows=rows) if jobs else "No evaluation job is there.")


def logs(
    name: Annotated[str, Parameter(help="Name of the job.")],
    /,
    *,
    since: str | None = None,
    output: Path | None = None,
    follow: Annotated[bool, Parameter(("--follow", "-f"))] = False,
    backend: _Backend = None,
    namespace: _Namespace = None,
    project: str | None = None,
) -> None:
    """Show the log of a job: from its pods while they exist, from Cloud Logging afterwards.

    Args:
        since: Lines of the last 30m, 12h, 3d or 2w; all when left out.
        output: JSON file for the lines, in place of printing them.
        follow: Go on until the job ends.
        project: Google project of the cluster, for Cloud Logging.
    """
    try:
        cluster = cluster_of(backend, namespace=namespace)
    except BackendUnavailable:
        if project is None:
            raise
        cluster = None  # only Cloud Logging can have the job
    from resources.backends.kubernetes.cloud_logging import cloud_lines  # its package is an extra

    kept = partial(
        cloud_lines, name, namespace=cluster.namespace if cluster else namespace or "default", project=project
    )
    lines = log_lines(cluster, name, since=since, follow=follow, note=note, kept=kept)
    if output is not None:
        note(f"Wrote {write_lines(lines, output):,} lines to {output}.")
        return
    for line in lines:
        write(f"{line.text}\n")


def run(
    file: Annotated[Path | None, Parameter(help="The job's file, with --local.")] = None,
    /,
    *,
    config: Path | None = None,
    fetch: bool = False,
    local: bool = False,
    helm_config: _HelmConfig = None,
    scratch: Path | None = None,
    as_json: Json = False,
) -> None:
    """Evaluate a job's model and report to MLflow; the command of the container, or on this machine.

    Args:
        config: The job's file in a container.
        fetch: Only fetch the model to the scratch volume; the command of the init container.
        local: Run FILE here, on the CPU if there is no such GPU.
        scratch: Folder for the model and, by default, the records.
    """
    if local != (file is not None) or (local and (config is not None or fetch)):
        raise BadInput(
            expected="assay eval-job run FILE --local, or in a container assay eval-job run --config FILE",
            found="neither" if file is None and not local else "another combination",
            remedy="name the file in one of these ways",
        )
    read = read_job(file or config or Path(CONFIGS_FOLDER, JOB_CONFIGURATION), helm_file=helm_config)
    if fetch:
        say(fetch_to(scratch or Path(SCRATCH_FOLDER), read.job, note=note))
        return
    prepared = prepare(read, local=local, scratch=scratch, note=note)
    note(f"{prepared.origin.job_name}: {prepared.run_name}, records in {prepared.evaluation.evaluation_path}")

    def evaluate() -> list[Record]:
        from flows.suites import evaluate_request  # with Prefect

        return evaluate_request(prepared.evaluation, prepared.suite)

    result = run_series(evaluate, prepared.evaluation.evaluation_path, prepared.run_name)
    show_series(result, shown=print_json if as_json else None)
    require_tracked(result.records, prepared.sink)


def cluster_of(backend: str | None, *, namespace: str | None) -> Cluster:
    """Returns a namespace of a Kubernetes cluster: as given, else of ASSAY_JOBS, else of the kubeconfig."""
    usual = settings().jobs
    address = backend or (usual if usual and usual.startswith("kubernetes://") else None) or "kubernetes://"
    parts = urlsplit(address)
    named = parts.path.strip("/")
    if parts.scheme != "kubernetes" or (named and namespace and named != namespace):
        raise BadInput(
            expected="--backend kubernetes://context" + (f" with the namespace {namespace}" if namespace else ""),
            found=address,
            remedy="correct it, or leave it out for the kubeconfig's current context",
        )
    if find_spec("kubernetes") is None:
        raise BadInput(
            expected="the package kubernetes, which evaluation jobs need",
            found="it is not installed",
            remedy="Install the extra: pip install 'assay-evals[kubernetes]'",
        )
    from resources.backends.kubernetes.cluster import connect  # its package is an extra

    return connect(parts.netloc, namespace or named)
