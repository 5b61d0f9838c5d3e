"""Clients of the fake Kubernetes, through the real `kubernetes` package."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes

from fakes.kubernetes_server import KubernetesServer
from fakes.shared import shared
from resources.backends.kubernetes.client import KubernetesClient
from resources.backends.kubernetes.cluster import Cluster

IMAGE = "registry.example/assay:1"
LEASE_SECONDS = 6.0


@shared
def shared_server() -> Iterator[KubernetesServer]:
    server = KubernetesServer(Path(tempfile.mkdtemp(prefix="kubernetes-")))
    yield server
    server.close()


def cluster_of(server: KubernetesServer, *, patience_seconds: float = 5.0) -> Cluster:
    configuration = kubernetes.client.Configuration()
    kubernetes.config.load_kube_config(str(server.kubeconfig), client_configuration=configuration)
    configuration.retries = False  # pyright: ignore[reportAttributeAccessIssue]
    configuration.connection_pool_maxsize = 32
    return Cluster(kubernetes.client.ApiClient(configuration), "default", patience_seconds=patience_seconds)


def client_of(server: KubernetesServer, **options: Any) -> KubernetesClient:
    quick = {"image": IMAGE, "grace_seconds": 1.0, "lease_seconds": LEASE_SECONDS, "poll_seconds": 0.1}
    return KubernetesClient(cluster_of(server), **{**quick, **options})
