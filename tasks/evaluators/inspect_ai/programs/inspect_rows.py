"""Converts Inspect's logs: a row for each sample with prompt, answer and scores, and metrics over all."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from inspect_ai.log import EvalLog, EvalSample, EvalScore
from inspect_ai.scorer import value_to_float

SPREADS = {"bootstrap_stderr", "ci", "std", "stderr", "var"}
"""Metrics that give the uncertainty of another metric."""
FINISHES = {"max_tokens": "length"}
"""Finish reasons that Inspect names differently."""
GRADER = "grader"
as_number = value_to_float()


def row_of(key: str, sample: EvalSample) -> dict[str, Any]:
    """Returns a sample in the orchestrator's format."""
    own, grading, scoring = _calls(sample)
    first = own[0].input if own else sample.input if isinstance(sample.input, list) else []
    asked = next((at for at in range(len(first) - 1, -1, -1) if first[at].role == "user"), None)
    finishes = [choice.stop_reason for call in own for choice in call.output.choices]
    failed = any(call.error for call in own) or (sample.error is not None and not scoring)
    usages = [call.output.usage for call in own if call.output.usage is not None]
    return {
        "benchmark": key,
        "id": str(sample.id),
        "epoch": sample.epoch,
        "context": "".join(f"{message.text}\n\n" for message in first[:asked]) if asked is not None else "",
        "prompt": first[asked].text if asked is not None else _text(sample.input),
        "choices": sample.choices or [],
        "target": sample.target if isinstance(sample.target, str) else "\n".join(sample.target),
        "output": sample.output.completion,
        "answered": not failed,
        "scores": _numbers(sample) if sample.error is None else {},
        "graded": bool(grading),
        "finish": [FINISHES.get(reason, reason) for reason in finishes],
        "tokens": sum(usage.output_tokens for usage in usages) if usages else None,
        "metadata": {name: str(value) for name, value in sample.metadata.items() if isinstance(value, str | int)},
    }


def metrics_of(log: EvalLog) -> list[dict[str, Any]]:
    """Returns the metrics of a task, each with its error if Inspect has it, and the score that it is taken over.

    The scorer's name is part of a metric's name if there are several scorers, or several values of a scorer.
    """
    scores = log.results.scores if log.results is not None else []
    metrics = []
    for score in scores:
        spread = {metric.name: metric for metric in score.metrics.values()}
        errors = [spread[name] for name in ("stderr", "bootstrap_stderr") if name in spread]
        for name, metric in score.metrics.items():
            if metric.name in SPREADS or metric.group in SPREADS or not math.isfinite(metric.value):
                continue
            mean = metric.name in ("accuracy", "mean")
            error = next((each.value for each in errors if mean and math.isfinite(each.value)), None)
            cluster = next((each.params.get("cluster") for each in errors), None)
            metrics.append(
                {
                    "name": _named(score, name, scores),
                    "value": metric.value,
                    "stderr": error,
                    "n": score.scored_samples,
                    "better": True if metric.name == "accuracy" else None,
                    "score": f"{score.scorer}\n{score.name}" if score.name != score.scorer else score.scorer,
                    "cluster": cluster,
                    "group": _group(metric),
                }
            )
    return metrics


def _group(metric: Any) -> dict[str, str] | None:
    if metric.group != "grouped" or "group_key" not in metric.params:
        return None
    template = metric.params.get("name_template", "{group_name}")
    return {"field": metric.params["group_key"], "template": template, "name": metric.name}


def _named(score: EvalScore, metric: str, scores: list[EvalScore]) -> str:
    several = len({(each.scorer, each.name) for each in scores}) > 1
    parts = [score.name] if several else []
    if score.reducer is not None and Counter((each.scorer, each.name) for each in scores)[score.scorer, score.name] > 1:
        parts.append(score.reducer)
    return "_".join([*parts, metric])


def _numbers(sample: EvalSample) -> dict[str, float]:
    numbers = {}
    for scorer, score in (sample.scores or {}).items():
        values = (
            {f"{scorer}\n{name}": value for name, value in score.value.items()} if isinstance(score.value, dict) else {}
        )
        for name, value in (values or {scorer: score.value}).items():
            if not isinstance(value, str | int | float) or not math.isfinite(number := as_number(value)):
                continue
            numbers[name] = number
    return numbers


def _calls(sample: EvalSample) -> tuple[list[Any], list[Any], bool]:
    scoring = False
    own, grading = [], []
    for event in sample.events:
        scoring = scoring or (event.event == "span_begin" and event.name == "scorers")
        if event.event == "model" and not event.pending:
            if scoring or event.role == GRADER:
                grading.append(event)
            elif event.role is None:
                own.append(event)
    return own, grading, scoring


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n\n".join(message.text for message in value)
