"""Entry point of the Kubernetes backend."""

from __future__ import annotations

from resources.backends.kubernetes.client import KubernetesClient
from resources.backends.kubernetes.cluster import connect
from resources.errors import BadInput
from resources.settings import job_id, settings

LEAST_LEASE_SECONDS = 180.0
"""A kubelet checks about once a minute, on a copy up to a minute old; the owner sends ten heartbeats per lease."""


def client_from_address(host: str, path: str, *, queue: str | None = None) -> KubernetesClient:
    """Returns a client with the settings of this machine; for further errors see `connect`."""
    lease_seconds = settings().job_lease_seconds
    if lease_seconds < LEAST_LEASE_SECONDS and not job_id():  # inside a job the submitter's lease applies
        raise BadInput(
            expected=f"ASSAY_JOB_LEASE_SECONDS of {LEAST_LEASE_SECONDS:g} or more",
            found=f"{lease_seconds:g}: a pod may see a sign of life two minutes late, and would end itself meanwhile",
            remedy="set more, or leave it out for 300",
        )
    return KubernetesClient(
        connect(host, path.strip("/")), image=settings().job_image, queue=queue, lease_seconds=lease_seconds
    )
