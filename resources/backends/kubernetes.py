"""The entry to the Kubernetes backend: a client for a namespace of a cluster."""

from __future__ import annotations

from resources.backends.kubernetes_client import KubernetesClient
from resources.backends.kubernetes_cluster import connect
from resources.settings import settings


def client_from_address(context: str, namespace: str) -> KubernetesClient:
    """A client with the settings of this machine; for the arguments and errors see `connect`."""
    return KubernetesClient(
        connect(context, namespace), image=settings().job_image, lease_seconds=settings().job_lease_seconds
    )
