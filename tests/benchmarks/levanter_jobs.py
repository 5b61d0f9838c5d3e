"""Seconds for each checkpoint that Levanter evaluates on a backend: one job for all, beside a job for each.

    make bench NAME=levanter_jobs

Ours is the job of several cells that wait: Assay's code on the node, one program that loads one checkpoint after the
other, and compiles once. Theirs is the same program with the same questions, started anew for each checkpoint through
the backend's own client (a bare process, Ray's job service, Iris' client), one after another. Both are over when the
results of all checkpoints lie there; their metrics must be equal. Backends run on this machine; environment and JAX's
folder of compiled programs are in place on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # beside the package of stand-ins
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends import BACKENDS, Backend, seconds_until
from series import demo_model, steps_of
from side_by_side import (
    BENCH,
    Comparison,
    end_children_on_sigterm,
    give_up,
    interleaved,
    print_comparison,
    print_table,
    say,
)

from fakes import ray_variables  # noqa: F401 before ray is imported
from pools.endpoint import LocalCheckpoint
from pools.weights.model_files import digest_model_folder, inspect_model_folder
from resources.backends.current import set_current_client
from resources.environments.environments import ensure_environment
from resources.settings import settings
from tasks.evaluators.harness import cache_variables, prepare
from tasks.evaluators.levanter.evaluator import Levanter
from tasks.evaluators.native import NativeEvaluation, NativeProgram
from tasks.running.native_jobs import NativeJobs
from tasks.spec.evaluation import EvaluationConfig

WORK = BENCH / "levanter_jobs"
CHECKPOINTS = 4
_LIMIT_SECONDS = 600.0
_LEVANTER = Levanter()


def configured() -> EvaluationConfig:
    """The evaluation of each checkpoint: the demo's questions."""
    return EvaluationConfig.model_validate(
        {
            "evaluator": _LEVANTER.name,
            "model_path": str(demo_model(CHECKPOINTS)),
            "evals": [{"name": "demo_facts"}],
            "resource_config": {"cpu": 2},
        }
    )


def in_one_job(backend: Backend, checkpoints: list[LocalCheckpoint], folder: Path) -> None:
    """Evaluates all as cells that wait side by side."""
    jobs, program = NativeJobs(), NativeProgram(_LEVANTER)
    for position in range(len(checkpoints)):
        jobs.expect(position)

    def evaluate(position: int) -> None:
        checkpoint = checkpoints[position]
        digests = digest_model_folder(inspect_model_folder(checkpoint.uri))
        jobs.evaluate(
            NativeEvaluation(configured(), checkpoint, digests, str(folder / checkpoint.name)),
            program,
            position=position,
            name=f"levanter-{time.monotonic_ns()}",
            on_progress=lambda progress: None,
            check=lambda: None,
        ).raise_failure()

    with set_current_client(backend.client), ThreadPoolExecutor(len(checkpoints)) as threads:
        for future in [threads.submit(copy_context().run, evaluate, number) for number in range(len(checkpoints))]:
            future.result()


def in_a_job_each(backend: Backend, checkpoints: list[LocalCheckpoint], folder: Path) -> None:
    """Runs the program for one after the other, each started through the backend's own client."""
    python = ensure_environment(_LEVANTER.environment(configured())).python
    for checkpoint in checkpoints:
        output = folder / checkpoint.name
        command = _LEVANTER.command(checkpoint, configured(), output, python=python)
        work, ended = prepare(command, output), output / "ended"
        line = f"cd {shlex.quote(str(work))} && {shlex.join(command.argv)} > log 2>&1; echo $? > {ended}.new"
        variables = {**cache_variables(), **command.variables}
        began = time.monotonic()
        ends = backend.starts(["sh", "-c", f"{line} && mv {ended}.new {ended}"], variables)
        seconds_until(ended.exists, began, at_most=_LIMIT_SECONDS, event="an evaluation")
        if ended.read_text().strip() != "0":
            give_up("an evaluation failed", work / "log")
        ends()


def metrics_of(folder: Path, checkpoints: list[LocalCheckpoint]) -> dict[str, Any]:
    """Metrics of each checkpoint, as its output has them."""
    return {
        checkpoint.name: _LEVANTER.parse(folder / checkpoint.name, configured()).metrics for checkpoint in checkpoints
    }


def measured(backend: Backend, checkpoints: list[LocalCheckpoint], *, rounds: int) -> dict[str, list[float]]:
    """Wall seconds for each checkpoint on each side, in turns; the first round is not counted."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    sides = {"ours": in_one_job, "theirs": in_a_job_each}
    metrics: list[dict[str, Any]] = []
    for turn, side in enumerate(interleaved(tuple(sides), rounds + 1)):
        folder = WORK / f"{backend.name}-{turn}-{side}"
        began = time.monotonic()
        sides[side](backend, checkpoints, folder)
        seconds = (time.monotonic() - began) / len(checkpoints)
        say(f"{backend.name}, {side}: {seconds:.2f} s for each checkpoint")
        metrics.append(metrics_of(folder, checkpoints))
        if turn >= len(sides):
            found[side].append(seconds)
    if any(other != metrics[0] for other in metrics):
        give_up(f"the sides have other metrics: {json.dumps(metrics, default=str)[:2000]}")
    return found


def main() -> None:
    """Measures each backend, prints a table and a line for each."""
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each side (default: 3)")
    parser.add_argument("--backends", nargs="+", choices=[*BACKENDS], default=[*BACKENDS], help="which (default: all)")
    given = parser.parse_args()
    os.environ["ASSAY_CACHE_DIR"] = str(settings().cache_dir)  # the Iris here has a home of its own
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    steps = steps_of(demo_model(CHECKPOINTS))
    checkpoints = [LocalCheckpoint(f"step-{step}", str(folder)) for step, folder in steps.items()]
    found: list[Comparison] = []
    for name in given.backends:
        with BACKENDS[name](WORK) as backend:
            seconds = measured(backend, checkpoints, rounds=given.rounds)
            found.append(
                Comparison(
                    f"levanter_jobs.{name}",
                    "s",
                    statistics.median(seconds["ours"]),
                    statistics.median(seconds["theirs"]),
                    better="less",
                    facts={"checkpoints": len(checkpoints), "rounds": given.rounds, **backend.facts},
                )
            )
    print_table(
        f"Median seconds for each of {len(checkpoints)} checkpoints",
        ("backend", "ours", "theirs", "times faster"),
        [(line.name, line.ours, line.theirs, f"{line.ratio:.2f}") for line in found],
    )
    for line in found:
        print_comparison(line)


if __name__ == "__main__":
    main()
