"""Logs of Jobs: the same protocol for pods and for Cloud Logging, each queried by its real client over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from fakes.cloud_logging import cloud_logging, entry
from resources.backends.kubernetes.cloud_logging import cloud_lines
from resources.backends.kubernetes.logs import LogLine, followed
from resources.errors import BackendUnavailable, BadInput
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
