"""Requests per second through the proxy with growing numbers of replicas, against a single replica without it.

    make bench NAME=scaling

The replicas are bound by latency, as an engine on an accelerator is for its clients: a replica works on 4 requests at a
time and takes 100 ms for each, so at most 40 per second, and 64 replicas 2560. That is well below the capacity of a
small machine's cores, so the cores are not measured.

There are 2 loads. With 8 concurrent requests per replica, each has its next requests queued: this measures if the proxy
keeps every replica busy, which requires an even distribution. With 4 there is no such reserve: each millisecond in the
proxy is an idle millisecond of a replica. (Answers then come 4 at a time, every 100 ms: such a group more or less in
the counted seconds is 2 % at 1 replica.)

The ratio of each figure is requests per second with N replicas behind the proxy, over N times those of a replica
without it under the same load per replica. Its facts name the fewest and the most requests of a replica.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from load import LoadPlan, LoadResult, run_load
from peers import CLIENT_KEY, Stub, add_journal_option, check_all_answered, our_proxy, stub_engine, tell
from side_by_side import BENCH, Comparison, end_children_on_sigterm, print_comparisons, say

WORK = BENCH / "scaling"
DELAY_MS = 100
CAPACITY = 4
LOADS = (2 * CAPACITY, CAPACITY)
REPLICAS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Step:
    replicas: int
    result: LoadResult
    counts: tuple[int, ...]
    """Requests of each replica."""


def loaded(port: int, *, replicas: int, per_replica: int, seconds: float, side: str) -> LoadResult:
    """Runs a load of so many concurrent requests per replica."""
    plan = LoadPlan(port, replicas * per_replica, seconds=seconds, tag=f"{time.time_ns()}", key=CLIENT_KEY)
    result = run_load(plan)
    check_all_answered(side, result)
    say(f"{side}, {replicas} replicas: {result.per_second:.1f}/s, p50 {result.p50_ms:.1f}, p99 {result.p99_ms:.1f} ms")
    return result


def growth(
    numbers: Sequence[int], *, per_replica: int, seconds: float, keeps_journal: bool
) -> tuple[float, list[Step]]:
    """Returns requests per second of a replica without the proxy, measured before and after, and the steps."""
    with (
        stub_engine(WORK, replicas=max(numbers), delay_ms=DELAY_MS, capacity=CAPACITY) as stub,
        our_proxy(WORK / f"{per_replica}", keeps_journal=keeps_journal) as proxy,
    ):
        alone = [loaded(stub.ports[0], replicas=1, per_replica=per_replica, seconds=seconds, side="direct")]
        steps = []
        for replicas in numbers:
            tell(proxy, stub.ports[:replicas])
            before = stub.counts()
            result = loaded(
                proxy.address.port, replicas=replicas, per_replica=per_replica, seconds=seconds, side="ours"
            )
            steps.append(Step(replicas, result, got_since(before, stub, replicas)))
        alone.append(loaded(stub.ports[0], replicas=1, per_replica=per_replica, seconds=seconds, side="direct"))
    return statistics.mean(result.per_second for result in alone), steps


def got_since(before: Sequence[int], stub: Stub, replicas: int) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(stub.counts()[:replicas], before[:replicas], strict=True))


def report(alone: float, steps: Sequence[Step], *, per_replica: int, journal: bool) -> list[Comparison]:
    return [
        Comparison(
            f"scaling.{step.replicas}.{'with' if per_replica > CAPACITY else 'without'}_reserve",
            "requests/s",
            step.result.per_second,
            step.replicas * alone,
            better="more",
            facts={
                "replicas": step.replicas,
                "requests_at_once": step.replicas * per_replica,
                "journal": journal,
                "replica": f"{CAPACITY} at once, {DELAY_MS} ms each",
                "fewest_requests_of_a_replica": min(step.counts),
                "most_requests_of_a_replica": max(step.counts),
                "p99_ms": round(step.result.p99_ms, 1),
            },
        )
        for step in steps
    ]


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5, help="counted seconds for each number (default: 5)")
    parser.add_argument("--per-replica", type=int, nargs="+", default=LOADS, help="requests at once for each replica")
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS, help="numbers of replicas")
    add_journal_option(parser)
    given = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    comparisons: list[Comparison] = []
    for per_replica in given.per_replica:
        alone, steps = growth(
            sorted(given.replicas), per_replica=per_replica, seconds=given.seconds, keeps_journal=not given.no_journal
        )
        comparisons += report(alone, steps, per_replica=per_replica, journal=not given.no_journal)
    print_comparisons("Requests per second behind the proxy; as many single replicas", comparisons)


if __name__ == "__main__":
    main()
