"""Manifests of a job for GKE, as data: deterministic for the same files and commit."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml
from coolname import RandomGenerator
from coolname.data import config as words

from resources.backends.kubernetes.devices import GPU_RESOURCE, placement
from resources.backends.kubernetes.manifests import NO_FAILURE_OF_THE_POD
from resources.backends.kubernetes.names import JOB_LABEL, MANAGED_BY, PART_LABEL, PREFIX, QUEUE_LABEL, dns_label
from resources.config import ResourceConfig
from resources.errors import BadInput
from tasks.eval_jobs.helm_conf import HELM_CONFIGURATION
from tasks.eval_jobs.job_file import JobFile, only_here
from tasks.eval_jobs.tracking import Origin

EVAL_JOB = "eval-job"
"""Value of the label that separates evaluation jobs from our other objects."""
EXPERIMENT, COMMIT = f"{PREFIX}/experiment", f"{PREFIX}/commit"
CONFIGS_FOLDER, SCRATCH_FOLDER = "/etc/configs", "/scratch"
JOB_CONFIGURATION = "eval_config.yml"
INIT, MAIN = "init", "eval"
"""The containers: the first fetches the model, the second evaluates it."""
_USER = 1000
_LONGEST_NAME = 52  # pods get six more characters, and host names are limited to 63
_LARGEST_BYTES = 1_000_000
_UNPRIVILEGED: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_SPOT, _MACHINE_FAMILY, _COMPUTE_CLASS, _WORKLOAD_IDENTITY = (
    "cloud.google.com/gke-spot",
    "cloud.google.com/machine-family",
    "cloud.google.com/compute-class",
    "iam.gke.io/gke-metadata-server-enabled",
)


@dataclass(frozen=True)
class JobTexts:
    """The contents of a job's two files."""

    job: str
    helm: str | None


def named(job: JobFile, texts: JobTexts, origin: Origin) -> Origin:
    """Returns an origin with the job's name, which is derived from its manifests."""
    name = readable_name(job.tracking_config.experiment_name, manifests(job, texts, replace(origin, job_name="")))
    return replace(origin, job_name=name)


def render(job: JobFile, texts: JobTexts, origin: Origin) -> str:
    """Returns the manifests of a job as YAML, with a name derived from them."""
    return written(manifests(job, texts, named(job, texts, origin)))


def readable_name(stem: str, content: Any) -> str:
    """Returns a job name, such as eval-…-merciful-crocodile-1f3a2b, deterministic for the content."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    end = "-".join([*RandomGenerator(words, random.Random(digest)).generate(2), digest[:6]])
    start = stem if stem.lower().startswith("eval") else f"eval-{stem}"
    return f"{dns_label(start, longest=max(4, _LONGEST_NAME - len(end) - 1))}-{end}"


def manifests(job: JobFile, texts: JobTexts, origin: Origin) -> list[dict[str, Any]]:
    """Returns the Job and its ConfigMap; raises BadInput if a pod could not run them."""
    if (problem := only_here(job)) is not None:
        raise BadInput(
            expected="a model and a tracking server that a pod can reach",
            found=problem,
            remedy="name a bucket, MLflow or a server, or run the job here: assay eval-job run FILE --local",
        )
    cluster, name = job.kubernetes_config, origin.job_name
    files = files_of(texts)
    if (size := sum(len(text.encode()) for text in files.values())) > _LARGEST_BYTES:
        raise BadInput(
            expected=f"job files of {_LARGEST_BYTES:,} bytes at most, to fit a ConfigMap",
            found=f"{size:,} bytes",
            remedy="leave out run entries, or split the job",
        )
    labels = {**MANAGED_BY, PART_LABEL: EVAL_JOB, JOB_LABEL: name}
    metadata = {
        "namespace": cluster.namespace,
        "labels": labels,
        "annotations": {EXPERIMENT: job.tracking_config.experiment_name, COMMIT: origin.config_version or "none"},
    }
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": configs_name(name), **metadata},
        "immutable": True,
        "data": files,
    }
    stays = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}  # else the autoscaler moves it to empty a node
    template = {"metadata": {"labels": labels, "annotations": stays}, "spec": _pod(job, origin)}
    queued = {"suspend": True} if cluster.queue_name else {}
    queue = {QUEUE_LABEL: cluster.queue_name} if cluster.queue_name else {}
    spec = {
        **queued,
        "ttlSecondsAfterFinished": cluster.ttl_seconds,
        "backoffLimit": cluster.backoff_limit,
        "podFailurePolicy": NO_FAILURE_OF_THE_POD,
        "template": template,
    }
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, **metadata, "labels": {**labels, **queue}},
            "spec": spec,
        },
        config_map,
    ]


def files_of(texts: JobTexts) -> dict[str, str]:
    """Returns the files below `/etc/configs` in the containers."""
    return {JOB_CONFIGURATION: texts.job, **({HELM_CONFIGURATION: texts.helm} if texts.helm is not None else {})}


def configs_name(job_name: str) -> str:
    """Returns the name of the ConfigMap of a job."""
    return f"{job_name}-configs"


def written(documents: list[dict[str, Any]]) -> str:
    """Returns manifests as YAML, with multi-line texts as blocks."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def renamed(documents: list[dict[str, Any]], name: str, new: str) -> list[dict[str, Any]]:
    """Returns manifests with a job's name, and names derived from it, replaced; the job's files are unchanged."""

    def changed(value: Any) -> Any:
        match value:
            case dict():
                return {key: part if key == "data" else changed(part) for key, part in value.items()}
            case list():
                return [changed(part) for part in value]
            case str() if value in (name, configs_name(name)):
                return new + value.removeprefix(name)
            case _:
                return value

    return [changed(document) for document in documents]


