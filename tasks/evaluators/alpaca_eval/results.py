"""Reads the files of our AlpacaEval program, any of which may be incomplete.

Instructions are counted in the plan, written before the first request; outputs and verdicts in their files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks.evaluators.alpaca_eval.options import AlpacaEvalOptions
from tasks.evaluators.evaluator import Parsed
from tasks.evaluators.reading import PLAN_NAME, Unanswered, invalid_results, is_unclosed, read_result, require_plan_of
from tasks.records.details import Asking, BenchmarkDetails
from tasks.records.record import Counts, Metric
from tasks.records.samples import Sample
from tasks.spec.evaluation import EvaluationConfig

_HARNESS = "AlpacaEval"

RESULTS_NAME = "results.json"
OUTPUTS_NAME = "model_outputs.json"
REFERENCES_NAME = "reference_outputs.json"
ANNOTATIONS_NAME = "annotations.json"
_LENGTH = "avg_length"
_NO_CONTROL = "no control: a judge compares answers, and none is right"
WIN_RATE = "win_rate"


class _Plan(BaseModel):
    sets: dict[str, int]
    asking: Asking = Asking()


class _Results(BaseModel):
    metrics: dict[str, dict[str, float | None]]  # by set; empty for a set that was not judged
    versions: dict[str, str] = {}
    unanswered: Unanswered = Unanswered()


@dataclass(frozen=True)
class _Judged:
    instruction: str
    output: str | None
    reference: str | None
    prompt: str
    preference: float | None  # from 0 to 1
    finish: str | None = None
    tokens: int | None = None


def folder_of(output: Path, key: str, config: EvaluationConfig) -> Path:
    """Returns the folder with a set's files: the attempt's folder itself, unless there are several sets."""
    return output if len(config.evals) == 1 else output / key


def read_results(output: Path, config: EvaluationConfig) -> tuple[Parsed, Iterable[Sample]]:
    """Reads metrics and counts of the run in `output`, and a sample for each instruction, answered or not."""
    plan = read_result(_HARNESS, output / PLAN_NAME, _Plan)
    require_plan_of(plan.sets, config, harness=_HARNESS, output=output)
    results = read_result(_HARNESS, output / RESULTS_NAME, _Results)
    judged_sets = {key: _judged(folder_of(output, key, config)) for key in plan.sets}
    requested = answered = scored = errors = left_out = 0
    metrics: list[Metric] = []
    details: dict[str, BenchmarkDetails] = {}
    for key, questions in plan.sets.items():
        judged = judged_sets[key]
        answers = sum(answer.output is not None for answer in judged)
        usable = sum(answer.preference is not None for answer in judged)
        numbers = results.metrics.get(key, {})
        requested, answered, scored = requested + questions, answered + answers, scored + usable
        without = answers - usable if numbers else 0
        errors += without
        if answers == questions and 0 < without <= config.options(AlpacaEvalOptions).max_judge_errors * questions:
            left_out += without
        metrics += _metrics(key, numbers, judged=usable, answered=answers)
        unclosed = sum(is_unclosed(answer.output or "") for answer in judged)
        details[key] = BenchmarkDetails(questions=questions, unclosed=unclosed, control=_NO_CONTROL)
    if requested == answered and scored + left_out == requested and not _has_win_rates(plan, metrics):
        raise invalid_results(_HARNESS, output, "no usable win rate")
    # Outputs that max_judge_errors leaves out of the win rate do not count as requested.
    counts = Counts(requested=requested - left_out, answered=answered - left_out, scored=scored, judge_errors=errors)
    parsed = Parsed(
        metrics=tuple(metrics),
        counts=counts,
        versions=results.versions,
        details=details,
        asking=plan.asking,
        unanswered=results.unanswered,
    )
    return parsed, _samples(judged_sets)


def _samples(judged_sets: dict[str, list[_Judged]]) -> Iterator[Sample]:
    for key, judged in judged_sets.items():
        seen: Counter[str] = Counter()
        for answer in judged:
            digest = hashlib.sha256(answer.instruction.encode()).hexdigest()[:12]
            seen[digest] += 1
            before = max(answer.prompt.rfind(answer.instruction), 0)
            yield Sample(
                benchmark=key,
                id=digest if seen[digest] == 1 else f"{digest}-{seen[digest]}",
                prompt=answer.prompt[before:],
                output=answer.output or "",
                target=answer.reference,
                scores={} if answer.preference is None else {WIN_RATE: answer.preference},
                finish=answer.finish,
                context=answer.prompt[:before],
                tokens=answer.tokens,
            )


def _metrics(key: str, numbers: dict[str, float | None], *, judged: int, answered: int) -> Iterator[Metric]:
    for name, value in numbers.items():
        if name.endswith("_stderr") or value is None or not math.isfinite(value):
            continue
        error = numbers.get(f"{name}_stderr")
        yield Metric(
            benchmark=key,
            name=name,
            value=value,
            stderr=error if error is not None and math.isfinite(error) else None,
            n=answered if name == _LENGTH else judged,
            higher_is_better=None if name == _LENGTH else True,
        )


def _has_win_rates(plan: _Plan, metrics: list[Metric]) -> bool:
    return {metric.benchmark for metric in metrics if metric.name == WIN_RATE} == set(plan.sets)


def _judged(folder: Path) -> list[_Judged]:
    references: dict[str, list[Any]] = defaultdict(list)
    for row in _rows(folder / REFERENCES_NAME):
        references[row["instruction"]].append(row.get("output"))
    preferences: dict[tuple[str, Any], dict[Any, float | None]] = defaultdict(dict)
    for row in _rows(folder / ANNOTATIONS_NAME):
        preference = row.get("preference")
        share = preference - 1 if isinstance(preference, int | float) and 1 <= preference <= 2 else None
        preferences[row["instruction"], str(row.get("output_2"))][str(row.get("output_1"))] = share
    judged = []
    for row in _rows(folder / OUTPUTS_NAME):
        instruction, output, prompt = row["instruction"], row.get("output"), row.get("prompt")
        reason, tokens = row.get("finish_reason"), row.get("completion_tokens")
        # An instruction may occur twice, with another output to compare with each time.
        left = references[instruction]
        reference = left.pop(0) if left else None
        judged.append(
            _Judged(
                instruction=instruction,
                output=output if isinstance(output, str) else None,
                reference=reference if isinstance(reference, str) else None,
                prompt=prompt if isinstance(prompt, str) else instruction,
                preference=_verdict(preferences[instruction, output], reference) if isinstance(output, str) else None,
                finish=reason if isinstance(reason, str) and isinstance(output, str) else None,
                tokens=tokens if isinstance(tokens, int) and isinstance(output, str) else None,
            )
        )
    return judged


def _verdict(by_reference: dict[Any, float | None], reference: Any) -> float | None:
    if isinstance(reference, str):
        return by_reference.get(reference)
    return next(iter(by_reference.values())) if len(by_reference) == 1 else None


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    rows = content if isinstance(content, list) else []
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("instruction"), str)]
