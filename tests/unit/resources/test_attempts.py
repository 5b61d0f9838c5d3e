"""Attempts of jobs: outcome of several replicas, budgets, pauses, final status, as tables."""

from __future__ import annotations

import pytest

from resources.backends.programs.attempts import Attempts, Final, Outcome, outcome_of


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
