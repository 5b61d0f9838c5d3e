"""Reads the files of a job with their state in git, and makes the evaluation that they request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pools.config import InferencePoolConfig, ModelConfig
from resources.config import Device, ResourceConfig
from resources.errors import BadInput
from tasks.eval_jobs.helm import HELM_CONFIGURATION, RunEntry, read_run_entries
from tasks.eval_jobs.job_file import UNSET_MODEL, HelmRun, JobEvaluation, JobFile, JobSuite, only_here
from tasks.eval_jobs.manifests import JOB_CONFIGURATION, Origin, manifests, readable_name
from tasks.evaluators.helm.evaluator import ALL_ENTRIES
from tasks.records.provenance import git_output
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.loading import build_config, load_config
from tasks.spec.sinks import Sink
from tasks.spec.suites import SuiteRequest, load_suite

CLEAN = "clean"
_SET_BY_THE_JOB = {"suite", "model_path", "model_name", "evaluation_path", "sinks", "pool_config", "resource_config"}


@dataclass(frozen=True)
class GitState:
    """A commit, and the differences of the working tree from it."""

    root: Path | None
    """Folder of the repository; None outside of a repository."""
    commit: str | None
    changed: tuple[str, ...] = ()
    """Files that differ from the commit, or are not in it."""
    pushed: bool = False
    """True if a remote branch has the commit."""

    @property
    def words(self) -> str:
        """The state for a tag: `clean`, or the problems."""
        if self.commit is None:
            return "no commit"
        changes = [f"uncommitted: {', '.join(self.changed[:5])}" + ("…" if self.changed[5:] else "")]
        problems = [*(changes if self.changed else ()), *(["not pushed"] if not self.pushed else ())]
        return "; ".join(problems) or CLEAN

    def path_of(self, file: Path) -> str:
        """Returns the path of a file within the repository, else the path as given."""
        absolute = file.resolve()
        inside = self.root is not None and absolute.is_relative_to(self.root)
        return str(absolute.relative_to(self.root)) if inside and self.root is not None else str(file)

    def require_clean(self, *, allow_dirty: bool) -> None:
        """Raises BadInput if the files differ from a pushed commit, unless `allow_dirty`."""
        if self.words != CLEAN and not allow_dirty:
            raise BadInput(
                expected="job files that are committed and pushed, so that config_git_sha names what ran",
                found=self.words,
                remedy="commit and push, or let --allow-dirty write this into a tag",
            )


def git_state_of(files: Collection[Path], *, but: Path | None = None) -> GitState:
    """Returns the state of the first file's repository, without `but`; files not tracked by git count as changed."""
    first, *_ = files
    root = _git(first.resolve().parent, "rev-parse", "--show-toplevel")
    if root is None:
        return GitState(None, None)
    folder = Path(root).resolve()
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    listed = _git(folder, "status", "--porcelain=v1", "--untracked-files=all", "-z") or ""
    changed = [entry[3:] for entry in listed.split("\0") if entry[2:3] == " "]
    for file in files:  # files that git ignores, or outside of the repository
        if _git(folder, "ls-files", "--error-unmatch", "--", str(file.resolve())) is None:
            changed.append(GitState(folder, None).path_of(file))
    written = GitState(folder, None).path_of(but) if but is not None else None
    pushed = bool(commit and _git(folder, "branch", "--remotes", "--contains", commit))
    return GitState(folder, commit, tuple(dict.fromkeys(name for name in changed if name != written)), pushed)


def _git(folder: Path, *arguments: str) -> str | None:
    return git_output(folder, *arguments, timeout_seconds=60)  # git status is slow in a large repository


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """A job with the files that it was read from and their contents."""

    file: Path
    helm_file: Path | None = None
    """The file of run entries; None for a job without HELM."""
    job: JobFile
    texts: Mapping[str, str]
    """Contents of its files, by their names below `/etc/configs` in the containers."""
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

    def manifests(self, state: GitState) -> list[dict[str, Any]]:
        """Returns its manifests, with a name derived from them."""
        return manifests(self.job, self.texts, self.origin(state, job_name=self.name_in_pods(state)))

    def name_in_pods(self, state: GitState) -> str:
        """Returns a name that is derived from its manifests."""
        unnamed = manifests(self.job, self.texts, self.origin(state))
        return readable_name(self.job.tracking_config.experiment_name, unnamed)

    def name_here(self, state: GitState) -> str:
        """Returns a name for a job outside of a cluster."""
        return readable_name(self.job.tracking_config.experiment_name, [*self.texts.values(), state.commit])


def read_job(file: Path, *, helm_file: Path | None = None) -> EvalJob:
    """Reads the file of a job, and HELM's run entries if it needs them: `run_specs.conf` next to it by default."""
    job = load_config(str(file), JobFile)
    texts = {JOB_CONFIGURATION: file.read_text()}
    if not isinstance(job.request, HelmRun):
        if helm_file is not None:
            raise BadInput(
                expected="--helm-config with a job that has helm: {args, suite}",
                found=f"{file} without it",
                remedy="leave --helm-config out",
            )
        if isinstance(job.request, JobSuite):
            load_suite(job.request.suite)
        evaluation_of(job)
        return EvalJob(file=file, job=job, texts=texts)
    conf = helm_file or file.parent / HELM_CONFIGURATION
    entries = read_run_entries(str(conf))
    evaluation_of(job, helm_config=str(conf), entries=entries)
    texts[HELM_CONFIGURATION] = conf.read_text()
    return EvalJob(file=file, helm_file=conf, job=job, texts=texts, entries=entries)


