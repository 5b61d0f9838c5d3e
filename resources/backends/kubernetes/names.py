"""Names and labels of a job's objects in a cluster.

Kubernetes allows 63 lower-case letters, digits and dashes, less the suffix that it and JobSet append to the name of an
attempt for its pods: `-slice-99-9999-abcde`. An annotation keeps the original name.
"""

from __future__ import annotations

import re
import secrets

PREFIX = "assay-evals"
MANAGED_BY = {"app.kubernetes.io/managed-by": PREFIX}
JOB_LABEL = f"{PREFIX}/job"
ATTEMPT_LABEL = f"{PREFIX}/attempt"
PART_LABEL = f"{PREFIX}/part"
"""Role of an object: a job's record, an attempt, stored logs, a result, or its keeper pod."""
NAME_ANNOTATION = f"{PREFIX}/name"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
SLICE = "slice"
"""Name of the Job template in a JobSet, which has a Job per slice."""
JOBSET_LABEL, SLICE_LABEL = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/job-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_LONGEST_STEM = 30


def dns_label(name: str, *, longest: int = _LONGEST_STEM) -> str:
    """Returns the nearest name that Kubernetes allows: `Eval_7B.step` becomes `eval-7b-step`."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"job-{label}"  # a Service's name must begin with a letter
    return label[:longest].strip("-")


def new_job_id(name: str) -> str:
    """Returns a new job id: the name as a DNS label, and 8 random hexadecimal digits."""
    return f"{dns_label(name)}-{secrets.token_hex(4)}"


def attempt_name(job_id: str, attempt: int) -> str:
    """Returns the name of an attempt's Job or JobSet, which its Secret and its headless Service share."""
    return f"{job_id}-{attempt}"


def logs_name(job_id: str, attempt: int) -> str:
    """Returns the name of the ConfigMap with the last lines of an attempt with deleted pods."""
    return f"{job_id}-{attempt}-logs"


def result_name(job_id: str, attempt: int, replica: int) -> str:
    """Returns the name of the ConfigMap with a replica's result."""
    return f"{job_id}-{attempt}-result-{replica}"


def keeper_pod_name(job_id: str) -> str:
    """Returns the name of the Job that controls a job which outlives its parent."""
    return f"{job_id}-keeper"


def labels(job_id: str, part: str, *, attempt: int | None = None) -> dict[str, str]:
    """Returns the labels of an object of a job."""
    job_labels = {**MANAGED_BY, JOB_LABEL: job_id, PART_LABEL: part}
    return job_labels if attempt is None else {**job_labels, ATTEMPT_LABEL: str(attempt)}


def selector(**parts: str | int) -> str:
    """Returns a label selector, as for `selector(job="a-1", attempt=2)`."""
    return ",".join(f"{PREFIX}/{name}={value}" for name, value in parts.items())
