"""Replicas that are killed, hang, are slow, or are all away for a while."""

from __future__ import annotations

import asyncio
import signal
import time

from faults.scenarios.outcome import Scale, Scenario, ScenarioOutcome
from faults.scenarios.processes import descendants, largest, send
from faults.scenarios.target import Target
from faults.scenarios.trial import Trial, plan_of, tried

_ATTEMPTS = 3  # a server without its engine may fail all attempts but the last
_LOOK_SECONDS = 0.25
_SLOW_SECONDS = 0.25
_MOST_OF_SLOW = 0.5
"""Highest share of a fast replica's requests that a slow replica may get; it took at least 5 times as long."""


def _rules_after_a_loss(trial: Trial, *, losses: int = 1) -> list[str]:
    # only requests in flight at a loss may be sent again or cut
    at_once = losses * trial.plan.concurrency
    return trial.broken_rules(most_upstream=trial.plan.requests + at_once, broken_streams=at_once)


async def _signalled(
    name: str, target: Target, scale: Scale, *, number: signal.Signals, pid: int, losses: int = 1
) -> ScenarioOutcome:
    async def send_it() -> None:
        send(number, [pid])

    trial = await tried(target, plan_of(scale), send_it)
    return trial.outcome(name, _rules_after_a_loss(trial, losses=losses))


async def _replica_killed(target: Target, scale: Scale) -> ScenarioOutcome:
    engines = await asyncio.to_thread(target.engines)
    return await _signalled("replica-killed", target, scale, number=signal.SIGKILL, pid=engines[0].pid)


async def _computing_process_killed(target: Target, scale: Scale) -> ScenarioOutcome:
    # a server without its computing process may go on answering, with errors
    name = "computing-process-killed"
    engines = await asyncio.to_thread(target.engines)
    behind = largest(descendants(engines[0].pid))
    if behind is None:
        return ScenarioOutcome(name, skipped="its engines are single processes")
    return await _signalled(name, target, scale, number=signal.SIGKILL, pid=behind, losses=_ATTEMPTS)


async def _replica_hangs(target: Target, scale: Scale) -> ScenarioOutcome:
    engines = await asyncio.to_thread(target.engines)
    return await _signalled("replica-hangs", target, scale, number=signal.SIGSTOP, pid=engines[0].pid)


async def _agent_killed(target: Target, scale: Scale) -> ScenarioOutcome:
    agents = await asyncio.to_thread(target.agents)
    return await _signalled("agent-killed", target, scale, number=signal.SIGKILL, pid=agents[min(agents)])


async def _all_away(target: Target, scale: Scale) -> ScenarioOutcome:
    held = 0
    engines = await asyncio.to_thread(target.engines)
    agents = await asyncio.to_thread(target.agents)
    pids = [*agents.values(), *(engine.pid for engine in engines)]

    async def stop_and_go_on() -> None:
        nonlocal held
        send(signal.SIGSTOP, pids)
        try:
            ends = time.monotonic() + scale.away_seconds
            while time.monotonic() < ends:
                held = max(held, (await asyncio.to_thread(target.status)).held)
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            send(signal.SIGCONT, pids)

    plan = plan_of(scale)
    trial = await tried(target, plan, stop_and_go_on)
    # the last replica to be missed gets the requests of the others
    rules = _rules_after_a_loss(trial, losses=target.replicas)
    if scale.away_seconds >= 2 * target.lease_seconds and not held:
        rules.append("no request was held while no replica was there")
    return trial.outcome("all-replicas-away", rules, held=held)


async def _slow_replica(target: Target, scale: Scale) -> ScenarioOutcome:
    assert target.inject is not None
    plan = plan_of(scale, kinds=("greedy", "logprobs", "chat", "tokens"))
    slow, *quick = await asyncio.to_thread(target.engines)
    target.inject(slow.url, {"delay_seconds": _SLOW_SECONDS})
    shares: dict[str, int] = {}

    async def look() -> None:
        for engine in (slow, *quick):
            shares[engine.replica] = target.answers_of(engine)

    try:
        begun = {engine.replica: target.answers_of(engine) for engine in (slow, *quick)}
        trial = await tried(target, plan, look, share=0.9)
    finally:
        target.inject(slow.url, {"delay_seconds": 0.0})
    rules = trial.broken_rules(most_upstream=plan.requests)
    of_slow = shares[slow.replica] - begun[slow.replica]
    of_quick = sum(shares[engine.replica] - begun[engine.replica] for engine in quick) / len(quick)
    if of_slow > _MOST_OF_SLOW * of_quick:
        rules.append(f"the slow replica got {of_slow} requests, a quick replica {of_quick:g}")
    return trial.outcome("slow-replica", rules, of_slow=of_slow, of_quick=of_quick)


REPLICA_SCENARIOS = (
    Scenario(
        "replica-killed",
        "kills an engine under load",
        "no client sees an error, no answer is kept twice, engines are asked again only what was in flight",
        _replica_killed,
    ),
    Scenario(
        "computing-process-killed",
        "kills the process that computes behind an engine's server",
        "the server's errors are not shown, its replica is started again, and no client sees an error",
        _computing_process_killed,
    ),
    Scenario(
        "replica-hangs",
        "stops an engine's process, which keeps its connections",
        "its lease runs out, its requests move, and no client sees an error",
        _replica_hangs,
    ),
    Scenario(
        "agent-killed",
        "kills the agent of a replica, and its engine with it",
        "the pool starts it again, and no client sees an error",
        _agent_killed,
    ),
    Scenario(
        "all-replicas-away",
        "stops every agent and engine, and lets them go on after a while",
        "requests are held, and no client sees an error",
        _all_away,
    ),
    Scenario(
        "slow-replica",
        "makes a replica slow",
        "it gets fewer requests than the others, and no client sees an error",
        _slow_replica,
        least_replicas=2,
        injects=True,
    ),
)
