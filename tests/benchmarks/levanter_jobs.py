"""Seconds per checkpoint of a Levanter evaluation on a backend: Assay's job against Levanter's own harness.

    make bench NAME=levanter_jobs

Ours is the job of several waiting cells: Assay's code on the node, and a single program that loads the checkpoints in
sequence, and compiles once. Theirs is the way without Assay: `python -m levanter.eval_harness`, started for each
checkpoint in sequence through the backend's own client (a bare process, Ray's job service, Iris' client, sbatch). An
option makes theirs our program, started like that: the difference is the saving of a shared job.

Both end when the results of all checkpoints exist. Metrics of our program must be equal each time, and Levanter's
accuracy, which splits prompt and answer elsewhere, within 0.05 of ours. Backends run on this machine; environment and
compiled programs are in place on both sides after a round that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import yaml

if __name__ == "__main__":  # for the package of fakes
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
from tasks.evaluators.levanter.evaluator import EVALUATOR
from tasks.evaluators.levanter.options import LevanterOptions
from tasks.evaluators.native import NativeEvaluation, NativeProgram
from tasks.running.native_jobs import NativeJobs
from tasks.spec.benchmarks import BUNDLED
from tasks.spec.evaluation import EvaluationConfig

WORK = BENCH / "levanter_jobs"
CHECKPOINTS = 4
_LIMIT_SECONDS = 600.0
_CLOSE = 0.05
_BENCHMARK = "demo_facts"
_ALL_COMPILED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0"}
_LEVANTER = EVALUATOR


def configured() -> EvaluationConfig:
    return EvaluationConfig.model_validate(
        {
            "evaluator": _LEVANTER.name,
            "model_path": str(demo_model(CHECKPOINTS)),
            "evals": [{"name": _BENCHMARK}],
            "resource_config": {"cpu": 2},
        }
    )


def in_a_single_job(backend: Backend, checkpoints: list[LocalCheckpoint], folder: Path) -> None:
    """Evaluates all checkpoints as cells that wait together."""
    program = NativeProgram(_LEVANTER)

    def evaluate(jobs: NativeJobs, position: int) -> None:
        checkpoint = checkpoints[position]
        digests = digest_model_folder(inspect_model_folder(checkpoint.uri))
        output = str(folder / checkpoint.name)
        jobs.evaluate(
            NativeEvaluation(configured(), checkpoint, digests, output, f"{output}-journal"),
            program,
            position=position,
            name=f"levanter-{time.monotonic_ns()}",
            on_progress=lambda progress: None,
            check=lambda: None,
        ).raise_failure()

    numbers = range(len(checkpoints))
    with set_current_client(backend.client), NativeJobs() as jobs, ThreadPoolExecutor(len(checkpoints)) as threads:
        for position in numbers:
            jobs.expect(position)
        for future in [threads.submit(copy_context().run, evaluate, jobs, number) for number in numbers]:
            future.result()


def in_a_job_each(backend: Backend, checkpoints: list[LocalCheckpoint], folder: Path) -> None:
    """Runs our program for each checkpoint in sequence, started through the backend's own client."""
    for checkpoint in checkpoints:
        output = folder / checkpoint.name
        command = _LEVANTER.command(checkpoint, configured(), output, python=_python())
        work = prepare(command, output)
        run_by_itself(backend, command.argv, {**cache_variables(), **command.variables}, work)


def by_their_harness(backend: Backend, checkpoints: list[LocalCheckpoint], folder: Path) -> None:
    data = folder / "data"
    data.mkdir(parents=True)
    shutil.copyfile(BUNDLED / f"{_BENCHMARK}.jsonl", data / "test.jsonl")
    benchmark = yaml.safe_load((BUNDLED / f"{_BENCHMARK}.yaml").read_text())
    for name in ("dataset_kwargs", "metadata"):  # Levanter takes neither
        del benchmark[name]
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(WORK / "compiled"), **_ALL_COMPILED}
    for checkpoint in checkpoints:
        work = folder / checkpoint.name
        work.mkdir()
        model = json.loads((Path(checkpoint.uri) / "config.json").read_text())
        asked = {
            "checkpoint_path": checkpoint.uri,
            "checkpoint_is_hf": True,
            "tokenizer": checkpoint.uri,
            "model": {
                "type": "llama",
                "hidden_dim": model["hidden_size"],
                "intermediate_dim": model["intermediate_size"],
                "num_heads": model["num_attention_heads"],
                "num_kv_heads": model["num_key_value_heads"],
                "num_layers": model["num_hidden_layers"],
                "max_seq_len": model["max_position_embeddings"],
                "reference_checkpoint": checkpoint.uri,
            },
            "trainer": {
                "mp": "f32",
                "require_accelerator": False,
                "per_device_eval_parallelism": configured().options(LevanterOptions).rows_per_device,
                "tracker": {"type": "json_logger"},
            },
            "eval_harness": {"task_spec": [{**benchmark, "dataset_path": str(data)}]},
        }
        (work / "asked.yaml").write_text(yaml.safe_dump(asked))
        argv = (str(_python()), "-m", "levanter.eval_harness", "--config_path", "asked.yaml")
        run_by_itself(backend, argv, {**cache_variables(), **compiled, "JAX_PLATFORMS": "cpu"}, work)


