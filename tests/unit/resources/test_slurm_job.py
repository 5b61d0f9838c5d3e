"""A handle on a Slurm job, with a scripted cluster: readers change nothing, and the submitter acts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from resources.backends.slurm.client import SlurmJob
from resources.backends.slurm.slurm import Slurm
from resources.backends.slurm.states import Seen
from resources.jobs.jobs import JobStatus

HELD = Seen("PENDING", "launch failed requeued held")
KILLED = Seen("FAILED", exit_code=-9)


@dataclass
class Cluster:
    """A cluster with a job, which only the test changes; it records orders."""

    seen: Seen | None
    orders: list[str] = field(default_factory=list)
    on_release: Callable[[], object] = lambda: None

    def state(self, slurm_id: str) -> Seen | None:
        return self.seen

    state_now = state

    def release(self, slurm_id: str) -> None:
        self.on_release()
        self.orders.append("release")

    def __getattr__(self, order: str) -> Any:
        return lambda *_: self.orders.append(order)


def job(folder: Path, seen: Seen | None, *, retries: int = 3, **status: Any) -> tuple[SlurmJob, Cluster]:
    """Writes the files of a running job 7 with a fresh lease."""
    specification = {"name": "job", "submitted_at": 0.0, "replicas": 1, "max_retries_preemption": retries}
    specification |= {"max_retries_failure": 0, "outlives_parent": False, "lease_seconds": 60.0, "grace_seconds": 0.1}
    known = {"status": "running", "reason": None, "attempts": 1, "failures": 0, "preemptions": 0, **status}
    (folder / "specification.json").write_text(json.dumps(specification))
    (folder / "status.json").write_text(json.dumps(known))
    (folder / "slurm_id").write_text("7")
    (folder / "lease").write_text("0")
    cluster = Cluster(seen)
    return SlurmJob(cast("Slurm", cluster), folder), cluster


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


@pytest.mark.parametrize(
    "seen", [KILLED, HELD, Seen("TIMEOUT"), Seen("CANCELLED"), Seen("PENDING", "BeginTime"), Seen("RUNNING"), None]
)
@pytest.mark.parametrize("is_owned", [True, False])
def test_reader_changes_nothing(tmp_path: Path, seen: Seen | None, is_owned: bool) -> None:
    handle, cluster = job(tmp_path, seen, left_machines=True, all_ended=True)
    if not is_owned:
        os.utime(tmp_path / "lease", (0, 0))
    before = contents(tmp_path)
    assert handle.status() is handle.details().status
    assert (contents(tmp_path), cluster.orders) == (before, [])


def test_cut_off_job_without_submitter_has_failed(tmp_path: Path) -> None:
    handle, _ = job(tmp_path, KILLED)
    assert handle.status() is JobStatus.PENDING
    os.utime(tmp_path / "lease", (0, 0))
    assert handle.status() is JobStatus.FAILED


@pytest.mark.parametrize(
    ("seen", "orders", "preemptions"),
    [
        (Seen("RUNNING"), [], 0),
        (Seen("PENDING", "Resources"), [], 0),
        (Seen("PENDING", "BeginTime"), ["start_now"], 0),
        (HELD, ["release"], 1),
        (KILLED, ["requeue"], 0),
        (Seen("NODE_FAIL"), ["requeue"], 0),
    ],
)
def test_submitter_takes_the_steps_that_slurm_does_not(
    tmp_path: Path, seen: Seen, orders: list[str], preemptions: int
) -> None:
    handle, cluster = job(tmp_path, seen, left_machines=True, all_ended=True)
    assert handle.renew()
    assert (cluster.orders, handle.details().preemptions) == (orders, preemptions)
    assert float((tmp_path / "lease").read_text()) > 0


def test_submitter_starts_no_copy_of_a_job_on_a_lost_node(tmp_path: Path) -> None:
    handle, cluster = job(tmp_path, Seen("PENDING", "BeginTime"), left_machines=True, all_ended=False)
    assert handle.renew()
    assert cluster.orders == []


def test_failed_launch_is_counted_by_the_submitter_alone(tmp_path: Path) -> None:
    handle, cluster = job(tmp_path, HELD, retries=1)
    read: list[tuple[JobStatus, int]] = []
    cluster.on_release = lambda: read.append((handle.status(), handle.details().preemptions))
    assert handle.renew()
    assert read == [(JobStatus.PENDING, 1)]


@pytest.mark.parametrize(
    ("seen", "orders", "status"),
    [(HELD, ["cancel"], JobStatus.FAILED), (KILLED, [], JobStatus.FAILED), (Seen("CANCELLED"), [], JobStatus.STOPPED)],
)
def test_submitter_writes_the_final_status_of_a_cut_off_job(
    tmp_path: Path, seen: Seen, orders: list[str], status: JobStatus
) -> None:
    handle, cluster = job(tmp_path, seen, retries=0)
    assert not handle.renew()
    cluster.seen = None  # forgotten
    assert (cluster.orders, handle.status()) == (orders, status)


def test_submitter_lets_a_job_that_is_to_stop_end(tmp_path: Path) -> None:
    handle, cluster = job(tmp_path, Seen("PENDING", "Resources"))
    handle.request_stop()
    cluster.seen = Seen("CANCELLED")
    assert not handle.renew()
    assert (cluster.orders, handle.status()) == (["cancel"], JobStatus.STOPPED)


def test_terminated_job_has_ended_for_readers_with_an_older_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, cluster = job(tmp_path, Seen("RUNNING"))
    monkeypatch.setattr(cluster, "state_now", lambda slurm_id: Seen("CANCELLED"))
    handle.terminate()
    assert handle.status() is JobStatus.STOPPED
