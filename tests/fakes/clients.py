"""Clients of every backend for the contract tests: an entry here makes all of them run on that backend."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from fakes.iris_cluster import shared_cluster
from resources.backends.local.client import LocalClient
from resources.jobs.jobs import Client, JobHandle

GRACE_SECONDS = 1.5  # enough for a shell to exit on a busy machine; jobs that ignore SIGTERM use all of it


def _ray_client() -> Client:
    from fakes.ray_cluster import client_of, shared_ray

    return client_of(shared_ray(), grace_seconds=GRACE_SECONDS)


def _kubernetes_client() -> Client:
    from fakes.kubernetes_cluster import client_of, shared_server

    return client_of(shared_server(), grace_seconds=GRACE_SECONDS)


def _slurm_client(folder: Path) -> Client:
    from fakes.slurm_cluster import require_slurm, shared_slurm

    require_slurm()
    return shared_slurm().client(folder / "slurm", grace_seconds=GRACE_SECONDS)


CLIENTS: dict[str, Callable[[Path], Client]] = {
    "iris": lambda folder: shared_cluster().client(grace_seconds=GRACE_SECONDS),
    "kubernetes": lambda _: _kubernetes_client(),
    "local": lambda folder: LocalClient(folder / "jobs", grace_seconds=GRACE_SECONDS),
    "ray": lambda _: _ray_client(),
    "slurm": _slurm_client,
}
"""Client factories with a short grace, given a folder of the test; a slow cluster is shared, as the entry says."""


def kill_for_want_of_memory(client: Client, job: JobHandle, *, pid: int, counter: Path) -> None:
    """Kills a process of a job as its machine does when memory runs out.

    Args:
        counter: the file that the job's supervisor reads as the kernel's counter.
    """
    from resources.backends.kubernetes.client import KubernetesClient

    if isinstance(client, KubernetesClient):  # the kubelet reports it
        from fakes.kubernetes_cluster import shared_server

        server = shared_server()
        server.run_out_of_memory(server.pods(job.job_id)[0])
        return
    counter.write_text("oom_kill 5\n")
    os.kill(pid, signal.SIGKILL)
