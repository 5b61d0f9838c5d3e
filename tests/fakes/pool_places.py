"""Backends for pools: each has a client, room for 2 replicas, and a way to lose a replica."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fakes.clients import GRACE_SECONDS
from faults.scenarios.processes import ancestors, command_line, job_of, variable_of
from resources.backends.local.client import LocalClient
from resources.jobs.jobs import Client, JobDetails


@dataclass(frozen=True)
class Place:
    client: Client
    lose: Callable[[Sequence[JobDetails]], JobDetails]
    """Loses a machine with its agent, given the jobs of its pool; returns the job of the lost replica.

    Of a multi-host replica it is the last machine, if that can be lost without the pool's proxy.
    """
    temporary: Path
    """The folder for temporary files of all programs of the place."""
    resources: dict[str, Any] = field(default_factory=dict)
    """Fields of a replica's resources that give each replica a machine of its own."""
    lasting: frozenset[str] = frozenset()
    """Names in the temporary folder of files that a machine has only once."""
    reach: dict[str, str] = field(default_factory=dict)
    """Variables with which another process reaches the backend."""


def agents(jobs: Sequence[JobDetails]) -> list[JobDetails]:
    return [job for job in jobs if job.name.startswith("replica-")]


def _process(job: JobDetails) -> int:
    # the process of the last host's agent, found by its job on this machine, which plays every machine
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    of_the_job = [pid for pid in pids if job_of(pid) == job.job_id]
    agents = [pid for pid in of_the_job if any("run_call.py" in word for word in command_line(pid))]
    return max(agents, key=lambda pid: int(variable_of(pid, "ASSAY_REPLICA_INDEX")))


@contextmanager
def _own_temporary_folder() -> Iterator[Path]:
    # for this process and its children; pytest's folders are too long for the sockets of Ray
    with tempfile.TemporaryDirectory(prefix="pools-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@contextmanager
def _local(folder: Path) -> Iterator[Place]:
    with _own_temporary_folder() as temporary:
        client = LocalClient(folder / "jobs", grace_seconds=GRACE_SECONDS)

        def lose(jobs: Sequence[JobDetails]) -> JobDetails:
            lost = agents(jobs)[0]
            os.kill(_process(lost), signal.SIGKILL)
            return lost

        yield Place(client, lose, temporary)
        client.shutdown()


@contextmanager
def _ray(folder: Path) -> Iterator[Place]:
    # a head with room for the proxy, and machines with room for 1 replica each, 1 of them spare
    from fakes.ray_cluster import add_node, client_of, ray_cluster

    with _own_temporary_folder() as temporary, ray_cluster(num_cpus=1) as cluster:
        for _ in range(3):
            add_node(cluster, num_cpus=1)

        def lose(jobs: Sequence[JobDetails]) -> JobDetails:
            lost = agents(jobs)[0]
            above = ancestors(_process(lost))
            machines = cluster.worker_nodes
            [machine] = [node for node in machines if node.all_processes["raylet"][0].process.pid in above]
            cluster.remove_node(machine, allow_graceful=False)
            return lost

        client = client_of(str(cluster.address), grace_seconds=GRACE_SECONDS)
        user = os.getuid()
        yield Place(client, lose, temporary, lasting=frozenset({f"assay-code-{user}", f"assay-machine-{user}"}))
        client.shutdown()


@contextmanager
def _iris(folder: Path) -> Iterator[Place]:
    # the tests' cluster of 2 machines with 900 cores; no machine has room for 2 replicas
    from fakes.iris_cluster import shared_cluster
    from resources.backends.programs.iris_records import call_controller

    cluster = shared_cluster()

    def lose(jobs: Sequence[JobDetails]) -> JobDetails:
        # loses the machine that does not also run the proxy
        tasks = [
            (job, task["workerId"])
            for job in jobs
            for task in call_controller(cluster.address, "ListTasks", jobId=job.job_id)["tasks"]
        ]
        [kept] = [worker for job, worker in tasks if job not in agents(jobs)]
        lost, worker = next((job, worker) for job, worker in reversed(tasks) if worker != kept)
        cluster.tell(f"lose {worker}")
        return lost

    client = cluster.client(grace_seconds=GRACE_SECONDS)
    yield Place(client, lose, cluster.temporary, {"cpu": 600}, reach={"ASSAY_JOBS": client.url})
    client.shutdown()


@contextmanager
def _kubernetes(folder: Path) -> Iterator[Place]:
    # a server of its own; its image writes below `folder`
    from fakes.kubernetes_cluster import IMAGE, client_of
    from fakes.kubernetes_server import KubernetesServer

    with _own_temporary_folder() as temporary:
        variables = {name: os.environ[name] for name in ("TMPDIR", "ASSAY_CACHE_DIR")}
        server = KubernetesServer(folder / "kubernetes", variables=variables)
        try:
            client = client_of(server, grace_seconds=GRACE_SECONDS)

            def lose(jobs: Sequence[JobDetails]) -> JobDetails:
                lost = agents(jobs)[0]
                server.lose_node_of(server.pods(lost.job_id)[-1])
                return lost

            reach = {"ASSAY_JOBS": "kubernetes://fake/default", "KUBECONFIG": str(server.kubeconfig)}
            yield Place(client, lose, temporary, reach={**reach, "ASSAY_JOB_IMAGE": IMAGE})
            client.shutdown()
        finally:
            server.close()


@contextmanager
def _slurm(folder: Path) -> Iterator[Place]:
    # the tests' cluster of 2 nodes with 32 cores; no node has room for 2 replicas
    from fakes.slurm_cluster import require_slurm, shared_slurm

    require_slurm()
    cluster = shared_slurm()
    with _own_temporary_folder() as temporary:
        client = cluster.client(
            folder / "slurm", partition="urgent", grace_seconds=GRACE_SECONDS
        )  # proxies have to stay

        def lose(jobs: Sequence[JobDetails]) -> JobDetails:
            lost = agents(jobs)[0]
            os.kill(_process(lost), signal.SIGKILL)
            return lost

        reach = {"ASSAY_JOBS": client.url, "ASSAY_SLURM_DIR": str(folder / "slurm")}
        yield Place(client, lose, temporary, {"cpu": 20}, reach=reach)
        client.shutdown()


PLACES: dict[str, Callable[[Path], AbstractContextManager[Place]]] = {
    "iris": _iris,
    "kubernetes": _kubernetes,
    "local": _local,
    "ray": _ray,
    "slurm": _slurm,
}
"""Context managers of places, given a folder of the test."""
