"""Every scenario of the fault suite, on pools of the deterministic engine."""

from __future__ import annotations

import dataclasses

import pytest

from faults.scenarios.catalogue import SCENARIOS, check_scenario
from faults.scenarios.outcome import Scale
from faults.scenarios.target import Target

pytestmark = pytest.mark.timeout(90)
ON_A_SINGLE_REPLICA = ("replica-killed", "owner-killed")
NOT_WITH_TWO = ("computing-process-killed", "owner-killed")  # the latter starts pools of its own


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in NOT_WITH_TWO])
async def test_scenario_on_two_replicas_holds(name: str, pair: Target, scale: Scale) -> None:
    if name == "replica-killed":
        scale = dataclasses.replace(scale, requests=2000)
    await check_scenario(SCENARIOS[name], pair, scale)


@pytest.mark.parametrize("name", ON_A_SINGLE_REPLICA)
async def test_scenario_on_a_single_replica_holds(name: str, single: Target, scale: Scale) -> None:
    await check_scenario(SCENARIOS[name], single, scale)


async def test_scenario_that_a_pool_cannot_run_is_skipped_with_a_reason(single: Target, scale: Scale) -> None:
    for name, why in (
        ("slow-replica", "it needs 2 replicas"),
        ("computing-process-killed", "its engines are single processes"),
    ):
        outcome = await SCENARIOS[name].tried_on(single, scale)
        assert (outcome.verdict, outcome.skipped) == ("skipped", why)
