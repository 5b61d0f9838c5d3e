"""A proxy that receives invalid requests."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

from faults.scenarios.client_faults import address_of, answers_as_before, completion
from faults.scenarios.fuzz import odd_body, odd_bytes
from faults.scenarios.load import Endpoint
from faults.scenarios.outcome import Scale, Scenario, ScenarioOutcome
from faults.scenarios.target import Target
from pools.protocol import RequestCounters

_AT_ONCE = 48
_SILENT_SECONDS = 0.2
"""Seconds that a client waits after a possibly incomplete request: the proxy waits for the rest."""
_ANSWER_SECONDS = 60.0
_SHOWN = 3
_STATUS = re.compile(rb"^HTTP/1\.1 ([1-5]\d\d) [ -~]*\r\n")
_OF_THE_PROXY = ("The proxy failed", "Engines gave", "Engines broke", "No engine answered")


@dataclass
class _Seen:
    statuses: Counter[int | str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        if len(self.wrong) < 50:
            self.wrong.append(problem)


async def _fuzzed(target: Target, scale: Scale) -> ScenarioOutcome:
    began = time.monotonic()
    generator = random.Random(scale.seed)
    endpoint = target.endpoint
    pid = target.proxy_pid
    before = await asyncio.to_thread(_counted, target)
    bodies = [odd_body(generator, endpoint.model) for _ in range(scale.fuzzed // 2)]
    right = _right_requests(endpoint)
    streams = [odd_bytes(generator, generator.choice(right)) for _ in range(scale.fuzzed - len(bodies))]
    seen = _Seen()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=_ANSWER_SECONDS),
        headers={"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"},
    ) as session:
        await _each(bodies, lambda body: _ask(session, target, body, seen))
    after_bodies = await asyncio.to_thread(_counted, target)
    given = seen.statuses[200]
    may = after_bodies.upstream + after_bodies.journal_hits - before.upstream - before.journal_hits
    rules = []
    if given > may:
        rules.append(f"{given} bodies were answered with 200, and engines and journal gave {may} answers")
    await _each(streams, lambda stream: _converse(endpoint, stream, seen))
    if seen.wrong:
        rules.append(f"{len(seen.wrong)} requests got a wrong answer: {'; '.join(seen.wrong[:_SHOWN])}")
    if target.proxy_pid != pid:
        rules.append("the proxy ended")
    more, _ = await answers_as_before(target)
    return ScenarioOutcome(
        "fuzzed",
        requests=scale.fuzzed,
        seconds=round(time.monotonic() - began, 2),
        violations=(*rules, *more),
        figures={f"status_{status}": count for status, count in sorted(seen.statuses.items(), key=str)},
    )


async def _each(requests: list[bytes], act: Callable[[bytes], Awaitable[None]]) -> None:
    left = iter(requests)

    async def work() -> None:
        for request in left:
            await act(request)

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))


async def _ask(session: aiohttp.ClientSession, target: Target, body: bytes, seen: _Seen) -> None:
    # a valid request must be answered, with a fitting status
    endpoint = target.endpoint
    try:
        async with session.post(f"{endpoint.base_url}/completions", data=body) as response:
            answer = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        seen.note(f"no answer ({type(error).__name__}) to {body[:80]!r}")
        return
    status = response.status
    seen.statuses[status] += 1
    if status >= 500:
        own = any(text.encode() in answer for text in _OF_THE_PROXY)
        if own or target.inject is not None:  # a real engine's answer to such a body is not checked
            seen.note(f"{status} ({answer[:100]!r}) to {body[:120]!r}")
    if status == 200 and _model_in(body) != endpoint.model:
        seen.note(f"200 to a body without the model: {body[:80]!r}")


def _model_in(body: bytes) -> object:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return content.get("model") if isinstance(content, dict) else None


async def _converse(endpoint: Endpoint, stream: bytes, seen: _Seen) -> None:
    # replies must be well-formed, and never report an error of the proxy itself
    try:
        reader, writer = await asyncio.open_connection(*address_of(endpoint))
    except OSError as error:
        seen.note(f"no connection ({error})")
        return
    reply = b""
    try:
        writer.write(stream)
        async with asyncio.timeout(_SILENT_SECONDS):
            while piece := await reader.read(65536):
                reply += piece
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    if not reply:
        seen.statuses["no answer"] += 1
        return
    match = _STATUS.match(reply)
    if match is None:
        seen.note(f"{reply[:60]!r} to {stream[:120]!r}")
        return
    status = int(match[1])
    seen.statuses[status] += 1
    if status >= 500:
        seen.note(f"{status} to {stream[:200]!r}")


def _right_requests(endpoint: Endpoint) -> list[bytes]:
    # the connection closes after each
    close = f"Host: pool\r\nAuthorization: Bearer {endpoint.key}\r\nConnection: close\r\n"
    body = json.dumps({"model": endpoint.model, "prompt": "why", "max_tokens": 2, "temperature": 0}).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return [
        completion(endpoint, {"prompt": "why", "max_tokens": 2, "temperature": 0}),
        f"POST /v1/completions HTTP/1.1\r\n{close}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks,
        f"GET /v1/models HTTP/1.1\r\n{close}\r\n".encode(),
        f"GET /metrics?a=b HTTP/1.1\r\n{close}\r\n".encode(),
        b"GET /health HTTP/1.0\r\n\r\n",
        f"PUT /admin/state HTTP/1.1\r\n{close}Content-Length: 2\r\n\r\n{{}}".encode(),
        f"GET /cells/a/b/v1/models HTTP/1.1\r\n{close}\r\n".encode(),
    ]


def _counted(target: Target) -> RequestCounters:
    return target.status().models.get(target.model, RequestCounters())


FUZZ_SCENARIOS = (
    Scenario(
        "fuzzed",
        "sends bytes that are hardly HTTP, and bodies that are hardly right",
        "no crash, no hang, no 2xx but the engine's, no 5xx for what is the client's fault",
        _fuzzed,
    ),
)
