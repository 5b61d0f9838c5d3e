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
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # beside the package of stand-ins
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends import BACKENDS, Backend, seconds_until
from series import demo_model, steps_of
from side_by_side import (
    BENCH,
    Comparison,
    Contest,
    Phases,
    comparisons,
    end_children_on_sigterm,
    give_up,
    print_comparisons,
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


def contest_of(backend: Backend, checkpoints: list[LocalCheckpoint]) -> Contest:
    """Both ways to evaluate the checkpoints, in wall seconds for each of them; their metrics must be equal."""
    turns, metrics = count(), dict[str, Any]()

    def once(evaluate: Callable[[Backend, list[LocalCheckpoint], Path], None]) -> Phases:
        folder = WORK / f"{backend.name}-{next(turns)}"
        began = time.monotonic()
        evaluate(backend, checkpoints, folder)
        seconds = (time.monotonic() - began) / len(checkpoints)
        found = metrics_of(folder, checkpoints)
        if found != metrics.setdefault("of the first", found):
            give_up(f"the sides have other metrics: {json.dumps([found, metrics], default=str)[:2000]}")
        return {"evaluated": seconds}

    facts = {"checkpoints": len(checkpoints), **backend.facts}
    return Contest(f"levanter_jobs.{backend.name}", partial(once, in_one_job), partial(once, in_a_job_each), facts)


def main() -> None:
    """Measures each backend, prints a table and a line for each."""
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each side (default: 3)")
    parser.add_argument("--warm-up-rounds", type=int, default=1, help="rounds before, not counted (default: 1)")
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
            contest = contest_of(backend, checkpoints)
            found += comparisons(contest, contest.measured(given.rounds, warm_up_rounds=given.warm_up_rounds))
    print_comparisons(f"Median seconds for each of {len(checkpoints)} checkpoints", found)


if __name__ == "__main__":
    main()
