"""Logs of Jobs on Kubernetes: of Cloud Logging, followed, and read from a position, though lines have only times."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fakes.cloud_logging import cloud_logging, entry
from resources.backends.kubernetes.cloud_logging import cloud_lines
from resources.backends.kubernetes.job import part_of_log
from resources.backends.kubernetes.logs import LogLine, followed
from resources.backends.kubernetes.names import INDEX_LABEL, logs_name
from resources.backends.kubernetes.records import Record
from resources.errors import BackendUnavailable, BadInput
from resources.jobs.jobs import JobStatus
from tasks.eval_jobs.submission import moment, write_lines

JOB = "eval-neurips-amusing-sloth"
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def test_cloud_logging_gives_lines_of_a_job_by_time_and_page(tmp_path: Path) -> None:
    kept = [entry(JOB, f"2026-11-2{day}T12:00:00.5Z", f"line {day}") for day in range(5)]
    kept.append(entry(JOB, "2026-11-26T12:00:00Z", "as JSON", payload="jsonPayload"))
    with cloud_logging(*kept, entry("another-job", "2026-11-24T12:00:00Z", "not ours")) as server:
        read = partial(cloud_lines, JOB, project="team", options=server.options)
        lines = list(read(datetime(2026, 11, 22, tzinfo=UTC), namespace="default"))
        assert [line.text for line in lines] == ["line 2", "line 3", "line 4", "as JSON"]
        assert lines[0] == LogLine("2026-11-22T12:00:00.500000Z", f"{JOB}-x1", "eval", "line 2")
        assert len(list(read(None, namespace="default"))) == 6
        assert len(server.requests) == 2 + 3
        assert server.requests[0]["resourceNames"] == ["projects/team"]
        assert not list(read(None, namespace="other"))
    assert write_lines(lines, tmp_path / "logs.json") == 4
    assert '"text": "line 2"' in (tmp_path / "logs.json").read_text()


def test_cloud_logging_that_lets_us_read_nothing_says_what_to_do() -> None:
    with cloud_logging() as server:
        server.status = 403
        with pytest.raises(BackendUnavailable, match=r"roles/logging\.viewer") as refused:
            list(cloud_lines(JOB, None, namespace="default", project="team", options=server.options))
    assert "does not have permission" in refused.value.found


class Growing:
    """A log that grows by a line per read, and returns the last two lines again; some times have fractions."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self, since: datetime | None) -> Iterator[LogLine]:
        self.looks += 1
        for number in range(max(0, self.looks - 2), self.looks):
            fraction = ".5" if number % 2 else ""
            yield LogLine(f"2026-11-20T12:0{number}:00{fraction}Z", "pod", "eval", f"line {number}")


def test_followed_lines_come_once_each_and_end_with_the_job() -> None:
    log = Growing()
    lines = followed(log, since=None, has_ended=lambda: log.looks >= 4, pause_seconds=0.0)
    assert [line.text for line in lines] == [f"line {number}" for number in range(5)]


def test_followed_lines_with_fractions_of_a_second_come_once_and_in_order() -> None:
    looks = iter((False, False, True))
    stamps = ("01:00", "01:00.5", "00:00.25", "00:00", "00:00.1")  # which every read returns
    log = [LogLine(f"2026-11-20T12:{stamp}Z", "pod", "eval", stamp) for stamp in stamps]
    lines = followed(lambda _: log, since=None, has_ended=lambda: next(looks), pause_seconds=0.0)
    assert [line.text for line in lines] == ["00:00", "00:00.1", "00:00.25", "01:00", "01:00.5"]


def test_since_is_a_number_and_a_unit() -> None:
    assert moment("3d", now=NOON) == datetime(2026, 11, 17, 12, tzinfo=UTC)
    assert moment("90m", now=NOON) == datetime(2026, 11, 20, 10, 30, tzinfo=UTC)
    with pytest.raises(BadInput, match="30m, 12h, 3d or 2w"):
        moment("3 days ago", now=NOON)


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
        job_id="job-1", name="job", submitted_at=0.0, replicas=1, vms=1, grace_seconds=1.0,
        lease_seconds=1.0, outlives_parent=False, status=status, attempts=attempts,
    )  # fmt: skip


def read(cluster: Cluster, now: Record, after: str = "") -> tuple[str, str, bool]:
    part = part_of_log(cluster, now, pod=0, after=after)  # pyright: ignore[reportArgumentType]
    return part.output.decode(), part.end, part.follows_dropped


def test_lines_of_a_moment_come_once_and_unfinished_lines_last() -> None:
    cluster = Cluster()
    cluster.text = f"{SECOND}1.5Z a\n{SECOND}1.5Z a\n{SECOND}1.5Z Load"
    output, position, _ = read(cluster, record())
    assert output == "a\na\n"
    cluster.text += f"ing\n{SECOND}2.1Z b\n"
    output, position, dropped = read(cluster, record(), position)
    assert (output, dropped) == ("Loading\nb\n", False)
    cluster.text += f"{SECOND}3.1Z half"
    assert read(cluster, record(), position)[0] == ""
    assert read(cluster, record(status=JobStatus.SUCCEEDED), position)[0] == "half\n"


def test_reading_continues_in_kept_logs_and_then_in_the_next_attempt() -> None:
    cluster = Cluster()
    cluster.text = f"{SECOND}1.5Z a\n"
    _, position, _ = read(cluster, record())
    cluster.text, cluster.kept = None, {logs_name("job-1", 1): f"{SECOND}1.5Z a\n{SECOND}1.6Z b\n"}
    output, position, dropped = read(cluster, record(attempts=2), position)
    assert (output, dropped) == ("b\n", False)
    cluster.text = f"{SECOND}0.1Z c\n"  # by a clock that is behind
    assert read(cluster, record(attempts=2), position)[0] == "--- attempt 2 ---\nc\n"


@pytest.mark.parametrize(("first", "dropped"), [("1.5", False), ("1.6", True)])
def test_lines_that_a_node_has_removed_are_reported(first: str, dropped: bool) -> None:
    cluster = Cluster()
    cluster.text = f"{SECOND}1.5Z a\n"
    _, position, _ = read(cluster, record())
    cluster.text = f"{SECOND}{first}Z a\n{SECOND}1.7Z b\n"
    assert read(cluster, record(), position)[2] == dropped
