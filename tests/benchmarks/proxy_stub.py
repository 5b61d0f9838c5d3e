"""Assay's proxy against vllm-router, both in front of the same engine of negligible cost.

    make bench NAME=proxy_stub

There are 3 sides, which take turns in the same run, each round in another order, and the median of the rounds counts:
direct to the engine, through Assay's proxy (as a pool runs it, with its key and its journal), and through vllm-router.
The figures:

- requests per second at concurrency 256, with 50 ms per answer in the engine;
- requests per second at concurrency 32, without delay, so that only the machinery is measured;
- milliseconds added to the median latency of a single request at a time.

Before that, every body must arrive byte for byte: 49 kinds of request that evaluators send, one at a time, and many
different bodies at the same time. Both counts are printed for both sides, with the errors.

Load generator, engine and proxy share the machine's cores; for a single request at a time they all share the same core.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from bodies import KINDS
from load import LoadPlan, LoadResult, Requests, run_load
from peers import (
    CLIENT_KEY,
    VLLM_ROUTER,
    Stub,
    add_journal_option,
    check_all_answered,
    our_proxy,
    stub_engine,
    tell,
    vllm_router,
)
from side_by_side import (
    BENCH,
    Comparison,
    end_children_on_sigterm,
    interleaved,
    on_a_single_core,
    print_comparison,
    print_table,
    requirement_pin,
    say,
)
from stub_engine import answer_to

WORK = BENCH / "proxy-stub"
SIDES = ("direct", "ours", "theirs")
_CHECKED_AT_ONCE = 256
_CHECKED_REQUESTS = 5000


@dataclass(frozen=True)
class Figure:
    name: str
    delay_ms: float
    concurrency: int


FIGURES = (
    Figure("answers_of_50_ms", delay_ms=50, concurrency=256),
    Figure("answers_at_once", delay_ms=0, concurrency=32),
    Figure("one_at_a_time", delay_ms=0, concurrency=1),
)


@dataclass
class Arrived:
    sent: int = 0
    identical: int = 0
    """Bodies that the engine got byte for byte."""
    answers_identical: int = 0
    """Answers that the client got byte for byte."""
    refused: dict[str, int] = field(default_factory=dict)
    """Kinds that got another status than 200, with the status."""
    altered: list[str] = field(default_factory=list)
    """Kinds that the engine got altered."""


@contextmanager
def all_sides(
    folder: Path, *, keeps_journal: bool, delay_ms: float = 0, checks: bool = False
) -> Iterator[tuple[Stub, dict[str, int]]]:
    """Runs the engine with both proxies in front of it; yields the port of each side."""
    with (
        stub_engine(folder, delay_ms=delay_ms, checks=checks) as stub,
        our_proxy(folder, keeps_journal=keeps_journal) as ours,
        vllm_router(folder, stub.ports) as theirs,
    ):
        tell(ours, stub.ports)
        yield stub, {"direct": stub.ports[0], "ours": ours.address.port, "theirs": theirs}


def send_each_kind(port: int, stub: Stub, *, first_number: int) -> Arrived:
    """Sends a body of each kind over a connection, and checks the bodies that the engine got."""
    arrived = Arrived()
    seen = set(stub.digests())
    for number, kind in enumerate(KINDS, start=first_number):
        body = kind.body(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Authorization": f"Bearer {CLIENT_KEY}", "Content-Type": "application/json"}
        connection.request("POST", kind.path, body=body, headers=headers)
        reply = connection.getresponse()
        answer = reply.read()
        connection.close()
        arrived.sent += 1
        arrived.answers_identical += answer == answer_to(kind.path, body)
        if reply.status != 200:
            arrived.refused[kind.name] = reply.status
        now = set(stub.digests())
        if hashlib.sha256(body).hexdigest() in now - seen:
            arrived.identical += 1
        else:
            arrived.altered.append(kind.name)
        seen = now
    return arrived


def send_many(port: int, stub: Stub, *, tag: str) -> Arrived:
    """Sends different bodies over many parallel connections, and compares all bodies that the engine got."""
    plan = LoadPlan(port, _CHECKED_AT_ONCE, seconds=60, requests=_CHECKED_REQUESTS, tag=tag, key=CLIENT_KEY)
    before = len(stub.digests())
    result = run_load(plan)
    got = Counter(stub.digests()[before:])
    bodies = Requests(plan)
    sent = [hashlib.sha256(bodies.body(number)).hexdigest() for number in range(_CHECKED_REQUESTS)]
    return Arrived(sent=len(sent), identical=sum(got[digest] == 1 for digest in sent), refused=result.errors)


def check_bodies(*, keeps_journal: bool) -> dict[str, dict[str, Arrived]]:
    """Returns the outcome of both checks for all sides: side → check → outcome."""
    by_side: dict[str, dict[str, Arrived]] = {}
    with all_sides(WORK / "bodies", keeps_journal=keeps_journal, checks=True) as (stub, ports):
        for place, (side, port) in enumerate(ports.items()):
            each = send_each_kind(port, stub, first_number=place * len(KINDS))
            many = send_many(port, stub, tag=f"check-{side}")
            by_side[side] = {"kinds": each, "many": many}
    rows = []
    for side, checks in by_side.items():
        each, many = checks["kinds"], checks["many"]
        counts = (f"{each.identical}/{each.sent}", f"{each.answers_identical}/{each.sent}", len(each.refused))
        rows.append((side, *counts, f"{many.identical}/{many.sent}"))
    columns = ("side", "kinds as sent", "answers as sent", "kinds refused", f"as sent, {_CHECKED_AT_ONCE} at once")
    print_table("bodies that arrived byte for byte", columns, rows)
    for side, checks in by_side.items():
        if checks["kinds"].refused:
            say(f"{side} refused: {checks['kinds'].refused}")
        if side != "theirs" and checks["kinds"].altered:
            say(f"{side} altered or did not pass on: {checks['kinds'].altered}")
    return by_side


def measure(figure: Figure, *, rounds: int, seconds: float, keeps_journal: bool) -> dict[str, list[LoadResult]]:
    results: dict[str, list[LoadResult]] = {side: [] for side in SIDES}
    with (
        on_a_single_core() if figure.concurrency == 1 else nullcontext(),
        all_sides(WORK / figure.name, keeps_journal=keeps_journal, delay_ms=figure.delay_ms) as (_, ports),
    ):
        plan = LoadPlan(0, figure.concurrency, seconds=seconds, key=CLIENT_KEY)
        for turn, side in enumerate(interleaved(SIDES, rounds)):
            result = run_load(replace(plan, port=ports[side], tag=f"{figure.name}-{turn}-{time.time_ns()}"))
            check_all_answered(side, result)
            results[side].append(result)
            say(f"{figure.name}: {side} {result.per_second:.0f}/s, p50 {result.p50_ms:.3f} ms, p99 {result.p99_ms:.3f}")
    return results


def report(figure: Figure, results: dict[str, list[LoadResult]], facts: dict[str, object]) -> None:
    rate = {side: statistics.median(result.per_second for result in rounds) for side, rounds in results.items()}
    p50, p95, p99 = (
        {side: statistics.median(getattr(result, name) for result in rounds) for side, rounds in results.items()}
        for name in ("p50_ms", "p95_ms", "p99_ms")
    )
    print_table(
        f"{figure.concurrency} at once, {figure.delay_ms:g} ms per answer; medians of {len(results['ours'])} rounds",
        ("side", "requests/s", "share of direct", "p50 ms", "p95 ms", "p99 ms"),
        [
            (
                side,
                f"{rate[side]:.0f}",
                f"{rate[side] / rate['direct']:.3f}",
                *(f"{values[side]:.3f}" for values in (p50, p95, p99)),
            )
            for side in SIDES
        ],
    )
    facts = {
        "peer": requirement_pin(VLLM_ROUTER.requirements, "vllm-router"),
        "concurrency": figure.concurrency,
        "answer_ms": figure.delay_ms,
        "rounds": len(results["ours"]),
        "direct_per_second": round(rate["direct"], 1),
        "p99_ms": {side: round(value, 3) for side, value in p99.items()},
        **facts,
    }
    name, added = f"proxy_stub.{figure.name}", {side: p50[side] - p50["direct"] for side in SIDES}
    if figure.concurrency == 1:
        unit = "milliseconds added to the median latency"
        comparison = Comparison(name, unit, added["ours"], added["theirs"], better="less", facts=facts)
    else:
        facts["share_of_direct"] = {side: round(rate[side] / rate["direct"], 3) for side in ("ours", "theirs")}
        comparison = Comparison(name, "requests/s", rate["ours"], rate["theirs"], better="more", facts=facts)
    print_comparison(comparison)


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side (default: 3)")
    parser.add_argument("--seconds", type=float, default=4, help="counted seconds of a round (default: 4)")
    names = [figure.name for figure in FIGURES]
    parser.add_argument("--only", choices=["bodies", *names], action="append", help="may be given again")
    add_journal_option(parser)
    given = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    chosen = given.only or ["bodies", *names]
    facts: dict[str, object] = {"journal": not given.no_journal}
    if "bodies" in chosen:
        by_side = check_bodies(keeps_journal=not given.no_journal)
        for side in ("ours", "theirs"):
            counts = {name: f"{check.identical}/{check.sent}" for name, check in by_side[side].items()}
            facts[f"bodies_identical_{side}"] = counts
    for figure in FIGURES:
        if figure.name in chosen:
            results = measure(figure, rounds=given.rounds, seconds=given.seconds, keeps_journal=not given.no_journal)
            report(figure, results, facts)


if __name__ == "__main__":
    main()