SIDES = {"harness": by_their_harness, "program": in_a_job_each}
"""The other side, by name."""


def _python() -> Path:
    return ensure_environment(_LEVANTER.environment(configured())).python


def run_by_itself(backend: Backend, argv: Sequence[str], variables: Mapping[str, str], work: Path) -> None:
    ended = work / "ended"
    line = f"cd {shlex.quote(str(work))} && {shlex.join(argv)} > log 2>&1; echo $? > {ended}.new"
    began = time.monotonic()
    ends = backend.starts(["sh", "-c", f"{line} && mv {ended}.new {ended}"], variables)
    seconds_until(ended.exists, began, at_most=_LIMIT_SECONDS, event="an evaluation")
    if ended.read_text().strip() != "0":
        give_up("an evaluation failed", work / "log")
    ends()


def metrics_of(folder: Path, checkpoints: list[LocalCheckpoint]) -> dict[str, Any]:
    return {
        checkpoint.name: _LEVANTER.read(folder / checkpoint.name, configured())[0].metrics for checkpoint in checkpoints
    }


def accuracy_of(folder: Path, checkpoints: list[LocalCheckpoint]) -> list[float]:
    reports = [folder / checkpoint.name / "lm_eval_harness_results.json" for checkpoint in checkpoints]
    return [json.loads(report.read_text())["results"][_BENCHMARK]["acc,none"] for report in reports]


def contest_of(backend: Backend, checkpoints: list[LocalCheckpoint], *, opponent: str) -> Contest:
    """Returns a contest of 2 ways to evaluate the checkpoints, in wall seconds per checkpoint, with equal results."""
    turns, metrics = count(), dict[str, Any]()

    def once(evaluate: Callable[[Backend, list[LocalCheckpoint], Path], None]) -> Phases:
        folder = WORK / f"{backend.name}-{next(turns)}"
        began = time.monotonic()
        evaluate(backend, checkpoints, folder)
        seconds = (time.monotonic() - began) / len(checkpoints)
        if evaluate is by_their_harness:
            metrics["accuracy of theirs"] = accuracy_of(folder, checkpoints)
        else:
            own_metrics = metrics_of(folder, checkpoints)
            if own_metrics != metrics.setdefault("ours", own_metrics):
                give_up(f"other metrics than before: {json.dumps([own_metrics, metrics], default=str)[:2000]}")
            values = [metric for each in own_metrics.values() for metric in each if metric.name == "acc"]
            metrics["accuracy of ours"] = [metric.value for metric in values]
        compare(metrics)
        return {"evaluated": seconds}

    facts = {"checkpoints": len(checkpoints), **backend.facts}
    name = "levanter_jobs" if opponent == "harness" else "levanter_jobs.sharing"
    return Contest(f"{name}.{backend.name}", partial(once, in_a_single_job), partial(once, SIDES[opponent]), facts)


def compare(metrics: Mapping[str, Any]) -> None:
    ours, theirs = (metrics.get(f"accuracy of {side}") for side in ("ours", "theirs"))
    if ours and theirs and any(abs(a - b) > _CLOSE for a, b in zip(ours, theirs, strict=True)):
        give_up(f"accuracies differ: ours {ours}, theirs {theirs}")


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each side (default: 3)")
    parser.add_argument("--warm-up-rounds", type=int, default=1, help="rounds before, not counted (default: 1)")
    parser.add_argument("--beside", choices=[*SIDES], default="harness", help="which is theirs (default: harness)")
    parser.add_argument(
        "--checkpoints", type=int, choices=[*range(1, CHECKPOINTS + 1)], default=CHECKPOINTS, help="default: all"
    )
    parser.add_argument("--backends", nargs="+", choices=[*BACKENDS], default=[*BACKENDS], help="which (default: all)")
    given = parser.parse_args()
    os.environ["ASSAY_CACHE_DIR"] = str(settings().cache_dir)  # the Iris of this script has a home of its own
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    steps = steps_of(demo_model(CHECKPOINTS))
    trained = [LocalCheckpoint(f"step-{step}", str(folder)) for step, folder in steps.items()]
    checkpoints = trained[-given.checkpoints :]
    compared: list[Comparison] = []
    for name in given.backends:
        with BACKENDS[name](WORK) as backend:
            contest = contest_of(backend, checkpoints, opponent=given.beside)
            compared += comparisons(contest, contest.measured(given.rounds, warm_up_rounds=given.warm_up_rounds))
    print_comparisons(f"Median seconds for each of {len(checkpoints)} checkpoints", compared)


if __name__ == "__main__":
    main()
