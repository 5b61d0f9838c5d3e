"""Names and labels of what a job puts into a cluster.

Kubernetes allows lower-case letters, digits and dashes, 63 of them, less what it and JobSet append to the name of an
attempt for its pods: `-slice-99-9999-abcde`.
The name as it was given stays in an annotation.
"""

from __future__ import annotations

import re
import secrets

PREFIX = "assay-evals"
MANAGED_BY = {"app.kubernetes.io/managed-by": PREFIX}
JOB_LABEL = f"{PREFIX}/job"
ATTEMPT_LABEL = f"{PREFIX}/attempt"
PART_LABEL = f"{PREFIX}/part"
"""Role of an object in the job: its record, an attempt, kept logs, its keeper pod; or the heartbeat of an owner."""
NAME_ANNOTATION = f"{PREFIX}/name"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
SLICE = "slice"
"""The part of a JobSet that is one Job for each slice."""
JOBSET_LABEL, SLICE_LABEL = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/job-index"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_LONGEST_STEM = 30


def dns_label(name: str, *, longest: int = _LONGEST_STEM) -> str:
    """The nearest name that Kubernetes allows: `Eval_7B.step` is `eval-7b-step`."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"job-{label}"  # a Service's name begins with a letter
    return label[:longest].strip("-")


def new_job_id(name: str) -> str:
    """A job's id: what its name becomes, and something that nobody has used."""
    return f"{dns_label(name)}-{secrets.token_hex(4)}"


def attempt_name(job_id: str, attempt: int) -> str:
    """The Job or JobSet of one attempt; its Secret and its headless Service are called the same."""
    return f"{job_id}-{attempt}"


def logs_name(job_id: str, attempt: int) -> str:
    """The ConfigMap with the last lines of an attempt whose pods were deleted."""
    return f"{job_id}-{attempt}-logs"


def result_name(job_id: str, attempt: int, replica: int) -> str:
    """The ConfigMap with the result of one replica."""
    return f"{job_id}-{attempt}-result-{replica}"


def heartbeat_name(owner: str) -> str:
    """The ConfigMap that an owner rewrites as long as it lives."""
    return f"{owner}-heartbeat"


def keeper_pod_name(job_id: str) -> str:
    """The Job that looks after a job which outlives its parent."""
    return f"{job_id}-keeper"


def labels(job_id: str, part: str, *, attempt: int | None = None) -> dict[str, str]:
    """Labels of one object of a job."""
    found = {**MANAGED_BY, JOB_LABEL: job_id, PART_LABEL: part}
    return found if attempt is None else {**found, ATTEMPT_LABEL: str(attempt)}


def selector(**parts: str | int) -> str:
    """A label selector: `selector(job="a-1", attempt=2)`."""
    return ",".join(f"{PREFIX}/{name}={value}" for name, value in parts.items())
