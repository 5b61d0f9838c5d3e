"""The job in MLflow: a sink with all tags of evaluation jobs, and the job's origin."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.eval_jobs.job_file import HelmRun, JobFile
from tasks.sinks.mlflow_runs import MlflowSink

GIT_STATE = "CONFIG_GIT_STATE"
"""Environment variable of the container with the git state."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The job's name and the origin of its files, passed to the container as environment variables."""

    job_name: str
    config_version: str | None
    """The commit."""
    config_path: str
    helm_config_path: str | None
    git_state: str
    """`clean`, or the problems that --allow-dirty accepted."""

    def variables(self) -> dict[str, str]:
        values = {
            "CONFIG_VERSION": self.config_version,
            "CONFIG_PATH_GIT_REPO": self.config_path,
            "HELM_CONFIG_PATH_GIT_REPO": self.helm_config_path,
            GIT_STATE: self.git_state,
            "JOB_NAME": self.job_name,
        }
        return {name: value for name, value in values.items() if value is not None}


def origin_in(variables: Mapping[str, str], *, otherwise: Origin) -> Origin:
    """Returns the origin in a container's variables; `otherwise` supplies missing values."""
    return Origin(
        job_name=variables.get("JOB_NAME", otherwise.job_name),
        config_version=variables.get("CONFIG_VERSION", otherwise.config_version),
        config_path=variables.get("CONFIG_PATH_GIT_REPO", otherwise.config_path),
        helm_config_path=variables.get("HELM_CONFIG_PATH_GIT_REPO", otherwise.helm_config_path),
        git_state=variables.get(GIT_STATE, otherwise.git_state),
    )


def sink_of(job: JobFile, origin: Origin, *, files: Iterable[Path] = ()) -> MlflowSink:
    """Returns the sink for a job's results, which also logs `files`."""
    tracking = job.tracking_config
    return MlflowSink(
        tracking_uri=job.mlflow_config.tracking_uri,
        experiment=tracking.experiment_name,
        run_name=tracking.run_name,
        description=tracking.description,
        tags={**flat_tags(tracking.tags), **job_tags(job, origin)},
        files=tuple(str(file.absolute()) for file in files),
    )


def job_tags(job: JobFile, origin: Origin) -> dict[str, str]:
    """Returns the tags of a job; `None` for missing values."""
    artifact, compute, request = job.model.mlflow_artifact, job.compute_config, job.request
    tags: dict[str, Any] = {
        "job_name": origin.job_name,
        "config_version": job.version,
        "config_git_sha": origin.config_version,
        "config_git_state": origin.git_state,
        "config_path_git_repo": origin.config_path,
        "helm_config_path_git_repo": origin.helm_config_path,
        "model_run_id": artifact.run_id if artifact else None,
        "model_artifact_path": artifact.artifact_path if artifact else None,
        "model_gs_uri": job.model.gs_uri,
        "accelerator": compute.accelerator,
        "accelerator_count": getattr(compute.device, "count", compute.count),
        "cpu": compute.cpu,
        "memory": compute.memory,
        "image": job.image,
        "image_tag": job.image_tag,
    }
    if isinstance(request, HelmRun):
        tags |= {"helm_args": " ".join(request.args), "helm_suite": request.suite}
    return {name: str(value) for name, value in tags.items()}


def flat_tags(tags: Mapping[str, Any], *, above: str = "") -> dict[str, str]:
    """Returns tags flattened for MLflow: `{a: {b: [1]}}` becomes `a.b` with `[1]`."""
    flat: dict[str, str] = {}
    for name, value in tags.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping):
            flat |= flat_tags(value, above=f"{key}.")
        else:
            flat[key] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat
