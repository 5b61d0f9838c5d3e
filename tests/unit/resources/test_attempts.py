"""Attempts of jobs: causes of the ends of processes, outcome of several replicas, budgets, pauses, final status."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from resources.backends.programs.attempts import Attempts, Final, Outcome, outcome_of
from resources.backends.programs.endings import ENDINGS, OomWatch, cause_of_exit, classify_exit, counters_of


@pytest.mark.parametrize(
    ("replicas", "stopping", "expected"),
    [
        (["succeeded", "succeeded"], False, "succeeded"),
        (["succeeded", "succeeded"], True, "succeeded"),
        (["succeeded", None], False, None),
        (["succeeded", None], True, "stopped"),
        ([None, "failed"], False, "failed"),
        (["failed", "preempted"], False, "preempted"),
        (["failed", "preempted"], True, "stopped"),
        (["preempted", "refused"], False, "refused"),
        (["stopped", "failed"], False, "failed"),
        (["stopped", "succeeded"], False, "stopped"),
    ],
)
def test_outcome_of_replicas(replicas: list[Outcome | None], stopping: bool, expected: Outcome | None) -> None:
    assert outcome_of(replicas, stopping=stopping) == expected


@pytest.mark.parametrize(
    ("outcome", "failures", "preemptions", "final"),
    [
        ("succeeded", 0, 0, Final("succeeded", None)),
        ("stopped", 0, 0, Final("stopped", "why")),
        ("refused", 0, 0, Final("failed", "why")),
        ("failed", 0, 0, None),
        ("failed", 1, 2, Final("failed", "failed 2 times; last: why")),
        ("preempted", 1, 1, None),
        ("preempted", 0, 2, Final("failed", "ended from outside 3 times; last: why")),
    ],
)
def test_attempt_ends_against_its_own_budget(
    outcome: Outcome, failures: int, preemptions: int, final: Final | None
) -> None:
    before = Attempts(1, 2, attempts=12, failures=failures, preemptions=preemptions)
    after, ending = before.ended(outcome, "why")
    assert ending == final
    assert after.failures - failures == (outcome in ("failed", "refused"))
    assert after.preemptions - preemptions == (outcome == "preempted")


def test_failure_without_a_known_reason_gives_the_count_alone() -> None:
    assert Attempts(0, 0).ended("failed")[1] == Final("failed", "failed once")


@pytest.mark.parametrize(("attempts", "seconds"), [(1, 0.1), (2, 0.2), (5, 1.6), (8, 10.0), (10_000, 10.0)])
def test_pause_doubles_up_to_ten_seconds(attempts: int, seconds: float) -> None:
    assert Attempts(0, 0, attempts=attempts).pause_seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("expected", "returncodes"),
    [
        ("succeeded", [0]),
        ("preempted", [-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, 137, 143]),
        ("failed", [1, 127, 255, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGPIPE, 139]),
    ],
)
def test_exit_codes_are_classified_by_their_cause(expected: str, returncodes: list[int]) -> None:
    assert {classify_exit(returncode) for returncode in returncodes} == {expected}


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
    assert not OomWatch([tmp_path / "missing"]).has_struck()
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    watch = OomWatch([tmp_path / "missing", counter])
    assert not watch.has_struck()
    counter.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert watch.has_struck()
    assert not OomWatch([counter]).has_struck()


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
