"""Backends on this machine, each through Assay's client and through its own, for the scripts about starts."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

from side_by_side import give_up, say

from resources.backends.current import client_from_url
from resources.jobs.jobs import Client

START_SECONDS = 120.0
_LOOK_SECONDS = 0.001
_NEXT_TRY_SECONDS = 1.0
_numbers = count()

Ends = Callable[[], object]
"""Ends the started program."""


@dataclass(frozen=True)
class Backend:
    name: str
    client: Client
    """Assay's client."""
    starts: Callable[[Sequence[str | Path], Mapping[str, str]], Ends]
    """Starts a command, with more variables, through the backend's own client."""
    facts: Mapping[str, Any] = field(default_factory=dict)


def seconds_until(condition: Callable[[], bool], since: float, *, at_most: float, event: str) -> float:
    """Returns wall seconds from `since` until a condition holds; ends the script after `at_most` seconds."""
    while not condition():
        if time.monotonic() - since > at_most:
            give_up(f"{event} took more than {at_most:g} s")
        time.sleep(_LOOK_SECONDS)
    return time.monotonic() - since


def as_process(command: Sequence[str | Path], variables: Mapping[str, str]) -> Ends:
    process = subprocess.Popen(list(command), env=_with(variables))

    def end() -> None:
        process.terminate()
        process.wait()

    return end


@contextmanager
def local_backend(work: Path) -> Iterator[Backend]:
    """This machine, with a process for each job and another for its supervisor; compared with a bare process."""
    client = client_from_url("local")
    try:
        yield Backend("local", client, as_process)
    finally:
        client.shutdown()


@contextmanager
def ray_backend(work: Path) -> Iterator[Backend]:
    """A Ray of a single node with the dashboard, used by its own client. Connects this process to it."""
    import ray
    from ray.job_submission import JobSubmissionClient

    from fakes.ray_cluster import connected, ray_cluster

    with ray_cluster(num_cpus=8, include_dashboard=True, dashboard_port=0) as cluster, connected(str(cluster.address)):
        assert cluster.head_node is not None
        submission = JobSubmissionClient(f"http://{cluster.head_node.webui_url}")

        def takes_jobs() -> bool:
            try:
                return bool(submission.submit_job(entrypoint="true"))
            except RuntimeError as error:  # the node's agent starts seconds after the node
                say(f"Ray takes no jobs yet: {error}")
                time.sleep(_NEXT_TRY_SECONDS)
                return False

        seconds_until(takes_jobs, time.monotonic(), at_most=START_SECONDS, event="the start of Ray's job agent")

        def as_submission(command: Sequence[str | Path], variables: Mapping[str, str]) -> Ends:
            # Its shell would stay between the program and the stop; an Assay job has no shell.
            line = f"exec {shlex.join(map(str, command))}"
            submitted = submission.submit_job(entrypoint=line, runtime_env={"env_vars": dict(variables)})
            return partial(submission.stop_job, submitted)

        client = client_from_url("ray://auto")
        try:
            yield Backend("ray", client, as_submission, {"ray": ray.__version__})
        finally:
            client.shutdown()


@contextmanager
def iris_backend(work: Path) -> Iterator[Backend]:
    """An Iris in a single process: controller, autoscaler and workers."""
    from iris.client import IrisClient
    from iris.cluster.types import Entrypoint, ResourceSpec

    from fakes.iris_cluster import start_cluster

    cluster = start_cluster()
    client = client_from_url(f"iris://{cluster.address}")
    own = IrisClient.remote(f"http://{cluster.address}", workspace=work)

    def as_iris_job(command: Sequence[str | Path], variables: Mapping[str, str]) -> Ends:
        set_ = [f"{name}={value}" for name, value in variables.items()]
        entrypoint = Entrypoint.from_command("env", *set_, *map(str, command))
        return own.submit(entrypoint, f"bare-{next(_numbers)}", ResourceSpec(cpu=1, memory="4g", disk="16g")).terminate

    try:
        yield Backend("iris", client, as_iris_job, {"iris": metadata.version("marin-iris")})
    finally:
        client.shutdown()
        own.shutdown()
        cluster.end()


@contextmanager
def slurm_backend(work: Path) -> Iterator[Backend]:
    """A Slurm with 2 slurmds, compared with sbatch and scancel. Debian packages provide its programs."""
    from fakes.slurm_cluster import PARTITION, missing_programs, start_cluster

    if missing := missing_programs():
        give_up(f"Slurm's programs are missing here: {', '.join(missing)}")
    with contextmanager(start_cluster)(Path(tempfile.mkdtemp(prefix="assay-slurm-"))) as cluster:
        client = cluster.client(
            work / "slurm", partition="urgent"
        )  # the partition of jobs that must not be preempted, as a pool's proxy

        def as_batch_job(command: Sequence[str | Path], variables: Mapping[str, str]) -> Ends:
            line = f"#!/bin/sh\nexec {shlex.join(map(str, command))}\n"
            options = ["--parsable", f"--partition={PARTITION}", "--chdir=/", "--output=/dev/null"]
            submitted = subprocess.run(
                ["sbatch", *options], input=line, text=True, capture_output=True, check=True, env=_with(variables)
            )
            return partial(cluster.command, "scancel", submitted.stdout.strip())

        try:
            version = cluster.command("sinfo", "--version").split()[1]
            yield Backend("slurm", client, as_batch_job, {"slurm": version})
        finally:
            client.shutdown()


def _with(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **variables}


BACKENDS: Mapping[str, Callable[[Path], AbstractContextManager[Backend]]] = {
    "local": local_backend,
    "iris": iris_backend,
    "slurm": slurm_backend,
    "ray": ray_backend,
}
"""Backends by name; Ray last: processes of its dashboard go on for a minute."""
