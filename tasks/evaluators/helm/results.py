"""Reads HELM's files, any of which may be incomplete.

Questions are counted in the plan, written before a run's first request, answers in the scenario state, and scores in
the statistics of each question.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev

from tasks.evaluators.evaluator import Parsed
from tasks.evaluators.helm.runs import (
    HARNESS,
    RESULTS_FOLDER,
    TRUNCATED,
    Plan,
    QuestionKey,
    Run,
    finish,
    is_answered,
    planned_runs,
    read_plan,
)
from tasks.evaluators.reading import invalid_results, is_unclosed
from tasks.records.details import BenchmarkDetails
from tasks.records.record import Counts, Metric
from tasks.spec.evaluation import EvaluationConfig

SITE = f"{RESULTS_FOLDER}/index.html"


def read_results(output: Path, config: EvaluationConfig) -> Parsed:
    """Reads the metrics and counts of the runs in `output`."""
    plan = read_plan(output)
    metrics: dict[str, list[list[Metric]]] = defaultdict(list)
    details: dict[str, BenchmarkDetails] = {}
    requested = answered = scored = truncated = 0
    for run in planned_runs(output, plan, config):
        run_metrics = list(_metrics(run, plan))
        metrics[run.plan.key].append(run_metrics)
        whole = {key for key, states in run.states.items() if all(is_answered(state) for state in states)}
        requested += run.plan.questions or 0
        answered += len(whole)
        scored += _scored(run, whole, run_metrics)
        truncated += sum(stats.get(TRUNCATED, 0) > 0 for stats in run.by_question.values())
        details[run.benchmark] = _details(run)
    counts = Counts(requested=requested, answered=answered, scored=scored, truncated=truncated)
    if requested == answered == scored:
        for key, runs in metrics.items():
            if not all(runs):
                raise invalid_results(HARNESS, output, f"no usable number for {key}")
    return Parsed(
        metrics=tuple(metric for key, runs in metrics.items() for metric in _together(key, runs)),
        counts=counts,
        versions={"helm": plan.helm},
        links={"HELM": SITE} if (output / SITE).is_file() else {},
        details=details,
        asking=plan.unanswered.noted(plan.asking),
        endpoint_failure=plan.unanswered.endpoint_failure,
        endpoint_refusal=plan.unanswered.endpoint_refusal,
    )


def _scored(run: Run, whole: set[QuestionKey], metrics: list[Metric]) -> int:
    if not metrics:
        return 0
    name = metrics[0].name
    if not any(name in stats for stats in run.by_question.values()):
        return len(whole)
    return sum(name in run.scores(key) for key in whole)


def _metrics(run: Run, plan: Plan) -> Iterator[Metric]:
    for name, stat in run.published.items():
        if stat.mean is None or not math.isfinite(stat.mean):
            continue
        of_question: dict[str, list[float]] = defaultdict(list)
        for (instance, _, perturbation), stats in run.by_question.items():
            if name in stats and not perturbation and run.splits[instance] == stat.name.split:
                of_question[instance].append(stats[name])
        values = [fmean(trials) for trials in of_question.values()]
        yield Metric(
            benchmark=run.benchmark,
            name=name,
            value=stat.mean,
            stderr=stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
            n=len(values) or len({key.instance for key in run.states}),
            higher_is_better=name not in plan.lower_is_better,
            smooth=name in plan.smooth,
        )


def _together(key: str, runs: list[list[Metric]]) -> Iterator[Metric]:
    if len(runs) > 1:
        for first in runs[0]:
            same = [metric for metrics in runs for metric in metrics if metric.name == first.name]
            if len(same) < len(runs):
                continue
            errors = [metric.stderr for metric in same if metric.stderr is not None]
            yield first.model_copy(
                update={
                    "benchmark": key,
                    "value": fmean(metric.value for metric in same),
                    "stderr": math.hypot(*errors) / len(same) if len(errors) == len(same) else None,
                    "n": sum(metric.n for metric in same),
                }
            )
    for metrics in runs:
        yield from metrics


def _details(run: Run) -> BenchmarkDetails:
    answers = [
        [completion.text for state in states if state.result for completion in state.result.completions]
        for states in run.states.values()
        if finish(states) is not None
    ]
    return BenchmarkDetails(
        questions=run.plan.questions or 0,
        truncated=sum(run.is_truncated(key) for key in run.states),
        control=run.plan.control,
        finish_reasons=dict(Counter(filter(None, (finish(states, of_letters=True) for states in run.states.values())))),
        unclosed=sum(any(map(is_unclosed, texts)) for texts in answers),
    )
