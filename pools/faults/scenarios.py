"""Every scenario by its name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from pools.faults.answer_faults import ANSWER_SCENARIOS
from pools.faults.client_faults import CLIENT_SCENARIOS
from pools.faults.fuzz_faults import FUZZ_SCENARIOS
from pools.faults.outcome import Outcome, Scale, Scenario
from pools.faults.owner_faults import OWNER_SCENARIOS
from pools.faults.proxy_faults import PROXY_SCENARIOS
from pools.faults.replica_faults import REPLICA_SCENARIOS
from pools.faults.target import Target
from resources.errors import BadInput

SCENARIOS: dict[str, Scenario] = {
    one.name: one
    for one in (
        *REPLICA_SCENARIOS,
        *ANSWER_SCENARIOS,
        *CLIENT_SCENARIOS,
        *FUZZ_SCENARIOS,
        *PROXY_SCENARIOS,
        *OWNER_SCENARIOS,
    )
}


def chosen(names: Sequence[str]) -> list[Scenario]:
    """The scenarios of these names; all of them where none is named.

    Raises:
        BadInput: there is none of one of the names.
    """
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise BadInput(expected=f"one of {', '.join(SCENARIOS)}", found=", ".join(unknown), remedy="choose among these")
    return [SCENARIOS[name] for name in names] if names else list(SCENARIOS.values())


async def try_all(target: Target, scenarios: Sequence[Scenario], scale: Scale) -> AsyncIterator[Outcome]:
    """The outcome of each, one after another, on a pool that is whole before the first."""
    await target.settled()
    for scenario in scenarios:
        yield await scenario.tried_on(target, scale)
