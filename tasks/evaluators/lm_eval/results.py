"""Reads lm-eval's files, any of which may be incomplete.

Questions are counted in our plan, written before the first request; answers and scores in the samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel

from tasks.evaluators.evaluator import Parsed
from tasks.evaluators.lm_eval.asked import Asked, read_asked
from tasks.evaluators.reading import PLAN_NAME, invalid_results, read_result, require_plan_of
from tasks.records.details import BenchmarkDetails
from tasks.records.record import Counts, Metric
from tasks.records.samples import MOST_BYTES_OF_A_LINE
from tasks.records.verdicts import ANSWERED_NAME
from tasks.spec.evaluation import EvaluationConfig

_HARNESS = "lm-eval"

RESULTS_FOLDER = "lm_eval"
NO_ANSWER = "[[no answer came back]]"
"""Placeholder for an answer without any text; the harness's own default would be scored as an empty answer."""


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
class _Counted:
    answered: int
    scored: int


def read_results(output: Path, config: EvaluationConfig) -> Parsed:
    """Reads the metrics and counts of the run in `output`; no metrics where it stopped early."""
    if (output / ANSWERED_NAME).exists() and not _results_in(output):
        return _read_early(output)
    plan, results, stamped = read_files(output)
    require_plan_of(plan.benchmarks, config, harness=_HARNESS, output=output)
    answered = scored = 0
    for name, task in plan.tasks.items():
        filters = {split(key)[1] for key in results.results[name] if "," in key}
        counted = _count(stamped(name), task.output_type, filters)
        answered += counted.answered
        scored += counted.scored
    counts = Counts(
        requested=sum(task.questions for task in plan.tasks.values()),
        answered=answered,
        scored=scored,
        skipped=sum(task.skipped for task in plan.tasks.values()),
        truncated=sum(task.truncated for task in plan.tasks.values()),
    )
    asked = read_asked(output)
    metrics = list(_metrics(results, asked, plan.tasks))
    unusable = [f"{metric.benchmark} {metric.name}" for metric in metrics if not is_finite(metric.value)]
    if counts.requested == answered == scored and (unusable or not metrics):
        raise invalid_results(_HARNESS, output, f"no usable number for {', '.join(unusable) or 'anything'}")
    return Parsed(
        metrics=tuple(metric for metric in metrics if is_finite(metric.value)),
        counts=counts,
        details={name: asked.detailed(name, task.details) for name, task in plan.tasks.items()},
        asking=asked.way(results.config),
        versions={
            "lm_eval": results.lm_eval_version,
            "transformers": results.transformers_version,
            **asked.versions,
        },
    )


def _read_early(output: Path) -> Parsed:
    plan, asked = read_result(_HARNESS, output / PLAN_NAME, Plan), read_asked(output)
    answered = len((output / ANSWERED_NAME).read_text(encoding="utf-8").splitlines())
    return Parsed(
        metrics=(),
        counts=Counts(
            requested=sum(task.questions for task in plan.tasks.values()), answered=answered, scored=answered
        ),
        details={name: asked.detailed(name, task.details) for name, task in plan.tasks.items()},
        asking=asked.way({}),
        versions=asked.versions,
    )


def read_files(output: Path) -> tuple[Plan, Results, Callable[[str], Path]]:
    """Returns the plan, the results, and a function for the path of a task's samples."""
    plan = read_result(_HARNESS, output / PLAN_NAME, Plan)
    path = _newest_results(output)
    results = read_result(_HARNESS, path, Results)
    missing = [name for name in plan.tasks if name not in results.results]
    if missing:
        raise invalid_results(_HARNESS, output, f"results without {', '.join(missing)}, which was asked")
    stamp = path.stem.removeprefix("results_")
    return plan, results, lambda name: path.with_name(f"samples_{name}_{stamp}.jsonl")


def _metrics(results: Results, asked: Asked, tasks: Mapping[str, PlannedTask]) -> Iterator[Metric]:
    for benchmark, row in results.results.items():
        group = asked.groups.get(benchmark)
        parts = group.leaves if group else (benchmark,)
        smooth = {name for part in parts if part in tasks for name in tasks[part].smooth}
        numbers = {split(key): value for key, value in row.items() if "," in key}
        directions = results.higher_is_better.get(benchmark, {})
        n = row.get("sample_len")
        for (name, filter_name), value in numbers.items():
            if name.endswith("_stderr") or not is_number(value):
                continue
            stderr = numbers.get((f"{name}_stderr", filter_name))
            yield Metric(
                benchmark=benchmark,
                name=results.metric_name(benchmark, name, filter_name),
                value=value,
                stderr=stderr if is_number(stderr) and is_finite(stderr) else None,
                n=n if isinstance(n, int) else 0,
                parts=group.weights(name, results.sizes(f"{name},{filter_name}")) if group else {},
                higher_is_better=directions.get(name, True),
                smooth=name in smooth,
            )


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


def _count(path: Path, output_type: str, filters: set[str]) -> _Counted:
    answered: set[Any] = set()
    unanswered: set[Any] = set()
    scored: dict[str, set[Any]] = {name: set() for name in filters}
    for sample in sample_lines(path):
        question = sample.get("doc_id")
        if not isinstance(question, int):
            continue
        (answered if _is_answered(sample, output_type) else unanswered).add(question)
        if _is_scored(sample):
            scored.setdefault(str(sample.get("filter")), set()).add(question)
    answered -= unanswered
    in_all = set.intersection(*scored.values()) if scored else set()
    return _Counted(len(answered), len(in_all & answered))


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


def _is_answered(sample: Mapping[str, Any], output_type: str) -> bool:
    responses, arguments = sample.get("resps"), sample.get("arguments")
    if not isinstance(responses, list) or not responses or not isinstance(arguments, dict | list):
        return False
    if len(responses) != len(arguments):
        return False
    usable = _is_text if output_type == "generate_until" else _is_log_probability
    return all(isinstance(repeats, list) and repeats and all(map(usable, repeats)) for repeats in responses)


def _is_text(response: Any) -> bool:
    return isinstance(response, str) and response != NO_ANSWER


def _is_log_probability(response: Any) -> bool:
    number: Any = response[0] if isinstance(response, list) and response else response
    try:
        return math.isfinite(float(number))
    except (TypeError, ValueError):
        return False


def _is_scored(sample: Mapping[str, Any]) -> bool:
    names = sample.get("metrics")
    return isinstance(names, list) and bool(names) and all(_is_score(sample.get(str(name))) for name in names)


def _is_score(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_score(part) for part in value)
    return isinstance(value, str) or (isinstance(value, int | float) and is_finite(value))


def _results_in(output: Path) -> list[Path]:
    return sorted((output / RESULTS_FOLDER).glob("*/results_*.json"), key=lambda path: path.name)


def _newest_results(output: Path) -> Path:
    paths = _results_in(output)
    if not paths:
        raise invalid_results(_HARNESS, output, f"no {RESULTS_FOLDER}/*/results_*.json")
    return paths[-1]
