"""Reasons for the end of job processes, and the retry budget that each counts against: the table, row by row."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from resources.backends.programs.endings import ENDINGS, OomWatch, cause_of_exit, classify_exit, counters_of


@pytest.mark.parametrize(
    ("returncode", "expected"),
    [
        (0, "succeeded"),
        (1, "failed"),
        (127, "failed"),
        (255, "failed"),
        (-signal.SIGKILL, "preempted"),
        (-signal.SIGTERM, "preempted"),
        (-signal.SIGINT, "preempted"),
        (-signal.SIGHUP, "preempted"),
        (137, "preempted"),
        (143, "preempted"),
        (-signal.SIGSEGV, "failed"),
        (-signal.SIGABRT, "failed"),
        (-signal.SIGBUS, "failed"),
        (-signal.SIGPIPE, "failed"),
        (139, "failed"),
    ],
)
def test_exit_codes_are_classified_by_their_cause(returncode: int, expected: str) -> None:
    assert classify_exit(returncode) == expected


@pytest.mark.parametrize(
    ("returncode", "cause"),
    [
        (-signal.SIGKILL, "out of memory"),
        (137, "out of memory"),
        (-signal.SIGTERM, "signalled"),
        (1, "crashed"),
        (0, "finished"),
    ],
)
def test_kill_while_the_kernel_wants_memory_is_a_failure_of_the_job(returncode: int, cause: str) -> None:
    assert cause_of_exit(returncode, out_of_memory=True) == cause
    assert ENDINGS["out of memory"] == "failed"


def test_watch_sees_only_what_was_killed_since_it_began(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    watch = OomWatch([tmp_path / "missing", counter])
    assert not watch.has_struck()
    counter.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert watch.has_struck()
    assert not OomWatch([counter]).has_struck()


def test_watch_without_counters_sees_nothing(tmp_path: Path) -> None:
    assert not OomWatch([tmp_path / "missing"]).has_struck()


def test_counters_are_those_of_the_own_group_before_that_of_the_machine() -> None:
    assert counters_of("0::/user.slice/session-1.scope\n") == [
        Path("/sys/fs/cgroup/user.slice/session-1.scope/memory.events"),
        Path("/proc/vmstat"),
    ]
    assert counters_of("4:memory:/docker/1f\n1:cpu,cpuacct:/\n")[0] == Path(
        "/sys/fs/cgroup/memory/docker/1f/memory.oom_control"
    )


def test_machine_has_a_counter_that_can_be_read() -> None:
    readable = [path for path in counters_of(Path("/proc/self/cgroup").read_text()) if path.exists()]
    assert any("oom_kill " in path.read_text() for path in readable)
