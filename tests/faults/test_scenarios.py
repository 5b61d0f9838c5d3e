"""Every scenario of the fault suite, on pools of the deterministic engine."""

from __future__ import annotations

import dataclasses

import pytest

from pools.faults.outcome import Outcome, Scale, Scenario
from pools.faults.scenarios import SCENARIOS, chosen
from pools.faults.target import Target
from resources.errors import BadInput

pytestmark = pytest.mark.timeout(90)
WITH_ONE = ("replica-killed", "all-replicas-away", "proxy-killed")


def _shown(outcome: Outcome) -> str:
    return f"{outcome.scenario}: {outcome.requests} requests, {outcome.seconds} s, {outcome.figures}"


async def _holds(scenario: Scenario, target: Target, scale: Scale) -> None:
    assert await target.settled() is None
    outcome = await scenario.tried_on(target, scale)
    print(_shown(outcome))
    assert outcome.verdict == "holds", "\n".join(outcome.violations) or outcome.skipped


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "computing-process-killed"])
async def test_scenario_on_two_replicas_holds(name: str, pair: Target, scale: Scale) -> None:
    if name == "replica-killed":
        scale = dataclasses.replace(scale, requests=2000)
    await _holds(SCENARIOS[name], pair, scale)


@pytest.mark.parametrize("name", WITH_ONE)
async def test_scenario_on_a_single_replica_holds(name: str, single: Target, scale: Scale) -> None:
    await _holds(SCENARIOS[name], single, scale)


async def test_scenario_that_a_pool_cannot_run_is_skipped_with_a_reason(single: Target, scale: Scale) -> None:
    for name, why in (
        ("slow-replica", "it needs 2 replicas"),
        ("computing-process-killed", "its engines are single processes"),
    ):
        outcome = await SCENARIOS[name].tried_on(single, scale)
        assert (outcome.verdict, outcome.skipped) == ("skipped", why)


def test_scenario_of_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="replica-killed"):
        chosen(["replica-kiled"])
    assert [one.name for one in chosen([])] == list(SCENARIOS)