def _pod(job: JobFile, origin: Origin) -> dict[str, Any]:
    cluster, compute = job.kubernetes_config, job.compute_config
    resources = ResourceConfig(cpu=compute.cpu, ram=compute.memory, device=compute.device, preemptible=compute.spot)
    where = placement(resources)
    selector = {
        **where.node_selector,
        **({_SPOT: "true"} if compute.spot else {}),
        **({_MACHINE_FAMILY: compute.machine_family} if compute.machine_family else {}),
        **({_COMPUTE_CLASS: compute.compute_class} if compute.compute_class else {}),
        **({_WORKLOAD_IDENTITY: "true"} if cluster.workload_identity else {}),
    }
    devices = {name: amount for name, amount in where.limits.items() if name == where.node_resource}
    mounts = [
        {"name": "configs-volume", "mountPath": CONFIGS_FOLDER, "readOnly": True},
        {"name": "scratch-volume", "mountPath": SCRATCH_FOLDER},
    ]
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": cluster.storage_class,
        "resources": {"requests": {"storage": compute.disk}},
    }
    volumes: list[dict[str, Any]] = [
        {"name": "configs-volume", "configMap": {"name": configs_name(origin.job_name)}},
        {
            "name": "scratch-volume",
            "ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": {"type": "scratch-volume"}}, "spec": claim}},
        },
    ]
    shared_memory = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # for engines on several GPUs
    if int(devices.get(GPU_RESOURCE, 1)) > 1:
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    requests = {"cpu": str(compute.cpu), "memory": compute.memory}
    shared = {"image": job.image_reference, "env": list(_variables(job, origin)), "securityContext": _UNPRIVILEGED}
    fetching = {"cpu": "1", "memory": "2Gi"}
    return {
        "serviceAccountName": cluster.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"nodeSelector": selector} if selector else {}),
        **({"tolerations": where.tolerations} if where.tolerations else {}),
        "initContainers": [
            {
                "name": INIT,
                **shared,
                "args": _arguments("fetch"),
                "resources": {"requests": fetching, "limits": {"memory": fetching["memory"]}},
                "volumeMounts": mounts,
            }
        ],
        "containers": [
            {
                "name": MAIN,
                **shared,
                "args": _arguments("run"),
                "resources": {
                    "requests": {**requests, **devices},
                    "limits": {"memory": compute.memory, **devices},
                },
                "volumeMounts": [*mounts, *(shared_memory if len(volumes) > 2 else ())],
            }
        ],
        "volumes": volumes,
    }


def _arguments(verb: str) -> list[str]:
    place = ["--config", f"{CONFIGS_FOLDER}/{JOB_CONFIGURATION}", "--scratch", SCRATCH_FOLDER]
    return ["eval-job", verb, *place]


def _variables(job: JobFile, origin: Origin) -> Iterator[dict[str, Any]]:
    plain: Mapping[str, str] = {
        **origin.variables(),
        "MLFLOW_TRACKING_URI": job.mlflow_config.tracking_uri,
        # The root file system of an Autopilot pod is small.
        "TMPDIR": SCRATCH_FOLDER,
    }
    for name, value in plain.items():
        yield {"name": name, "value": value}
    for name, reference in job.kubernetes_config.secrets.items():
        secret, _, key = reference.partition("/")
        yield {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _as_block)
