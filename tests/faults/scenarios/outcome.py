"""Definition of a scenario, and of its outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from faults.scenarios.target import Target


@dataclass(frozen=True)
class Scale:
    """Number of requests, and duration of a fault."""

    requests: int = 2000
    concurrency: int = 64
    away_seconds: float = 20.0
    """Seconds without any replica."""
    clients: int = 2000
    """Clients of a storm, or simultaneous connections."""
    prompt_bytes: int = 2_000_000
    """Size of a large prompt."""
    large_prompts: int = 16
    fuzzed: int = 3000
    """Invalid requests."""
    seed: int = 1


@dataclass(frozen=True)
class ScenarioOutcome:
    """Outcome of a scenario; `violations` are sentences about broken rules."""

    scenario: str
    requests: int = 0
    client_errors: int = 0
    wrong_answers: int = 0
    duplicates: int = 0
    """Answers in the journal beyond 1 for each request."""
    seconds: float = 0.0
    violations: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    """Further counts, for people."""
    skipped: str | None = None
    """Reason for skipping it."""

    @property
    def verdict(self) -> Literal["holds", "violated", "skipped"]:
        return "skipped" if self.skipped else "violated" if self.violations else "holds"


@dataclass(frozen=True)
class Scenario:
    """A fault under load, and the rules that must still hold."""

    name: str
    does: str
    holds: str
    run: Callable[[Target, Scale], Awaitable[ScenarioOutcome]]
    least_replicas: int = 1
    injects: bool = False
    """Needs engines with injectable faults."""
    needs_recipe: bool = False
    """Starts another pool like the target."""

    async def tried_on(self, target: Target, scale: Scale) -> ScenarioOutcome:
        """Runs it, or returns why this pool cannot."""
        if target.replicas < self.least_replicas:
            return ScenarioOutcome(self.name, skipped=f"it needs {self.least_replicas} replicas")
        if self.injects and target.inject is None:
            return ScenarioOutcome(self.name, skipped="a real engine cannot be made to do that")
        if self.needs_recipe and target.recipe is None:
            return ScenarioOutcome(self.name, skipped="the target has no recipe for another pool")
        return await self.run(target, scale)
