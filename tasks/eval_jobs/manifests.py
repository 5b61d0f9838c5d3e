"""Manifests of a job for GKE, as data: deterministic for the same files and commit."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml
from coolname import RandomGenerator
from coolname.data import config as words
from jinja2 import Environment, PackageLoader, StrictUndefined

from resources.backends.kubernetes.devices import GPU_RESOURCE, placement
from resources.backends.kubernetes.manifests import NO_FAILURE_OF_THE_POD
from resources.backends.kubernetes.names import JOB_LABEL, MANAGED_BY, PART_LABEL, PREFIX, QUEUE_LABEL, dns_label
from resources.config import ResourceConfig
from resources.errors import BadInput
from resources.storage.yaml_text import load_yaml_documents
from tasks.eval_jobs.job_file import JobFile, only_here

EVAL_JOB = "eval-job"
"""Value of the label that separates evaluation jobs from our other objects."""
EXPERIMENT, COMMIT = f"{PREFIX}/experiment", f"{PREFIX}/commit"
CONFIGS_FOLDER, SCRATCH_FOLDER = "/etc/configs", "/scratch"
JOB_CONFIGURATION = "eval_config.yml"
GIT_STATE = "CONFIG_GIT_STATE"
"""Environment variable of the container with the git state."""
_VARIABLES = {
    "config_version": "CONFIG_VERSION",
    "config_path": "CONFIG_PATH_GIT_REPO",
    "helm_config_path": "HELM_CONFIG_PATH_GIT_REPO",
    "git_state": GIT_STATE,
    "job_name": "JOB_NAME",
}
_LONGEST_NAME = 52  # pods get six more characters, and host names are limited to 63
_LARGEST_BYTES = 1_000_000


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
        values = {variable: getattr(self, name) for name, variable in _VARIABLES.items()}
        return {variable: value for variable, value in values.items() if value is not None}

    def in_container(self, variables: Mapping[str, str]) -> Origin:
        """Returns the origin in a container's variables; this origin supplies missing values."""
        given = {name: variables[variable] for name, variable in _VARIABLES.items() if variable in variables}
        return replace(self, **given)


def readable_name(stem: str, content: Any) -> str:
    """Returns a job name, such as eval-…-merciful-crocodile-1f3a2b, deterministic for the content."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    end = "-".join([*RandomGenerator(words, random.Random(digest)).generate(2), digest[:6]])
    start = stem if stem.lower().startswith("eval") else f"eval-{stem}"
    return f"{dns_label(start, longest=max(4, _LONGEST_NAME - len(end) - 1))}-{end}"


def manifests(job: JobFile, files: Mapping[str, str], origin: Origin) -> list[dict[str, Any]]:
    """Returns the Job and its ConfigMap with the job's files; raises BadInput if a pod could not run them."""
    if (problem := only_here(job)) is not None:
        raise BadInput(
            expected="a model and a tracking server that a pod can reach",
            found=problem,
            remedy="name a bucket, MLflow or a server, or run the job here: assay eval-job run FILE --local",
        )
    if (size := sum(len(text.encode()) for text in files.values())) > _LARGEST_BYTES:
        raise BadInput(
            expected=f"job files of {_LARGEST_BYTES:,} bytes at most, to fit a ConfigMap",
            found=f"{size:,} bytes",
            remedy="leave out run entries, or split the job",
        )
    cluster, compute = job.kubernetes_config, job.compute_config
    where = placement(
        ResourceConfig(cpu=compute.cpu, ram=compute.memory, device=compute.device, preemptible=compute.spot)
    )
    selector = {
        **where.node_selector,
        "cloud.google.com/gke-spot": "true" if compute.spot else None,
        "cloud.google.com/machine-family": compute.machine_family,
        "cloud.google.com/compute-class": compute.compute_class,
        "iam.gke.io/gke-metadata-server-enabled": "true" if cluster.workload_identity else None,
    }
    devices = {name: amount for name, amount in where.limits.items() if name == where.node_resource}
    plain = {
        **origin.variables(),
        "MLFLOW_TRACKING_URI": job.mlflow_config.tracking_uri,
        "TMPDIR": SCRATCH_FOLDER,  # the root file system of an Autopilot pod is small
    }
    secrets = {name: reference.partition("/") for name, reference in cluster.secrets.items()}
    templates = Environment(loader=PackageLoader("tasks.eval_jobs"), undefined=StrictUndefined, trim_blocks=True)
    templates.filters |= {"yaml": _on_a_line, "combined": lambda first, second: {**first, **second}}
    text = templates.get_template("job.yaml.j2").render(
        job=job,
        cluster=cluster,
        compute=compute,
        name=origin.job_name,
        configs_name=configs_name(origin.job_name),
        labels={**MANAGED_BY, PART_LABEL: EVAL_JOB, JOB_LABEL: origin.job_name},
        annotations={EXPERIMENT: job.tracking_config.experiment_name, COMMIT: origin.config_version or "none"},
        queue_label=QUEUE_LABEL,
        pod_failure_policy=NO_FAILURE_OF_THE_POD,
        selector={label: value for label, value in selector.items() if value is not None},
        tolerations=where.tolerations,
        devices=devices,
        shares_memory=int(devices.get(GPU_RESOURCE, 1)) > 1,  # for engines on several GPUs
        variables=[
            *({"name": name, "value": value} for name, value in plain.items()),
            *(
                {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
                for name, (secret, _, key) in secrets.items()
            ),
        ],
        configs=CONFIGS_FOLDER,
        job_configuration=f"{CONFIGS_FOLDER}/{JOB_CONFIGURATION}",
        scratch=SCRATCH_FOLDER,
        files=files,
    )
    return load_yaml_documents(text)


def configs_name(job_name: str) -> str:
    """Returns the name of the ConfigMap of a job."""
    return f"{job_name}-configs"


def written(documents: list[dict[str, Any]]) -> str:
    """Returns manifests as YAML, with multi-line texts as blocks."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _on_a_line(value: Any) -> str:
    content = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=float("inf"))
    return content.strip()[1:-1]


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_TEXT = "tag:yaml.org,2002:str"
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_TEXT, text, style="|" if "\n" in text else None)
)
