"""The files of lm-eval and of our program for it, any of which may be incomplete."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel

from tasks.evaluators.reading import PLAN_NAME, Unanswered, finish_of, invalid_results, read_result
from tasks.records.details import Asking, BenchmarkDetails
from tasks.records.samples import LENGTH, MOST_BYTES_OF_A_LINE

HARNESS = "lm-eval"
RESULTS_FOLDER = "lm_eval"
_ASKED_NAME = "asked.json"
NO_ANSWER = "[[no answer came back]]"
"""Placeholder for an answer without any text; the harness's own default would be scored as an empty answer."""


class Ends(BaseModel):
    """Ends of all answers to a question."""

    reasons: tuple[str | None, ...] = ()
    tokens: tuple[int | None, ...] = ()
    unclosed: bool = False

    @property
    def finish(self) -> str | None:
        """The question's finish reason: the limit, if any of its answers ended there."""
        return finish_of(self.reasons)


class GroupParts(BaseModel):
    """Benchmarks that a group averages, and for each metric True if their sizes are weights."""

    leaves: tuple[str, ...]
    by_size: dict[str, bool]

    def weights(self, metric: str, sizes: Mapping[str, int]) -> dict[str, float]:
        """Returns weights (sum 1) of the benchmarks in `sizes`, which have the metric (without filter), if known."""
        if metric not in self.by_size:
            return {}
        given = {leaf: sizes[leaf] if self.by_size[metric] else 1 for leaf in self.leaves if leaf in sizes}
        total = sum(given.values())
        return {leaf: weight / total for leaf, weight in given.items()} if total else {}


class Asked(BaseModel):
    """Content of `asked.json`; empty for a run without it."""

    asking: Asking = Asking()
    ends: dict[str, dict[int, Ends]] = {}
    groups: dict[str, GroupParts] = {}
    versions: dict[str, str] = {}
    unanswered: Unanswered = Unanswered()

    def way(self, seeds: Mapping[str, Any]) -> Asking:
        """Returns the request settings, with the seeds in the harness's results."""
        drawn = {
            name.removesuffix("_seed"): value
            for name, value in seeds.items()
            if name.endswith("_seed") and isinstance(value, int)
        }
        return self.asking.model_copy(update={"seeds": {**drawn, **self.asking.seeds}})

    def detailed(self, name: str, details: BenchmarkDetails) -> BenchmarkDetails:
        ends = list(self.ends.get(name, {}).values())
        reasons = Counter(reason for end in ends for reason in end.reasons if reason)
        counts = {
            "finish_reasons": dict(sorted(reasons.items())),
            "at_limit": sum(LENGTH in end.reasons for end in ends) if reasons else None,
            "unclosed": sum(end.unclosed for end in ends),
        }
        return details.model_copy(update=counts)


class PlannedTask(BaseModel):
    """Plan of a task of the harness, and findings before the first request."""

    questions: int
    output_type: str
    skipped: int = 0
    truncated: int = 0
    truncated_questions: tuple[int, ...] = ()
    contexts: dict[int, int] = {}  # characters before the question, by question
    data: str | None = None
    control: str | None = None
    notes: tuple[str, ...] = ()
    smooth: tuple[str, ...] = ()  # scores that our program adds to the task's own

    @property
    def details(self) -> BenchmarkDetails:
        ours = {"output_type", "truncated_questions", "contexts", "smooth"}
        return BenchmarkDetails.model_validate(self.model_dump(exclude=ours))


class Plan(BaseModel):
    """Tasks of the harness by benchmark, as our program found them before the first request."""

    benchmarks: dict[str, dict[str, PlannedTask]]

    @property
    def tasks(self) -> dict[str, PlannedTask]:
        return {name: task for tasks in self.benchmarks.values() for name, task in tasks.items()}


class Results(BaseModel):
    """The part of lm-eval's own results that is read."""

    results: dict[str, dict[str, Any]]
    higher_is_better: dict[str, dict[str, bool | None]] = {}
    config: dict[str, Any] = {}
    lm_eval_version: str = "unknown"
    transformers_version: str = "unknown"

    def metric_name(self, benchmark: str, name: str, filter_name: str) -> str:
        """Returns a metric's name in records: with its filter if the benchmark has several."""
        several = len({split(key)[1] for key in self.results[benchmark] if "," in key}) > 1
        return f"{name},{filter_name}" if several and filter_name != "none" else name

    def sizes(self, key: str) -> dict[str, int]:
        """Returns the questions by benchmark, for benchmarks that have this metric and filter."""
        return {name: row["sample_len"] for name, row in self.results.items() if key in row and "sample_len" in row}


@dataclass(frozen=True)
class Run:
    """A run as read from its files."""

    plan: Plan
    results: Results
    asked: Asked
    path: Path  # of the results

    def samples_of(self, task: str) -> Iterator[Mapping[str, Any]]:
        """Yields the samples of a task that are whole."""
        stamp = self.path.stem.removeprefix("results_")
        return sample_lines(self.path.with_name(f"samples_{task}_{stamp}.jsonl"))


def read_plan(output: Path) -> Plan:
    """Reads the plan of the run in `output`."""
    return read_result(HARNESS, output / PLAN_NAME, Plan)


def read_asked(output: Path) -> Asked:
    """Reads the settings and ends of the run in `output`; empty if the file is missing."""
    path = output / _ASKED_NAME
    return read_result(HARNESS, path, Asked) if path.exists() else Asked()


def read_run(output: Path) -> Run:
    """Reads the files of the run in `output`, except its samples."""
    plan = read_plan(output)
    paths = results_in(output)
    if not paths:
        raise invalid_results(HARNESS, output, f"no {RESULTS_FOLDER}/*/results_*.json")
    results = read_result(HARNESS, paths[-1], Results)
    missing = [name for name in plan.tasks if name not in results.results]
    if missing:
        raise invalid_results(HARNESS, output, f"results without {', '.join(missing)}, which was asked")
    return Run(plan, results, read_asked(output), paths[-1])


def results_in(output: Path) -> list[Path]:
    """Returns the files of results in a folder, oldest first."""
    return sorted((output / RESULTS_FOLDER).glob("*/results_*.json"), key=lambda path: path.name)


def sample_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields every line that is a whole sample; a lost line counts as a question without an answer."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            while line := lines.readline(MOST_BYTES_OF_A_LINE):  # the rest of a longer line is no sample either
                try:
                    sample = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(sample, dict):
                    yield sample
    except OSError:
        return


def split(key: str) -> tuple[str, str]:
    """Splits `exact_match,strict-match` into metric and filter."""
    name, _, filter_name = key.rpartition(",")
    return name, filter_name


def is_number(value: Any) -> TypeGuard[float]:
    """Returns True for a number that is no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(number: float) -> bool:
    """Returns True if a number fits into a float, and is neither infinite nor NaN."""
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond all floats, which JSON allows
        return False
