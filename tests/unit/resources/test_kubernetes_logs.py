"""Reading a pod's log from a position, although its lines have times and no offsets."""

from __future__ import annotations

from typing import Any

import pytest

from resources.backends.kubernetes.job import part_of_log
from resources.backends.kubernetes.names import INDEX_LABEL, logs_name
from resources.backends.kubernetes.records import Record
from resources.jobs.jobs import JobStatus

SECOND = "2026-11-20T12:00:0"


class Cluster:
    """A namespace with a pod's log and kept logs of other pods, as `part_of_log` reads it."""

    def __init__(self) -> None:
        self.text: str | None = None
        self.kept: dict[str, str] = {}

    def list(self, resource: str, selector: str = "") -> list[dict[str, Any]]:
        pod = {"metadata": {"name": "pod", "labels": {INDEX_LABEL: "0"}}}
        return [pod] if self.text is not None else []

    def log(self, pod: str, container: str, *, since: str | None = None, max_lines: int | None = None) -> str | None:
        lines = (self.text or "").splitlines(keepends=True)
        return "".join(line for line in lines if since is None or line >= since.removesuffix("Z"))

    def get(self, resource: str, name: str) -> dict[str, Any] | None:
        return {"data": {"pod-0": self.kept[name]}} if name in self.kept else None


def record(attempts: int = 1, status: JobStatus = JobStatus.RUNNING) -> Record:
    return Record(
        job_id="job-1", name="job", owner="us", submitted_at=0.0, replicas=1, vms=1, grace_seconds=1.0,
        lease_seconds=1.0, outlives_parent=False, status=status, attempts=attempts,
    )  # fmt: skip


def read(cluster: Cluster, now: Record, after: str = "") -> tuple[str, str, int | None]:
    part = part_of_log(cluster, now, pod=0, after=after)  # pyright: ignore[reportArgumentType]
    return part.output.decode(), part.end, part.dropped_lines


def test_lines_of_a_moment_come_once_and_unfinished_lines_last() -> None:
    cluster = Cluster()
    cluster.text = f"{SECOND}1.5Z a\n{SECOND}1.5Z a\n{SECOND}1.5Z Load"
    output, position, _ = read(cluster, record())
    assert output == "a\na\n"
    cluster.text += f"ing\n{SECOND}2.1Z b\n"
    output, position, dropped = read(cluster, record(), position)
    assert (output, dropped) == ("Loading\nb\n", 0)
    cluster.text += f"{SECOND}3.1Z half"
    assert read(cluster, record(), position)[0] == ""
    assert read(cluster, record(status=JobStatus.SUCCEEDED), position)[0] == "half\n"


def test_reading_continues_in_kept_logs_and_then_in_the_next_attempt() -> None:
    cluster = Cluster()
    cluster.text = f"{SECOND}1.5Z a\n"
    _, position, _ = read(cluster, record())
    cluster.text, cluster.kept = None, {logs_name("job-1", 1): f"{SECOND}1.5Z a\n{SECOND}1.6Z b\n"}
    output, position, dropped = read(cluster, record(attempts=2), position)
    assert (output, dropped) == ("b\n", 0)
    cluster.text = f"{SECOND}0.1Z c\n"  # by a clock that is behind
    assert read(cluster, record(attempts=2), position)[0] == "--- attempt 2 ---\nc\n"


@pytest.mark.parametrize(("first", "dropped"), [("1.5", 0), ("1.6", None)])
def test_lines_that_a_node_has_removed_are_reported(first: str, dropped: int | None) -> None:
    cluster = Cluster()
    cluster.text = f"{SECOND}1.5Z a\n"
    _, position, _ = read(cluster, record())
    cluster.text = f"{SECOND}{first}Z a\n{SECOND}1.7Z b\n"
    assert read(cluster, record(), position)[2] == dropped
