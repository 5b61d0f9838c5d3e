"""Real Ray clusters on this machine, a raylet per node, on loopback, without agents and (by default) the dashboard.

Those of 6 nodes use more processor time than their jobs.

A process can be connected to a single Ray, so `connected` takes the address. The tests' configuration imports
`fakes.ray_variables` first; a script must do so itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
from ray._private import ray_constants, services
from ray.cluster_utils import Cluster

from fakes.shared import shared
from resources.backends.ray.client import RayClient

OBJECT_STORE_BYTES = 100 * 2**20
MEMORY_BYTES = 256 * 2**30
"""Memory that a node claims to have; Ray only counts it."""
_IDLE_AGENT = Path(__file__).with_name("idle_ray_agent.py")


def add_node(
    cluster: Cluster,
    *,
    num_cpus: float = 8,
    num_gpus: float = 0,
    memory_bytes: int = MEMORY_BYTES,
    resources: Mapping[str, float] | None = None,
    labels: Mapping[str, str] | None = None,
    env_vars: Mapping[str, str] | None = None,
    runtime_environments: bool = False,
    **options: Any,
) -> Any:
    """Starts a node, the head if it is the first; `cluster.remove_node(node, allow_graceful=False)` kills it.

    Args:
        num_cpus: CPUs that it claims to have.
        num_gpus: GPUs that it claims to have.
        memory_bytes: memory that it claims to have.
        resources: custom resources, such as `{"TPU-v4-8-head": 1, "TPU": 4}`.
        labels: such as `{"ray.io/availability-region": "us-east1"}`.
        env_vars: for its raylet and its workers: a `TMPDIR` of its own makes it look like another machine.
        runtime_environments: if it can make them. Ray's own jobs and its server for Ray Client need this on every
            node: a node without it ends by itself after 30 s.
        options: other fields of `ray._private.parameter.RayParams`.
    """
    if cluster.head_node is None:
        spared = {"include_log_monitor": False, "no_monitor": True}
        options = {**spared, "node_ip_address": "127.0.0.1", **options}
    dashboard = options.get("include_dashboard", False)
    with nullcontext() if dashboard else _spared(runtime_environments=runtime_environments):
        return cluster.add_node(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            memory=memory_bytes,
            object_store_memory=OBJECT_STORE_BYTES,
            resources=dict(resources or {}),
            labels=dict(labels or {}),
            env_vars=dict(env_vars or {}),
            **options,
        )


@contextmanager
def _spared(*, runtime_environments: bool) -> Iterator[None]:
    # nodes start no dashboard, which Ray starts even if it is not included, and idle agents
    idle = {ray_constants.PROCESS_TYPE_DASHBOARD_AGENT}
    if not runtime_environments:
        idle.add(ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT)
    name = "_build_python_executable_command_memory_profileable"
    python_for = getattr(services, name)

    def python_of_ours_for(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component in idle:
            return [sys.executable, "-I", "-S", str(_IDLE_AGENT)]
        return python_for(component, *arguments, **options)

    no_dashboard = patch.object(services, "start_api_server", lambda *_, **__: ("", None))
    with patch.object(services, name, python_of_ours_for), no_dashboard:
        yield


@contextmanager
def ray_cluster(**head: Any) -> Iterator[Cluster]:
    """Runs a cluster with its head node, started with the options of `add_node`; this process is not connected to it.

    A head takes 4 s to start, a further node 2 s. All nodes end with the block.
    """
    cluster = Cluster()
    try:
        add_node(cluster, **head)
        yield cluster
    finally:
        _stop(cluster)


@contextmanager
def connected(address: str, **options: Any) -> Iterator[None]:
    """Connects this process as a driver to the Ray at `address` only, for the block."""
    ray.shutdown()
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    try:
        yield
    finally:
        ray.shutdown()


@shared
def shared_ray() -> Iterator[str]:
    with ray_cluster() as cluster:
        yield str(cluster.address)


def client_of(address: str, *, grace_seconds: float = 0.5) -> RayClient:
    """Returns a client with a short grace for the Ray at `address`; disconnects from another Ray first."""
    if ray.is_initialized() and ray.get_runtime_context().gcs_address != address:
        ray.shutdown()
    return RayClient(address, grace_seconds=grace_seconds)


def _stop(cluster: Cluster) -> None:
    if ray.is_initialized() and ray.get_runtime_context().gcs_address == cluster.address:
        ray.shutdown()
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node, allow_graceful=False)
    if cluster.head_node is not None:
        cluster.remove_node(cluster.head_node, allow_graceful=False)
