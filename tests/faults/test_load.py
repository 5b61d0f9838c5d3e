"""Tests that the clients of the fault suite detect errors; otherwise every scenario would pass."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from fakes.engine import FakeEngine
from faults.scenarios.load import Endpoint, LoadPlan, ask_all, reference_answers
from faults.scenarios.outcome import Scale
from faults.scenarios.target import Kept, kept_answers
from faults.scenarios.trial import Trial, plan_of
from pools.journal.schema import COLUMNS, connect
from pools.protocol import RequestCounters

PLAN = LoadPlan("mark", requests=100, concurrency=8, prompts=4)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(models=("m",)) as running:
        yield running


def _endpoint(engine: FakeEngine) -> Endpoint:
    return Endpoint(f"{engine.url}/v1", "none", "m")


def _trial(**parts: object) -> Trial:
    return dataclasses.replace(
        Trial(PLAN, parts.pop("report"), 0, RequestCounters(upstream=100), 100, Kept(100, 100), None),  # type: ignore[arg-type]
        **parts,  # type: ignore[arg-type]
    )


async def test_load_on_a_sound_engine_breaks_no_rule(engine: FakeEngine) -> None:
    reference = await reference_answers(_endpoint(engine), PLAN)
    report = await ask_all(_endpoint(engine), PLAN)
    assert len(report.answers) == 100
    assert report.wrong(reference) == []
    assert _trial(report=report).broken_rules(most_upstream=100) == []


async def test_load_on_other_weights_finds_every_answer_wrong_that_can_be_told(engine: FakeEngine) -> None:
    reference = await reference_answers(_endpoint(engine), PLAN)
    engine.label = "other weights"
    report = await ask_all(_endpoint(engine), PLAN)
    assert len(report.wrong(reference)) == 83  # 1 in 6 is sampled
    assert not report.errors


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"status_count": 3}, "status 500"),
        ({"malformed": 3}, "an answer that is not whole or not valid"),
        ({"aborted": 3}, "an answer that is not whole or not valid"),
        ({"die_mid_body": 3}, "ClientPayloadError"),
        ({"die_mid_stream": 3}, "ClientPayloadError"),
        ({"refuse": 3}, "ServerDisconnectedError"),
    ],
)
async def test_load_counts_every_answer_that_is_spoiled(
    engine: FakeEngine, fault: dict[str, int], problem: str
) -> None:
    for name, value in fault.items():
        setattr(engine.faults, name, value)
    report = await ask_all(_endpoint(engine), PLAN)
    assert sum(report.errors.values()) == 3
    assert set(report.errors) <= {problem, "ClientOSError"}
    [broken] = _trial(report=report).broken_rules()
    assert broken.startswith("3 of 100 requests failed")


async def test_trial_names_every_rule_that_is_broken(engine: FakeEngine) -> None:
    report = await ask_all(_endpoint(engine), PLAN)
    counts = RequestCounters(upstream=170)
    trial = _trial(report=report, wrong=2, counts=counts, kept=Kept(103, 97), unsettled="a replica is lost")
    broken = trial.broken_rules(most_upstream=164)
    assert [rule.split()[0] for rule in broken] == ["2", "the", "the", "engines", "the"]
    assert trial.outcome("any", broken).verdict == "violated"
    assert trial.duplicates == 3


def test_answers_kept_twice_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    row = "?, 0, 'cell', 'first', ?, 't', 'm', '', '', '', '', '', 0, 0, 0, 0, x'', x'', NULL"
    with closing(connect(path, wait_seconds=1)) as journal:
        for key, occurrence in ((b"a", 0), (b"a", 1), (b"b", 0)):
            journal.execute(f"INSERT INTO answers ({COLUMNS}) VALUES ({row})", (key, occurrence))
        journal.commit()
    assert kept_answers(path, "cell") == Kept(answers=3, questions=2)
    with pytest.raises(sqlite3.OperationalError):
        kept_answers(tmp_path / "none.sqlite", "cell")


def test_plans_differ_in_every_request() -> None:
    first, second = plan_of(Scale()), plan_of(Scale())
    bodies = {plan.question(number, "m").body for plan in (first, second) for number in range(first.requests)}
    assert len(bodies) == 2 * first.requests
