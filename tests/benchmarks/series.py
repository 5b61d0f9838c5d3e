"""Wall seconds per checkpoint of a series: Assay against a cold engine and the harness's command line for each.

    make bench NAME=series

Ours is `assay evaluate` as a user runs it: one process with its own Prefect server, from its start to its exit. Theirs
is what users do without it, per checkpoint: start a vLLM server, wait for /health, run `lm_eval` once with both
benchmarks at 32 requests at a time, stop the server. Both run in the same environments, with the same engine arguments
(`enforce_eager` too, which vLLM on a CPU is much slower to start without), and on the same weights; vLLM's other
settings are its own defaults for theirs.

Environments, vLLM's caches, the data-set caches and the Prefect database exist before the clock starts: one run of each
side is not counted (ours on two checkpoints: the comparison of a reload with a cold start, made once per architecture
and machine, is made there). Half of theirs is measured before ours and half after, so that a machine that gets slower
or faster meanwhile does so for both. Scores of both sides must be identical.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from side_by_side import (
    BENCH,
    ROOT,
    Comparison,
    end_children_on_sigterm,
    environment_of_a_user,
    give_up,
    installed_version,
    print_comparison,
    print_table,
    run_timed,
    say,
)

from pools.engines import ENGINES, engine_flags
from resources.environments import ENVIRONMENTS, ensure_environment
from tasks.benchmarks import BUNDLED

BENCHMARKS = ("demo_facts", "demo_backwards")
ENGINE_KWARGS = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": "64M"}
WORK = BENCH / "series"
_CONCURRENCY = 32
_START_SECONDS = 600.0
_STOP_SECONDS = 60.0
_TRAINING_SECONDS = 1500
_HEALTH_POLL_SECONDS = 0.1
_NOT_OURS_TO_MEASURE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

Scores = dict[tuple[int, str, str], float]
"""By step, benchmark and metric; standard errors too, as `<metric>_stderr`."""


@dataclass(frozen=True)
class Theirs:
    """Seconds that one checkpoint took."""

    step: int
    start: float
    evaluate: float
    stop: float
    total: float


@dataclass(frozen=True)
class Ours:
    """Seconds that a series took, and what its records say about each checkpoint: step → phase → seconds."""

    total: float
    phases: dict[int, dict[str, float]]


def demo_model(checkpoints: int) -> Path:
    """The demo's training run with so many checkpoints; trained now unless the same program has been run before."""
    sources = sorted((ROOT / "flows" / "programs").glob("*.py"))
    program_digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]
    folder = BENCH / f"demo-model-{checkpoints}-{program_digest}"
    if len(steps_of(folder)) == checkpoints:
        return folder
    say("training the demo's model, once")
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    python = ensure_environment(ENVIRONMENTS["vllm-cpu"], on_progress=say).python
    command = [python, ROOT / "flows" / "programs" / "train_demo_model.py", "--output", unfinished]
    # The trainer ends early on a slow machine, and would write fewer checkpoints than wanted.
    command += ["--checkpoints", str(checkpoints), "--seconds-limit", str(_TRAINING_SECONDS)]
    run_timed(command, log=WORK / "training.log", env=environment_of_a_user({}))
    if len(steps_of(unfinished)) != checkpoints:
        give_up(f"the training wrote {len(steps_of(unfinished))} checkpoints, not {checkpoints}", WORK / "training.log")
    unfinished.rename(folder)
    return folder


def steps_of(run: Path) -> dict[int, Path]:
    """Step → checkpoint, by step."""
    found = {int(folder.name.removeprefix("step-")): folder for folder in (run / "hf").glob("step-*")}
    return dict(sorted(found.items()))


def copied(run: Path, steps: Sequence[int], destination: Path) -> Path:
    """A run that holds some of the checkpoints; a fresh copy, so that nothing is remembered about its files."""
    for step in steps:
        shutil.copytree(run / "hf" / f"step-{step}", destination / "hf" / f"step-{step}")
    return destination


