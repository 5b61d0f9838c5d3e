"""Runs a load during a fault, and checks the rules that hold for every fault."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from faults.scenarios.load import Load, LoadPlan, LoadReport, reference_answers
from faults.scenarios.outcome import Scale, ScenarioOutcome
from faults.scenarios.questions import KINDS, Kind
from faults.scenarios.target import Kept, Target
from pools.protocol import RequestCounters

Fault = Callable[[], Awaitable[None]]
_SHOWN = 3


@dataclass(frozen=True)
class Trial:
    """Observations during a fault: the clients' answers, the proxy's counters and the kept answers."""

    plan: LoadPlan
    report: LoadReport
    wrong: int
    counts: RequestCounters
    engine_answers: int
    kept: Kept | None
    unsettled: str | None

    @property
    def duplicates(self) -> int:
        """Number of kept answers beyond 1 for each request."""
        return max(0, self.kept.answers - self.plan.requests) if self.kept is not None else 0

    def broken_rules(self, *, most_upstream: int | None = None, broken_streams: int = 0) -> list[str]:
        """Returns violations of the rules for all faults, given the allowed attempts at engines and cut streams."""
        rules = []
        errors = self.report.errors
        if errors:
            shown = ", ".join(f"{count} × {problem}" for problem, count in errors.most_common(_SHOWN))
            rules.append(f"{errors.total()} of {self.plan.requests} requests failed: {shown}")
        if self.report.broken_streams > broken_streams:
            rules.append(f"{self.report.broken_streams} streams were cut, {broken_streams} at most may be")
        if self.wrong:
            rules.append(f"{self.wrong} answers are not those of the checkpoint")
        if self.duplicates:
            rules.append(f"the journal holds {self.duplicates} answers more than there were requests")
        answered = sum(answer.payload is not None for answer in self.report.answers)
        if self.kept is not None and self.kept.questions < answered:
            rules.append(f"the journal lacks {answered - self.kept.questions} of {answered} answers that were given")
        if most_upstream is not None and self.counts.upstream > most_upstream:
            rules.append(f"engines were asked {self.counts.upstream} times, {most_upstream} would do")
        if self.unsettled is not None:
            rules.append(f"the pool is not whole again: {self.unsettled}")
        return rules

    def outcome(self, scenario: str, violations: list[str], **figures: float) -> ScenarioOutcome:
        return ScenarioOutcome(
            scenario,
            requests=self.plan.requests,
            client_errors=self.report.errors.total(),
            wrong_answers=self.wrong,
            duplicates=self.duplicates,
            seconds=round(self.report.seconds, 2),
            violations=tuple(violations),
            figures={
                "upstream": self.counts.upstream,
                "retried": self.counts.retried,
                "broken_streams": self.report.broken_streams,
                **figures,
            },
        )


def plan_of(scale: Scale, *, kinds: tuple[Kind, ...] = KINDS, retries: int = 0) -> LoadPlan:
    """Returns a load of that scale that no journal contains."""
    mark = f"fault-{secrets.token_hex(4)}"
    return LoadPlan(mark, requests=scale.requests, concurrency=scale.concurrency, kinds=kinds, retries=retries)


async def tried(target: Target, plan: LoadPlan, fault: Fault, *, share: float = 0.25, wait: bool = True) -> Trial:
    """Runs a plan in a cell of its own; triggers the fault after a share of the answers.

    Args:
        fault: called once; the clients go on meanwhile.
        share: of answers before the fault.
        wait: if True, the pool must be whole again at the end.
    """
    reference = await reference_answers(target.endpoint, plan)
    before = await asyncio.to_thread(target.engine_answers)
    cell = target.cell()
    view = await asyncio.to_thread(cell.__enter__)
    try:
        async with Load(view.endpoint, plan) as load:
            await load.reached(int(plan.requests * share))
            await fault()
            report = await load.report()
        unsettled = await target.settled() if wait else None
        counts = await asyncio.to_thread(view.counts)
        after = await asyncio.to_thread(target.engine_answers)
        wrong = len(report.wrong(reference))
        return Trial(plan, report, wrong, counts, after - before, view.kept(), unsettled)
    finally:
        await asyncio.to_thread(cell.__exit__, None, None, None)
