"""Reads the metrics and counts of lm-eval's runs.

Questions are counted in our plan, written before the first request; answers and scores in the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.evaluators.evaluator import Parsed
from tasks.evaluators.lm_eval.files import (
    HARNESS,
    NO_ANSWER,
    Asked,
    PlannedTask,
    Results,
    is_finite,
    is_number,
    read_asked,
    read_plan,
    read_run,
    results_in,
    split,
)
from tasks.evaluators.lm_eval.samples import read_samples
from tasks.evaluators.reading import invalid_results, require_plan_of
from tasks.records.record import Counts, Metric
from tasks.records.samples import Sample
from tasks.records.verdicts import ANSWERED_NAME
from tasks.spec.evaluation import EvaluationConfig


def read_results(output: Path, config: EvaluationConfig) -> tuple[Parsed, Iterable[Sample]]:
    """Reads metrics and counts of the run in `output`, and its questions; only counts where it stopped early."""
    if (output / ANSWERED_NAME).exists() and not results_in(output):
        return _read_early(output), ()
    run = read_run(output)
    tasks, results, asked = run.plan.tasks, run.results, run.asked
    require_plan_of(run.plan.benchmarks, config, harness=HARNESS, output=output)
    answered = scored = 0
    for name, task in tasks.items():
        filters = {split(key)[1] for key in results.results[name] if "," in key}
        of_task = _count(run.samples_of(name), task.output_type, filters)
        answered, scored = answered + of_task[0], scored + of_task[1]
    counts = Counts(
        requested=sum(task.questions for task in tasks.values()),
        answered=answered,
        scored=scored,
        skipped=sum(task.skipped for task in tasks.values()),
        truncated=sum(task.truncated for task in tasks.values()),
    )
    metrics = list(_metrics(results, asked, tasks))
    unusable = [f"{metric.benchmark} {metric.name}" for metric in metrics if not is_finite(metric.value)]
    if counts.requested == answered == scored and (unusable or not metrics):
        raise invalid_results(HARNESS, output, f"no usable number for {', '.join(unusable) or 'anything'}")
    versions = {"lm_eval": results.lm_eval_version, "transformers": results.transformers_version}
    parsed = Parsed(
        metrics=tuple(metric for metric in metrics if is_finite(metric.value)),
        counts=counts,
        details={name: asked.detailed(name, task.details) for name, task in tasks.items()},
        asking=asked.way(results.config),
        unanswered=asked.unanswered,
        versions={**versions, **asked.versions},
    )
    return parsed, read_samples(run, output, config)


def _read_early(output: Path) -> Parsed:
    plan, asked = read_plan(output), read_asked(output)
    answered = len((output / ANSWERED_NAME).read_text(encoding="utf-8").splitlines())
    return Parsed(
        metrics=(),
        counts=Counts(
            requested=sum(task.questions for task in plan.tasks.values()), answered=answered, scored=answered
        ),
        details={name: asked.detailed(name, task.details) for name, task in plan.tasks.items()},
        asking=asked.way({}),
        unanswered=asked.unanswered,
        versions=asked.versions,
    )


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


def _count(samples: Iterable[Mapping[str, Any]], output_type: str, filters: set[str]) -> tuple[int, int]:
    answered: set[Any] = set()
    unanswered: set[Any] = set()
    scored: dict[str, set[Any]] = {name: set() for name in filters}
    for sample in samples:
        question = sample.get("doc_id")
        if not isinstance(question, int):
            continue
        (answered if _is_answered(sample, output_type) else unanswered).add(question)
        if _is_scored(sample):
            scored.setdefault(str(sample.get("filter")), set()).add(question)
    answered -= unanswered
    in_all = set.intersection(*scored.values()) if scored else set()
    return len(answered), len(in_all & answered)


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
