"""Time limits, and job ends first seen after slurmctld had forgotten them, on a Slurm with an accounting database."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fakes.polling import eventual_pid, eventually
from fakes.processes import end
from fakes.slurm_cluster import SlurmCluster, batch_pid, require_accounting, slurm_id, start_cluster, start_slurmdbd
from resources.backends.slurm.client import SlurmClient, SlurmJob
from resources.config import ResourceConfig
from resources.errors import BackendUnavailable
from resources.jobs.jobs import Command, JobRequest, JobStatus, create_environment

pytestmark = [pytest.mark.timeout(180), pytest.mark.slurm]

SMALL, WHOLE_NODE = ResourceConfig(ram="1g"), ResourceConfig(cpu=32)
UNSEEN = {"cancelled": SMALL, "killed": SMALL, "timed-out": SMALL, "lost": WHOLE_NODE}
WATCHED = ("near-limit", "over-limit")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    require_accounting()
    with tempfile.TemporaryDirectory(prefix="assay-slurm-", ignore_cleanup_errors=True) as folder:
        yield from start_cluster(Path(folder), accounting=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("accounting")
    (folder / "code").mkdir()
    return folder


@pytest.fixture(scope="module")
def jobs(cluster: SlurmCluster, folder: Path) -> Iterator[dict[str, SlurmJob]]:
    """Jobs by name, run concurrently: ending them takes up to half a minute, and so does forgetting them."""
    with running(cluster, folder) as watching, running(cluster, folder) as client:
        jobs = {name: submit(client, folder, name, resources=UNSEEN[name], unseen=True) for name in reversed(UNSEEN)}
        jobs |= {name: submit(watching, folder, name) for name in WATCHED}
        for name in jobs:
            eventual_pid(folder / name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", "/no/python")  # as on a node without the login node's Python
            jobs["without-python"] = submit(client, folder, "without-python", unseen=True)
        client.shutdown()  # nothing queues them again
        ids = {name: slurm_id(folder / "slurm", job.job_id) for name, job in jobs.items()}
        cluster.command("scancel", ids["cancelled"])
        os.kill(batch_pid(jobs["killed"].job_id), signal.SIGKILL)
        for name in ("timed-out", "lost"):
            cluster.command("scontrol", "update", f"JobId={ids[name]}", "Requeue=0")  # as at sites without requeues
        for name, limit in {"timed-out": "now", "over-limit": "now", "near-limit": "now+100"}.items():
            eventually(partial(cluster.has_set, ids[name], f"EndTime={limit}"))  # "now" may be over when it is read
        node = cluster.command("squeue", "-h", "-o", "%N", "-j", ids["lost"]).strip()
        cluster.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        yield jobs


@contextmanager
def running(cluster: SlurmCluster, folder: Path) -> Iterator[SlurmClient]:
    client = cluster.client(folder / "slurm", grace_seconds=2.0)
    yield client
    client.shutdown()


def submit(
    client: SlurmClient, folder: Path, name: str, *, resources: ResourceConfig = SMALL, unseen: bool = False
) -> SlurmJob:
    """Submits a job that runs forever at its first start and succeeds at its second; `unseen` detaches it."""
    script = f"[ -e {folder}/{name} ] && exit 0; echo $$ > {folder}/{name}; while :; do sleep 0.1; done"
    environment = create_environment(workspace=folder / "code")
    command = Command("sh", ("-c", script))
    return client.submit(
        JobRequest(name, command, resources=resources, environment=environment, outlives_parent=unseen)
    )


@pytest.mark.parametrize("name", WATCHED)
def test_job_at_its_time_limit_begins_again_and_that_is_a_preemption(jobs: dict[str, SlurmJob], name: str) -> None:
    assert jobs[name].wait(90) is JobStatus.SUCCEEDED
    details = jobs[name].details()
    assert (details.attempts, details.failures, details.preemptions) == (2, 0, 1)


def test_ends_that_slurmctld_has_forgotten_are_read_from_the_accounting_once_it_answers(
    cluster: SlurmCluster, jobs: dict[str, SlurmJob], folder: Path
) -> None:
    unseen = {name: job for name, job in jobs.items() if name not in WATCHED}
    ids = [slurm_id(folder / "slurm", job.job_id) for job in unseen.values()]
    eventually(lambda: not any(map(cluster.knows, ids)))
    end(cluster.programs["slurmdbd"])
    with pytest.raises(BackendUnavailable, match="database"):
        unseen["killed"].status()
    cluster.programs["slurmdbd"] = start_slurmdbd(cluster.folder)
    details = {name: job.details() for name, job in unseen.items()}
    assert {name: (seen.status, seen.failures, seen.preemptions) for name, seen in details.items()} == {
        "cancelled": (JobStatus.STOPPED, 0, 0),
        "without-python": (JobStatus.FAILED, 1, 0),
        **dict.fromkeys(("killed", "timed-out", "lost"), (JobStatus.FAILED, 0, 1)),
    }
    words = {"cancelled": "CANCELLED", "without-python": "FAILED", "killed": "FAILED", "timed-out": "TIMEOUT"}
    for name, word in {**words, "lost": "NODE_FAIL"}.items():
        assert word in (details[name].reason or "")
    assert "cannot queue it again" in (details["timed-out"].reason or "")