def measure_ours(run: Path, name: str, *, limit: int | None = None) -> tuple[Ours, Scores]:
    """Evaluates a whole run with one command."""
    output = WORK / name / "evaluations"
    command = [ROOT / ".venv" / "bin" / "assay", "evaluate", "--model", run, "--output", output, "--name", "tiny"]
    for benchmark in BENCHMARKS:
        command += ["--eval", benchmark]
    for key, value in ENGINE_KWARGS.items():
        command += ["--engine", f"{key}={value}"]
    if limit is not None:
        command += ["--limit", str(limit)]
    env = environment_of_a_user({**_NOT_OURS_TO_MEASURE, "PREFECT_HOME": str(BENCH / "prefect")})
    log = WORK / name / "assay.log"
    total = run_timed([*command, "--json"], log=log, env=env)
    records = json.loads(log.with_suffix(".out").read_text())["records"]
    scores: Scores = {}
    phases: dict[int, dict[str, float]] = {}
    for record in records:
        step = record["checkpoint"]["step"]
        phases[step] = record["seconds"]
        for metric in record["metrics"]:
            scores[step, metric["benchmark"], metric["name"]] = metric["value"]
            if metric["stderr"] is not None:
                scores[step, metric["benchmark"], f"{metric['name']}_stderr"] = metric["stderr"]
    return Ours(total, phases), scores


def measure_theirs(checkpoint: Path, step: int, name: str, *, limit: int | None = None) -> tuple[Theirs, Scores]:
    """Evaluates one checkpoint with a server started for it and the harness's command line."""
    folder = WORK / name
    began = time.monotonic()
    with vllm_server(checkpoint, folder / "vllm.log") as (url, seconds_to_health):
        evaluated = run_timed(
            lm_eval_command(checkpoint, url, output=folder / "results", limit=limit),
            log=folder / "lm_eval.log",
            env=environment_of_a_user(
                {**_NOT_OURS_TO_MEASURE, "HF_HOME": str(BENCH / "cache" / "hub"), "OPENAI_API_KEY": "none"}
            ),
            cwd=BUNDLED,  # the benchmarks name their data files relative to their own folder
        )
        stopping = time.monotonic()
    ended = time.monotonic()
    return Theirs(step, seconds_to_health, evaluated, ended - stopping, ended - began), their_scores(folder, step)


def lm_eval_command(checkpoint: Path, url: str, *, output: Path, limit: int | None) -> list[str | Path]:
    """One command line with both benchmarks, as somebody writes it who knows the harness."""
    model_args = {
        "model": "tiny",
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": checkpoint,
        "tokenized_requests": False,
        "num_concurrent": _CONCURRENCY,
        "max_retries": 3,
    }
    command: list[str | Path] = [ensure_environment(ENVIRONMENTS["lm-eval"]).python.parent / "lm_eval"]
    command += ["--model", "local-completions", "--tasks", ",".join(BENCHMARKS), "--include_path", "."]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in model_args.items())]
    command += ["--output_path", output]
    return [*command, "--limit", str(limit)] if limit is not None else command


def their_scores(folder: Path, step: int) -> Scores:
    """From the one result file that the harness has written."""
    [path] = (folder / "results").rglob("results_*.json")
    scores: Scores = {}
    for benchmark, row in json.loads(path.read_text())["results"].items():
        for key, value in row.items():
            metric, comma, _ = key.partition(",")
            if comma and isinstance(value, float):
                scores[step, benchmark, metric] = value
    return scores


