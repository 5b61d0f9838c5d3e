"""A closed-loop load generator in a process of its own: some connections, each with a single request at a time.

    python tests/benchmarks/load.py '{"port": 8000, "concurrency": 32, "seconds": 4}'

prints a `LoadResult` as JSON. Bodies are those of a small completion request, each with a different number in its
prompt. It uses bare sockets through uvloop and httptools, since it shares the machine with the measured server. Latency
is from the write of a request to the last byte of its answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httptools
import uvloop

_RECONNECT_SECONDS = 0.05
_OPENING_SECONDS = 30.0
_DRAIN_SECONDS = 10.0
_NUMBER_DIGITS = 10


@dataclass(frozen=True)
class LoadPlan:
    port: int
    concurrency: int
    seconds: float = 4.0
    """Time to count for; with `requests`, their time-out."""
    warm_up_seconds: float = 1.0
    requests: int | None = None
    """Ends after so many requests, all of them counted, without a warm-up."""
    tag: str = "t"
    """Makes the prompts of each run different."""
    max_tokens: int = 16
    key: str = ""
    """Sent as a bearer token."""
    host: str = "127.0.0.1"
    path: str = "/v1/completions"
    model: str = "tiny"
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of the body."""


@dataclass(frozen=True)
class LoadResult:
    """Outcome of a load. Latencies are in milliseconds and of answers with status 200 only; NaN without any."""

    requests: int
    """Answers with status 200 that came while counting."""
    seconds: float
    per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    errors: dict[str, int]
    """Failed requests by kind: `status 503`, `connection refused`, `connection lost`."""


class Accounts:
    """Counts answers from `begin` to `end`, in the clock's seconds."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin = begin
        self._end = end
        self._latencies = array("d")
        self._errors: Counter[str] = Counter()

    def answered(self, status: int, *, sent: float, now: float) -> None:
        if self._begin <= now < self._end:
            if status == 200:
                self._latencies.append(now - sent)
            else:
                self._errors[f"status {status}"] += 1

    def failed(self, kind: str, *, now: float) -> None:
        """Counts a request without an answer, or a failed connection."""
        if self._begin <= now < self._end:
            self._errors[kind] += 1

    def result(self, now: float) -> LoadResult:
        """Returns the figures of the window, or of its part until now."""
        seconds = min(now, self._end) - self._begin
        ordered = sorted(self._latencies)
        return LoadResult(
            requests=len(ordered),
            seconds=seconds,
            per_second=len(ordered) / seconds if seconds > 0 else 0.0,
            p50_ms=percentile(ordered, 50) * 1000,
            p95_ms=percentile(ordered, 95) * 1000,
            p99_ms=percentile(ordered, 99) * 1000,
            errors=dict(self._errors),
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns the smallest value with `percent` percent of the values at or below it; NaN without values."""
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


class Requests:
    """The requests of a plan as bytes, by number; their lengths are all the same."""

    def __init__(self, plan: LoadPlan) -> None:
        body = {
            "model": plan.model,
            "prompt": f"{plan.tag}-{'#' * _NUMBER_DIGITS}: the quick brown fox jumps over the lazy dog",
            "max_tokens": plan.max_tokens,
            "temperature": 0.0,
            "seed": 1234,
            **plan.fields,
        }
        before, _, after = json.dumps(body).encode().partition(b"#" * _NUMBER_DIGITS)
        length = len(before) + _NUMBER_DIGITS + len(after)
        head = (
            f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\nAuthorization: Bearer {plan.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        )
        self._before, self._after, self._head_size = head.encode() + before, after, len(head)

    def request(self, number: int) -> bytes:
        return b"%b%010d%b" % (self._before, number, self._after)

    def body(self, number: int) -> bytes:
        """Returns the body alone, as the receiver must get it."""
        return self.request(number)[self._head_size :]


class Load:
    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._requests = Requests(plan)
        self._sent = 0
        self._open = 0
        self._left = plan.concurrency
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_open = asyncio.Event()
        self._all_done = asyncio.Event()
        self.accounts = Accounts(math.inf, math.inf)
        self.is_over = False

    async def run(self) -> LoadResult:
        counted = self._plan.requests is not None
        if counted:
            self.accounts = Accounts(time.perf_counter(), time.perf_counter() + self._plan.seconds)
        for _ in range(self._plan.concurrency):
            self.connect()
        if counted:
            await _within(self._plan.seconds, self._all_done)
        else:
            await _within(_OPENING_SECONDS, self._all_open)
            begin = time.perf_counter() + self._plan.warm_up_seconds
            self.accounts = Accounts(begin, begin + self._plan.seconds)
            await asyncio.sleep(self._plan.warm_up_seconds + self._plan.seconds)
        result = self.accounts.result(time.perf_counter())
        self.is_over = True
        # Waits for open requests: a proxy that cancels them would still be busy in the next round.
        await _within(_DRAIN_SECONDS, self._all_done)
        return result

    def connect(self, after_seconds: float = 0.0) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(after_seconds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, after_seconds: float) -> None:
        await asyncio.sleep(after_seconds)
        loop = asyncio.get_running_loop()
        while not self.is_over:
            try:
                await loop.create_connection(lambda: Connection(self), self._plan.host, self._plan.port)
            except OSError:
                self.accounts.failed("connection refused", now=time.perf_counter())
                await asyncio.sleep(_RECONNECT_SECONDS)
            else:
                return
        self.done()

    def opened(self) -> None:
        self._open += 1
        if self._open >= self._plan.concurrency:
            self._all_open.set()

    def next_request(self) -> bytes | None:
        """Returns the next request, None at the end of the plan."""
        if self.is_over or self._sent == self._plan.requests:
            return None
        self._sent += 1
        return self._requests.request(self._sent - 1)

    def done(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._all_done.set()


class Connection(asyncio.Protocol):
    """Sends a request at a time; reopened when the other side closes it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._parser = httptools.HttpResponseParser(self)
        self._sent: float | None = None
        self._is_finished = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._load.opened()
        self._send()

    def _send(self) -> None:
        request = self._load.next_request()
        if request is None:
            self._is_finished = True
            self._transport.close()
            self._load.done()
            return
        self._sent = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_message_complete(self) -> None:
        assert self._sent is not None
        self._load.accounts.answered(self._parser.get_status_code(), sent=self._sent, now=time.perf_counter())
        self._sent = None
        if self._parser.should_keep_alive():
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_finished:
            return
        if self._sent is not None:
            self._load.accounts.failed("connection lost", now=time.perf_counter())
        self._load.connect(_RECONNECT_SECONDS if self._sent is not None else 0.0)


async def _within(seconds: float, event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


def run_load(plan: LoadPlan) -> LoadResult:
    """Runs a plan in a process of its own."""
    command = [sys.executable, Path(__file__), json.dumps(dataclasses.asdict(plan))]
    limit = plan.seconds + plan.warm_up_seconds + _OPENING_SECONDS + _DRAIN_SECONDS + 30
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=limit)
    return LoadResult(**json.loads(done.stdout))


def main() -> None:
    plan = LoadPlan(**json.loads(sys.argv[1]))
    gc.disable()

    async def generate() -> LoadResult:
        return await Load(plan).run()

    print(json.dumps(dataclasses.asdict(uvloop.run(generate()))))


if __name__ == "__main__":
    main()
