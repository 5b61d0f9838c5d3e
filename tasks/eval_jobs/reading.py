"""Reads the files of a job and validates them together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resources.errors import BadInput
from tasks.eval_jobs.evaluations import evaluation_of
from tasks.eval_jobs.git_state import GitState, git_state_of
from tasks.eval_jobs.helm_conf import HELM_CONFIGURATION, RunEntry, read_run_entries
from tasks.eval_jobs.job_file import HelmRun, JobFile, JobSuite, only_here
from tasks.eval_jobs.manifests import CONFIGS_FOLDER, JOB_CONFIGURATION, JobTexts, named, readable_name, render
from tasks.eval_jobs.tracking import Origin
from tasks.spec.loading import load_config
from tasks.spec.suites import load_suite


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """A job with the files that it was read from and their contents."""

    file: Path
    helm_file: Path | None
    """The file of run entries; None for a job without HELM."""
    job: JobFile
    texts: JobTexts
    entries: tuple[RunEntry, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file, *((self.helm_file,) if self.helm_file else ()))

    def git_state(self, *, but: Path | None = None) -> GitState:
        """Returns the state of the repository of its files, except `but`, a file that is being written."""
        return git_state_of(self.files, but=but)

    def origin(self, state: GitState, *, job_name: str = "") -> Origin:
        return Origin(
            job_name=job_name,
            config_version=state.commit,
            config_path=state.path_of(self.file),
            helm_config_path=state.path_of(self.helm_file) if self.helm_file else None,
            git_state=state.words,
        )

    def manifests(self, state: GitState) -> str:
        return render(self.job, self.texts, self.origin(state))

    def name_here(self, state: GitState) -> str:
        """Returns a name for a job outside of a cluster."""
        content: list[Any] = [self.texts.job, self.texts.helm, state.commit]
        return readable_name(self.job.tracking_config.experiment_name, content)


def read_job(file: Path, *, helm_file: Path | None = None) -> EvalJob:
    """Reads the file of a job, and HELM's run entries if it needs them: `run_specs.conf` next to it by default."""
    job = load_config(str(file), JobFile)
    request = job.request
    if not isinstance(request, HelmRun):
        if helm_file is not None:
            raise BadInput(
                expected="--helm-config with a job that has helm: {args, suite}",
                found=f"{file} without it",
                remedy="leave --helm-config out",
            )
        if isinstance(request, JobSuite):
            load_suite(request.suite)
        evaluation_of(job)
        return EvalJob(file=file, helm_file=None, job=job, texts=JobTexts(file.read_text(), None))
    conf = helm_file or file.parent / HELM_CONFIGURATION
    entries = read_run_entries(str(conf))
    evaluation_of(job, helm_config=str(conf), entries=entries)
    return EvalJob(
        file=file, helm_file=conf, job=job, texts=JobTexts(file.read_text(), conf.read_text()), entries=entries
    )


def summary(read: EvalJob, state: GitState) -> dict[str, str]:
    """Returns a summary of a job by subject; raises the errors of `render`."""
    job, compute = read.job, read.job.compute_config
    request = job.request
    if isinstance(request, HelmRun):
        names = Counter(entry.name for entry in read.entries)
        limit = request.options.max_eval_instances
        asked = "HELM: " + ", ".join(f"{name} × {times}" if times > 1 else name for name, times in names.items())
        asked += f"; {limit} questions each" if limit else ""
    else:
        asked = (
            f"suite {request.suite}" if isinstance(request, JobSuite) else f"{request.evaluator.name}: {request.asked}"
        )
    origin = read.origin(state)
    accelerator = f"{compute.count or ''} {compute.accelerator or 'no accelerator'}".strip()
    return {
        "job": named(job, read.texts, origin).job_name if only_here(job) is None else read.name_here(state),
        "image": job.image_reference,
        "pod": f"{compute.cpu} CPU, {compute.memory}, {compute.disk} scratch, {accelerator}",
        "model": job.model.uri,
        "asks": asked,
        "tracked": f"{job.mlflow_config.tracking_uri}, experiment {job.tracking_config.experiment_name}",
        "config": f"{state.path_of(read.file)} at {state.commit or 'no commit'}, {state.words}",
    }


def container_file(given: Path | None) -> Path:
    """Returns the job's file in a container, by default below `/etc/configs`."""
    return given or Path(CONFIGS_FOLDER, JOB_CONFIGURATION)
