"""Cleanup after a cancelled or crashed flow run: it ends the run's own claims and jobs, and no others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pools.jobs import labelled
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.jobs.jobs import Command, JobHandle, JobRequest, create_environment
from tasks.errors import ClaimLost
from tasks.policies.actions import end_claims, end_jobs
from tasks.running.claims.files import Subject, claims_folder
from tasks.running.claims.leases import Claims
from tasks.spec.names import job_label

RUN, OTHER = "0a1b2c3d-0000-4000-8000-000000000001", "9a1b2c3d-0000-4000-8000-000000000002"


class Cluster(LocalClient):
    """Fake of a cluster with jobs that outlive their submitter."""

    @property
    def url(self) -> str:
        return "cluster://somewhere"

    @property
    def is_local(self) -> bool:
        return False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    client = Cluster(tmp_path / "jobs", grace_seconds=1.0)
    yield client
    client.shutdown()


def start(client: LocalClient, name: str, folder: Path) -> JobHandle:
    command = Command(sys.executable, ("-c", "import time; time.sleep(600)"))
    environment = create_environment(workspace=folder)
    return client.submit(JobRequest(name, command, resources=ResourceConfig(), environment=environment))


def test_jobs_of_a_flow_run_are_ended_by_their_names_and_others_go_on(cluster: Cluster, tmp_path: Path):
    left = start(cluster, labelled("proxy", job_label(RUN), "abc"), tmp_path)
    others = [start(cluster, labelled("proxy", label, "abd"), tmp_path) for label in (job_label(OTHER), None)]
    assert end_jobs(cluster, flow_run=RUN) == 1
    assert left.status().finished
    assert not any(job.status().finished for job in others)
    assert end_jobs(LocalClient(tmp_path / "jobs"), flow_run=OTHER) == 0  # ends with its parent


@pytest.mark.parametrize("key", ["policy", "config", "request", "training"])
def test_claims_of_a_flow_run_end_and_other_claims_hold(tmp_path: Path, key: str):
    (tmp_path / "run").mkdir()
    parameters = {key: {"model_path": str(tmp_path / "run"), "evaluation_path": str(tmp_path / "out")}}
    if key == "policy":
        asked = {"name": "p", "runs": [str(tmp_path / "r*")], "suites": ["key_evals"], "base_url": "http://x/v1"}
        parameters = {key: {**asked, "evaluation_path": str(tmp_path / "out")}}
    if key == "training":
        request = {"evaluation_path": str(tmp_path / "out")}
        training = {"train_config": {}, "output_path": str(tmp_path / "run")}
        parameters = {"config": {"training": training, "suite": "key_evals", "request": request}}
    folder = claims_folder(str(tmp_path / "out"), "run")
    mine, others = (Subject(key=f"step-{n}.c", checkpoint=f"run-{n}", evaluation_hash="h") for n in (1, 2))
    with (
        Claims(folder, flow_run=RUN, in_background=False) as dead,
        Claims(folder, flow_run=OTHER, in_background=False) as alive,
    ):
        assert dead.acquire([mine]).ours and alive.acquire([others]).ours
        assert end_claims(parameters, flow_run=RUN) == 1
        with pytest.raises(ClaimLost):
            dead.prove(mine.key)
        alive.prove(others.key)
        assert end_claims(parameters, flow_run=RUN) == 0
        assert alive.acquire([mine]).ours == {mine.key}


def test_parameters_of_another_flow_leave_nothing_to_end(tmp_path: Path):
    assert end_claims({"policy": {"name": "no policy"}}, flow_run=RUN) == 0
    assert end_claims({"config": {"training": {}}}, flow_run=RUN) == 0
