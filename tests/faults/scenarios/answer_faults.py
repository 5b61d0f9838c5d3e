"""Engines with cut, garbled, aborted or refused answers."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from faults.scenarios.load import LoadPlan, ask_all
from faults.scenarios.outcome import Scale, Scenario, ScenarioOutcome
from faults.scenarios.questions import Kind
from faults.scenarios.target import Target
from faults.scenarios.trial import Trial, plan_of, tried

_FAULTS = 2
_WHOLE: tuple[Kind, ...] = ("greedy", "logprobs", "sampled", "chat", "tokens")


async def _with_fault(target: Target, plan: LoadPlan, fault: str, times: int) -> Trial:
    assert target.inject is not None
    inject = target.inject
    url = (await asyncio.to_thread(target.engines))[0].url

    async def begin() -> None:
        inject(url, {fault: times})

    try:
        return await tried(target, plan, begin, share=0.0)
    finally:
        inject(url, {fault: 0})


async def _asked_again(target: Target, scale: Scale, name: str, fault: str) -> ScenarioOutcome:
    # a request is sent 3 times in all, so 2 faults cannot use up all of its attempts
    plan = plan_of(scale, kinds=_WHOLE)
    trial = await _with_fault(target, plan, fault, _FAULTS)
    rules = trial.broken_rules(most_upstream=plan.requests + _FAULTS)
    if trial.counts.retried != _FAULTS:
        rules.append(f"{_FAULTS} answers were spoiled, and requests sent again {trial.counts.retried} times")
    return trial.outcome(name, rules)


async def _cut_bodies(target: Target, scale: Scale) -> ScenarioOutcome:
    # a broken connection may fail only its own request, but makes the replica suspect for a while
    return await _asked_again(target, scale, "answer-cut", "die_mid_body")


async def _malformed(target: Target, scale: Scale) -> ScenarioOutcome:
    return await _asked_again(target, scale, "answer-malformed", "malformed")


async def _aborted(target: Target, scale: Scale) -> ScenarioOutcome:
    return await _asked_again(target, scale, "answer-aborted", "aborted")


async def _cut_streams(target: Target, scale: Scale) -> ScenarioOutcome:
    cut = 5
    plan = plan_of(scale, kinds=("stream",))
    trial = await _with_fault(target, plan, "die_mid_stream", cut)
    rules = trial.broken_rules(broken_streams=cut)
    if trial.report.broken_streams != cut:
        rules.append(f"{cut} streams were cut, and clients noticed {trial.report.broken_streams}")
    return _given_only_once(trial, trial.outcome("stream-cut", rules))


async def _never_valid(target: Target, scale: Scale) -> ScenarioOutcome:
    # all answers are garbage: clients must get errors, and no part of an answer may be shown or kept
    began = time.monotonic()
    few = dataclasses.replace(scale, requests=min(scale.requests, 64))
    plan = plan_of(few, kinds=_WHOLE)
    trials = []
    for fault in ("malformed", "aborted"):
        trials.append(await _walled(target, plan, {fault: 10_000_000}, {fault: 0}))
        plan = plan_of(few, kinds=_WHOLE)
    rules = []
    for name, (statuses, kept, _) in zip(("malformed", "aborted"), trials, strict=True):
        if set(statuses) != {502}:
            rules.append(f"{name} answers came through as {_counted(statuses)}, all should be 502")
        if kept:
            rules.append(f"{kept} {name} answers were kept")
    asked = 2 * few.requests
    seconds = round(time.monotonic() - began, 2)
    return ScenarioOutcome(
        "answers-never-valid", requests=asked, client_errors=asked, seconds=seconds, violations=tuple(rules)
    )


async def _refusals(target: Target, scale: Scale) -> ScenarioOutcome:
    began = time.monotonic()
    rules = []
    figures = {}
    for status in (400, 429):
        plan = plan_of(scale)
        faults = {"status": status, "status_count": 10_000_000}
        statuses, kept, upstream = await _walled(target, plan, faults, {"status_count": 0})
        if set(statuses) != {status}:
            rules.append(f"answers {status} came through as {_counted(statuses)}")
        if upstream != plan.requests:
            rules.append(f"{plan.requests} requests were sent to engines {upstream} times where they answered {status}")
        if kept:
            rules.append(f"{kept} refusals were kept")
        figures[f"upstream_{status}"] = upstream
    asked = 2 * scale.requests
    return ScenarioOutcome(
        "refused-by-engine",
        requests=asked,
        client_errors=asked,
        seconds=round(time.monotonic() - began, 2),
        violations=tuple(rules),
        figures=dict(figures),
    )


async def _walled(
    target: Target, plan: LoadPlan, begin: Mapping[str, Any], end: Mapping[str, Any]
) -> tuple[Counter[int | None], int, int]:
    # returns statuses, kept answers, and attempts at engines while every engine has the same fault
    assert target.inject is not None
    engines = await asyncio.to_thread(target.engines)
    cell = target.cell()
    view = await asyncio.to_thread(cell.__enter__)
    try:
        for engine in engines:
            target.inject(engine.url, begin)
        try:
            report = await ask_all(view.endpoint, plan)
        finally:
            for engine in engines:
                target.inject(engine.url, end)
        kept = view.kept()
        counts = await asyncio.to_thread(view.counts)
        return Counter(answer.status for answer in report.answers), kept.answers if kept else 0, counts.upstream
    finally:
        await asyncio.to_thread(cell.__exit__, None, None, None)


def _given_only_once(trial: Trial, outcome: ScenarioOutcome) -> ScenarioOutcome:
    # only whole answers may be kept
    whole = sum(answer.payload is not None for answer in trial.report.answers)
    if trial.kept is None or trial.kept.answers == whole:
        return outcome
    more = f"{whole} streams were whole, and {trial.kept.answers} were kept"
    return dataclasses.replace(outcome, violations=(*outcome.violations, more))


def _counted(statuses: Counter[int | None]) -> str:
    return ", ".join(f"{count} × {status or 'no answer'}" for status, count in statuses.most_common())


ANSWER_SCENARIOS = (
    Scenario(
        "answer-cut",
        "breaks connections in the middle of an answer",
        "it is asked for elsewhere, and no client sees an error",
        _cut_bodies,
        injects=True,
    ),
    Scenario(
        "stream-cut",
        "breaks connections in the middle of a stream",
        "the client gets an error event and a clean end, and nothing of it is kept",
        _cut_streams,
        injects=True,
    ),
    Scenario(
        "answer-malformed",
        "lets an engine answer 200 with JSON that is not whole",
        "it is asked for again, never shown, never kept",
        _malformed,
        injects=True,
    ),
    Scenario(
        "answer-aborted",
        "lets an engine answer 200 with an aborted choice",
        "it is asked for again, never shown, never kept",
        _aborted,
        injects=True,
    ),
    Scenario(
        "answers-never-valid",
        "lets every engine answer nothing but garbage",
        "clients get 502 and nothing is kept",
        _never_valid,
        injects=True,
    ),
    Scenario(
        "refused-by-engine",
        "lets every engine answer 400, then 429",
        "each refusal is passed on, and engines are asked once for each request",
        _refusals,
        injects=True,
    ),
)