@contextmanager
def vllm_server(checkpoint: Path, log: Path) -> Iterator[tuple[str, float]]:
    """A vLLM server for one checkpoint: its address, and the seconds it took until /health said yes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = ensure_environment(ENVIRONMENTS["vllm-cpu"]).python
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += engine_flags({**ENGINES["cpu"].kwargs, **ENGINE_KWARGS})
    env = environment_of_a_user({**_NOT_OURS_TO_MEASURE, "VLLM_CACHE_ROOT": str(BENCH / "cache" / "vllm")})
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
    """Whether a GET gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def check_scores(ours: Scores, theirs: Scores, steps: Sequence[int]) -> int:
    """Ends the script unless both sides have the same numbers for these steps; how many numbers that were."""
    mine = {key: value for key, value in ours.items() if key[0] in steps}
    if mine != theirs:
        different = sorted(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
        lines = [f"{key}: ours {mine.get(key)}, theirs {theirs.get(key)}" for key in different]
        give_up("the two sides disagree on scores\n" + "\n".join(lines))
    if not mine:
        give_up("there is no score to compare")
    return len(mine)


def main() -> None:
    """Measures both sides and prints what came of it."""
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=6, help="checkpoints in the series (default: 6)")
    parser.add_argument("--theirs", type=int, help="measure theirs on so many of them only (default: all)")
    given = parser.parse_args()
    count = max(1, given.checkpoints)
    for name in ("vllm-cpu", "lm-eval"):
        ensure_environment(ENVIRONMENTS[name], on_progress=say)
    shutil.rmtree(WORK, ignore_errors=True)
    model = demo_model(count)
    steps = list(steps_of(model))
    run = copied(model, steps, WORK / "run")
    # Evenly spread, the last one among them.
    measured = min(count, max(1, given.theirs or count))
    chosen = [steps[(place + 1) * len(steps) // measured - 1] for place in range(measured)]

    say("once each, not counted")
    measure_ours(copied(model, steps[:2], WORK / "warm-up"), "ours-uncounted", limit=2)
    measure_theirs(run / "hf" / f"step-{steps[0]}", steps[0], "theirs-uncounted", limit=2)

    theirs: list[Theirs] = []
    their_numbers: Scores = {}

    def take(some: Sequence[int]) -> None:
        for step in some:
            timing, scores = measure_theirs(run / "hf" / f"step-{step}", step, f"theirs-{step}")
            say(f"theirs: step {step} in {timing.total:.1f} s")
            theirs.append(timing)
            their_numbers.update(scores)

    take(chosen[: len(chosen) // 2])
    ours, our_numbers = measure_ours(run, "ours")
    say(f"ours: {len(steps)} checkpoints in {ours.total:.1f} s")
    take(chosen[len(chosen) // 2 :])
    compared = check_scores(our_numbers, their_numbers, chosen)
    report(ours, theirs, steps, compared)


def report(ours: Ours, theirs: Sequence[Theirs], steps: Sequence[int], compared: int) -> None:
    """The tables, and the last line."""
    print_table(
        "theirs: seconds per checkpoint",
        ("step", "vLLM start", "lm_eval", "stop", "total"),
        [(str(one.step), one.start, one.evaluate, one.stop, one.total) for one in theirs],
    )
    per_cell = {step: phases["load"] + phases["evaluate"] for step, phases in ours.phases.items()}
    print_table(
        "ours: seconds per checkpoint; the first load starts the engine",
        ("step", "load", "evaluate", "total"),
        [
            *((str(step), ours.phases[step]["load"], ours.phases[step]["evaluate"], per_cell[step]) for step in steps),
            ("Prefect, plan, report", "", "", ours.total - sum(per_cell.values())),
            ("series", "", "", ours.total),
        ],
    )
    their_mean = sum(one.total for one in theirs) / len(theirs)
    print_comparison(
        Comparison(
            name="series",
            unit="wall seconds per checkpoint",
            ours=ours.total / len(steps),
            theirs=their_mean,
            better="less",
            facts={
                "checkpoints": len(steps),
                "benchmarks": len(BENCHMARKS),
                "theirs_measured": len(theirs),
                "scores_compared": compared,
                "scores_identical": True,
                "caches": "warm: environments, engine and data-set caches, Prefect database, verdict on reloads",
                "vllm": installed_version("vllm-cpu", "vllm-cpu"),
                "lm_eval": installed_version("lm-eval", "lm_eval"),
            },
        )
    )


if __name__ == "__main__":
    main()
