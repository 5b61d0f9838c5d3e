"""Evaluation jobs in a cluster: the real client against a fake that prints a job's arguments and a line of a file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fakes.cloud_logging import cloud_logging, entry
from fakes.eval_jobs import write_job
from fakes.kubernetes_cluster import cluster_of
from fakes.kubernetes_server import KubernetesServer, Refusal
from fakes.polling import eventually
from resources.backends.kubernetes.cloud_logging import cloud_lines
from resources.backends.kubernetes.cluster import Cluster
from resources.backends.kubernetes.logs import pod_lines
from resources.errors import BackendUnavailable, BadInput
from tasks.eval_jobs.reading import read_job
from tasks.eval_jobs.submission import SubmittedJob, log_lines, submit_manifests, submitted_jobs

SAYS = 'echo "$@ in $JOB_NAME"; head -1 "$4"'
NODE = {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    entrypoint = ("sh", "-c", SAYS, "assay")
    server = KubernetesServer(tmp_path_factory.mktemp("cluster"), nodes={"t4": NODE}, entrypoint=entrypoint)
    yield server
    server.close()


@pytest.fixture
def cluster(server: KubernetesServer) -> Cluster:
    return cluster_of(server)


def manifests(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    read = read_job(write_job(folder, **changes))
    return read.manifests(read.git_state())


def ended(cluster: Cluster, name: str) -> SubmittedJob:
    eventually(lambda: next(job for job in submitted_jobs(cluster) if job.name == name).ended)
    return next(job for job in submitted_jobs(cluster) if job.name == name)


def test_job_fetches_then_runs_with_its_files_and_its_log_can_be_followed(cluster: Cluster, tmp_path: Path) -> None:
    notes: list[str] = []
    name = submit_manifests(cluster, manifests(tmp_path, version="v1"))
    kept = partial(cloud_lines, name, namespace="default")  # not queried: it has no credentials in this test
    lines = list(log_lines(cluster, name, since=None, follow=True, note=notes.append, kept=kept))
    assert [line.container for line in lines] == ["init", "init", "eval", "eval"]
    texts = [line.text.split(" --config ")[0] for line in lines]
    assert texts == ["eval-job run", "compute_config:", "eval-job run", "compute_config:"]
    assert lines[0].text.endswith(f"in {name}") and notes == [f"the log of {name} from its pods"]
    job = ended(cluster, name)
    assert (job.status, job.experiment, job.reason) == ("succeeded", "eval-test-debug", None)
    later = datetime.now(UTC) + timedelta(hours=1)
    assert not list(pod_lines(cluster, name, later))


def test_name_is_used_once_unless_it_is_asked_for_again(
    cluster: Cluster, server: KubernetesServer, tmp_path: Path
) -> None:
    documents = manifests(tmp_path, version="v2")
    name = submit_manifests(cluster, documents)
    with pytest.raises(BadInput, match="--again"):
        submit_manifests(cluster, documents)
    assert submit_manifests(cluster, documents, again=True) == f"{name}-2"
    assert ended(cluster, f"{name}-2").status == "succeeded"
    pod = next(pod for kind, pod in server.objects.items() if kind[0] == "pods" and f"{name}-2" in kind[1])
    assert {"name": "JOB_NAME", "value": f"{name}-2"} in pod["spec"]["containers"][0]["env"]
    cluster.delete("jobs", name)
    eventually(lambda: ended(cluster, name).status == "ended")
    with pytest.raises(BadInput, match="--again"):
        submit_manifests(cluster, documents)


def test_job_that_the_cluster_refuses_leaves_nothing_behind(
    cluster: Cluster, server: KubernetesServer, tmp_path: Path
) -> None:
    documents = manifests(tmp_path, version="v3")
    server.refusals.append(Refusal("POST", "jobs", 403))
    with pytest.raises(BackendUnavailable, match="forbidden"):
        submit_manifests(cluster, documents)
    assert submit_manifests(cluster, documents)


def test_lines_of_pods_that_are_gone_come_from_cloud_logging(cluster: Cluster) -> None:
    notes: list[str] = []
    with cloud_logging(entry("eval-gone", f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "kept")) as kept:
        read = partial(cloud_lines, namespace="default", project="team", options=kept.options)
        gone, absent = partial(read, "eval-gone"), partial(read, "eval-nobody")
        lines = log_lines(cluster, "eval-gone", since="3d", follow=False, note=notes.append, kept=gone)
        assert [line.text for line in lines] == ["kept"]
        assert "Cloud Logging" in notes[0]
        with pytest.raises(BadInput, match="eval-nobody"):
            list(log_lines(cluster, "eval-nobody", since=None, follow=False, note=notes.append, kept=absent))
        without = log_lines(None, "eval-gone", since=None, follow=False, note=notes.append, kept=gone)
        assert [line.text for line in without] == ["kept"]