def summary(read: EvalJob, state: GitState) -> dict[str, str]:
    """Returns a summary of a job by subject; raises the errors of `render`."""
    job, compute = read.job, read.job.compute_config
    request = job.request
    if isinstance(request, HelmRun):
        names = Counter(entry.name for entry in read.entries)
        limit = request.options.max_eval_instances
        asked = "HELM: " + ", ".join(f"{name} × {times}" if times > 1 else name for name, times in names.items())
        asked += f"; {limit} questions each" if limit else ""
    elif isinstance(request, JobSuite):
        asked = f"suite {request.suite}"
    else:
        asked = f"{request.evaluator.name}: {request.asked}"
    accelerator = f"{compute.count or ''} {compute.accelerator or 'no accelerator'}".strip()
    return {
        "job": read.name_in_pods(state) if only_here(job) is None else read.name_here(state),
        "image": job.image_reference,
        "pod": f"{compute.cpu} CPU, {compute.memory}, {compute.disk} scratch, {accelerator}",
        "model": job.model.uri,
        "asks": asked,
        "tracked": f"{job.mlflow_config.tracking_uri}, experiment {job.tracking_config.experiment_name}",
        "config": f"{state.path_of(read.file)} at {state.commit or 'no commit'}, {state.words}",
    }


def evaluation_of(
    job: JobFile,
    *,
    model_path: str = UNSET_MODEL,
    evaluation_path: str = "evaluations",
    device: Device | None = None,
    helm_config: str | None = None,
    entries: Sequence[RunEntry] = (),
    sinks: tuple[Sink, ...] = (),
) -> EvaluationConfig | SuiteRequest:
    """Returns the evaluation of a job; a suite request if `job.request` is a suite. `device`: the local device if it
    differs from the job's. `sinks`: in addition to the job's own."""
    request, compute = job.request, job.compute_config
    resources = ResourceConfig(
        cpu=compute.cpu,
        ram=compute.memory,
        disk=compute.disk,
        device=device or compute.device,
        preemptible=compute.spot,
    )
    own = request.model_fields_set - _SET_BY_THE_JOB if not isinstance(request, HelmRun) else ()
    name = getattr(request, "model_name", None) or job.model.name
    content: dict[str, Any] = {
        **{field: getattr(request, field) for field in own},
        "model_path": model_path,
        "model_name": name,
        "evaluation_path": request.evaluation_path
        if "evaluation_path" in request.model_fields_set
        else evaluation_path,
        "sinks": (*job.sinks, *sinks),
    }
    if isinstance(request, JobSuite):
        pool = _pool(request.pool_config, resources, name, engine_kwargs={}) if request.pool_config else None
        return build_config(
            {**content, "resource_config": resources, "pool_config": pool}, SuiteRequest, source="the job"
        )
    if isinstance(request, HelmRun):
        options = request.options
        content |= {
            "evaluator": {"name": "helm", "run_specs_path": helm_config, **options.options},
            "evals": [{"name": name} for name in _scenarios(entries, options.options)],
            "max_eval_instances": options.max_eval_instances,
            "wandb_tags": (f"helm_suite={request.suite}",) if request.suite else (),
        }
    if isinstance(request, JobEvaluation) and request.native:
        return build_config({**content, "resource_config": resources}, EvaluationConfig, source="the job")
    given = None if isinstance(request, HelmRun) else request.pool_config
    pool = _pool(given, resources, name, engine_kwargs=getattr(request, "engine_kwargs", {}))
    return build_config({**content, "pool_config": pool}, EvaluationConfig, source="the job")


def _scenarios(entries: Sequence[RunEntry], options: Mapping[str, Any]) -> list[str]:
    if "groups" in options:  # only HELM can resolve groups
        return [ALL_ENTRIES]
    priority = options.get("priority")
    selected = [entry for entry in entries if priority is None or (entry.priority or 0) <= priority]
    if entries and not selected:
        raise BadInput(
            expected=f"run entries with a priority of {priority} or a lower number, as helm.args says",
            found=f"none of {len(entries)}",
            remedy="raise --priority, or leave it out",
        )
    return list(dict.fromkeys(entry.name for entry in selected))


def _pool(
    given: InferencePoolConfig | None, resources: ResourceConfig, name: str, *, engine_kwargs: dict[str, Any]
) -> InferencePoolConfig:
    if given is None:
        return InferencePoolConfig(resource_config=resources, model=ModelConfig(name=name, engine_kwargs=engine_kwargs))
    return given.model_copy(
        update={"resource_config": resources.model_copy(update={"replicas": given.resource_config.replicas})}
    )
