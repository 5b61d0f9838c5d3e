"""Clients that leave, come in crowds, or send excessive requests."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from faults.scenarios.load import Endpoint, LoadPlan, ask_all
from faults.scenarios.outcome import Scale, Scenario, ScenarioOutcome
from faults.scenarios.target import Target
from faults.scenarios.trial import plan_of

_LEAVES_WITHIN_SECONDS = 0.02
_AT_ONCE = 500
_PROBES = 40
_ANSWER_SECONDS = 120.0


async def _clients_leave(target: Target, scale: Scale) -> ScenarioOutcome:
    # a naive design failed for ever after a single client had left
    began = time.monotonic()
    generator = random.Random(scale.seed)
    gate = asyncio.Semaphore(_AT_ONCE)
    endpoint = target.endpoint
    mark = secrets.token_hex(4)
    pid = target.proxy_pid
    descriptors = await _open_files(pid)

    async def leave(number: int) -> None:
        async with gate:
            _, writer = await asyncio.open_connection(*address_of(endpoint))
            request = completion(endpoint, {"prompt": f"{mark} {number}", "max_tokens": 64, "temperature": 0.5})
            how_much = len(request) if number % 3 else generator.randrange(len(request))
            writer.write(request[:how_much])
            await asyncio.sleep(generator.random() * _LEAVES_WITHIN_SECONDS)
            if number % 2:
                writer.transport.abort()
            else:
                writer.close()

    await asyncio.gather(*(leave(number) for number in range(scale.clients)))
    left_after = time.monotonic() - began
    rules, probed = await answers_as_before(target)
    if target.proxy_pid != pid:
        rules.append("the proxy ended")
    elif (now := await _open_files(pid, most=descriptors + _PROBES)) > descriptors + _PROBES:
        rules.append(f"the proxy has {now} files and connections open, {descriptors} before")
    return ScenarioOutcome(
        "clients-leave",
        requests=scale.clients + probed,
        seconds=round(time.monotonic() - began, 2),
        violations=tuple(rules),
        figures={"left_after_seconds": round(left_after, 2)},
    )


async def _many_connections(target: Target, scale: Scale) -> ScenarioOutcome:
    plan = LoadPlan(f"crowd-{secrets.token_hex(4)}", requests=scale.clients, concurrency=scale.clients)
    report = await ask_all(target.endpoint, plan)
    rules = []
    if report.errors:
        rules.append(f"{report.errors.total()} of {plan.requests} requests failed: {dict(report.errors)}")
    more, probed = await answers_as_before(target)
    return ScenarioOutcome(
        "many-connections",
        requests=plan.requests + probed,
        client_errors=report.errors.total(),
        seconds=round(report.seconds, 2),
        violations=(*rules, *more),
    )


async def _large_prompts(target: Target, scale: Scale) -> ScenarioOutcome:
    # an engine may answer large prompts or refuse their length; the client must receive either result
    began = time.monotonic()
    endpoint = target.endpoint
    if target.inject is not None:
        for engine in await asyncio.to_thread(target.engines):
            target.inject(engine.url, {"any_length": True})
    mark = secrets.token_hex(8)
    words = f"{mark} ".encode() * (scale.prompt_bytes // 17 + 1)

    async def ask(number: int) -> int | None:
        prompt = f"{number} {words[: scale.prompt_bytes].decode()}"
        reply = await _conversation(endpoint, completion(endpoint, {"prompt": prompt, "max_tokens": 1}))
        return _status_of(reply)

    statuses = Counter(await asyncio.gather(*(ask(number) for number in range(scale.large_prompts))))
    rules = []
    expected = {200} if target.inject is not None else {200, 400}
    if set(statuses) - expected:
        rules.append(f"prompts of {scale.prompt_bytes} bytes were answered with {dict(statuses)}")
    more, probed = await answers_as_before(target)
    return ScenarioOutcome(
        "large-prompts",
        requests=scale.large_prompts + probed,
        client_errors=sum(count for status, count in statuses.items() if status not in expected),
        seconds=round(time.monotonic() - began, 2),
        violations=(*rules, *more),
        figures={f"status_{status}": count for status, count in statuses.items()},
    )


async def answers_as_before(target: Target) -> tuple[list[str], int]:
    """Returns problems of the pool after a storm, and the number of requests used to find them."""
    plan = plan_of(Scale(requests=_PROBES, concurrency=8))
    report = await ask_all(target.endpoint, plan)
    rules = []
    if report.errors:
        rules.append(f"afterwards {report.errors.total()} of {_PROBES} requests fail: {dict(report.errors)}")
    unsettled = await target.settled()
    if unsettled is not None:
        rules.append(f"afterwards the pool is not idle: {unsettled}")
    return rules, _PROBES


async def _open_files(pid: int, *, most: int | None = None, seconds: float = 10.0) -> int:
    # waits up to `seconds` for at most `most` open files and connections
    deadline = time.monotonic() + seconds
    while True:
        count = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        if most is None or count <= most or time.monotonic() > deadline:
            return count
        await asyncio.sleep(0.1)


def address_of(endpoint: Endpoint) -> tuple[str, int]:
    parts = urlsplit(endpoint.base_url)
    return parts.hostname or "", parts.port or 80


def completion(endpoint: Endpoint, fields: dict[str, object]) -> bytes:
    """Returns a whole HTTP request, after which the connection closes."""
    body = json.dumps({"model": endpoint.model, **fields}).encode()
    head = (
        f"POST {urlsplit(endpoint.base_url).path}/completions HTTP/1.1\r\nHost: pool\r\n"
        f"Authorization: Bearer {endpoint.key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _conversation(endpoint: Endpoint, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address_of(endpoint))
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            writer.write(request)
            return await reader.read()
    except (OSError, TimeoutError):
        return b""
    finally:
        writer.close()


def _status_of(reply: bytes) -> int | None:
    parts = reply[:64].split(b" ", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else None


CLIENT_SCENARIOS = (
    Scenario(
        "clients-leave",
        "sends clients that leave within milliseconds, some in the middle of their request",
        "afterwards the pool answers as before, and nothing is left in flight or open",
        _clients_leave,
    ),
    Scenario("many-connections", "asks on all connections at once", "every client is answered", _many_connections),
    Scenario(
        "large-prompts", "asks with prompts of megabytes", "the engine's own answer comes through", _large_prompts
    ),
)
