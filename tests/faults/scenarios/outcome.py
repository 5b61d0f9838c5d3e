"""Definition of a scenario, and of its outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from faults.scenarios.target import Target


@dataclass(frozen=True)
class Scale:
    """The amount that is asked, and the time that a fault lasts."""

    requests: int = 2000
    concurrency: int = 64
    away_seconds: float = 20.0
    """Time for which all replicas are away."""
    clients: int = 2000
    """Clients of a storm, or connections at once."""
    prompt_bytes: int = 2_000_000
    """Size of a large prompt."""
    large_prompts: int = 16
    fuzzed: int = 3000
    """Requests that are not what a client should send."""
    seed: int = 1


@dataclass(frozen=True)
class ScenarioOutcome:
    """Outcome of one scenario. `violations` are sentences: each says what did not hold."""

    scenario: str
    requests: int = 0
    client_errors: int = 0
    wrong_answers: int = 0
    duplicates: int = 0
    """Answers in the journal beyond one for each request."""
    seconds: float = 0.0
    violations: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    """Further counts, for people."""
    skipped: str | None = None
    """Why it was not run."""

    @property
    def verdict(self) -> Literal["holds", "violated", "skipped"]:
        """In a word."""
        return "skipped" if self.skipped else "violated" if self.violations else "holds"


@dataclass(frozen=True)
class Scenario:
    """Something that goes wrong under load: what is done, and what must hold all the same."""

    name: str
    does: str
    holds: str
    run: Callable[[Target, Scale], Awaitable[ScenarioOutcome]]
    least_replicas: int = 1
    injects: bool = False
    """Needs engines that can be made to misbehave."""
    needs_recipe: bool = False
    """Starts another pool like the target."""

    async def tried_on(self, target: Target, scale: Scale) -> ScenarioOutcome:
        """Runs it, or says why that is not possible on this pool."""
        if target.replicas < self.least_replicas:
            return ScenarioOutcome(self.name, skipped=f"it needs {self.least_replicas} replicas")
        if self.injects and target.inject is None:
            return ScenarioOutcome(self.name, skipped="a real engine cannot be made to do that")
        if self.needs_recipe and target.recipe is None:
            return ScenarioOutcome(self.name, skipped="it is not known how to start another pool like this one")
        return await self.run(target, scale)
