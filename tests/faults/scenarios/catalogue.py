"""All scenarios by name."""

from __future__ import annotations

from faults.scenarios.answer_faults import ANSWER_SCENARIOS
from faults.scenarios.client_faults import CLIENT_SCENARIOS
from faults.scenarios.fuzz_faults import FUZZ_SCENARIOS
from faults.scenarios.outcome import Scale, Scenario, ScenarioOutcome
from faults.scenarios.owner_faults import OWNER_SCENARIOS
from faults.scenarios.proxy_faults import PROXY_SCENARIOS
from faults.scenarios.replica_faults import REPLICA_SCENARIOS
from faults.scenarios.target import Target

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        *REPLICA_SCENARIOS,
        *ANSWER_SCENARIOS,
        *CLIENT_SCENARIOS,
        *FUZZ_SCENARIOS,
        *PROXY_SCENARIOS,
        *OWNER_SCENARIOS,
    )
}


async def check_scenario(scenario: Scenario, target: Target, scale: Scale) -> ScenarioOutcome:
    """Runs a scenario on a settled pool, and fails the test with its violations."""
    assert await target.settled() is None
    outcome = await scenario.tried_on(target, scale)
    print(f"{outcome.scenario}: {outcome.requests} requests, {outcome.seconds} s, {outcome.figures}")
    assert outcome.verdict == "holds", "\n".join(outcome.violations) or outcome.skipped
    return outcome
