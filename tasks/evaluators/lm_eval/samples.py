"""Reads the samples that lm-eval wrote: prompt, answer and scores of each question."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.evaluators.lm_eval.asked import Ends, read_asked
from tasks.evaluators.lm_eval.clusters import clusters_of
from tasks.evaluators.lm_eval.results import Results, is_finite, is_number, read_files, sample_lines
from tasks.records.samples import Sample
from tasks.spec.evaluation import EvaluationConfig

SKIPPED_NAME = "skipped.jsonl"
RATIOS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
_HASH_DIGITS = 12
_LONGEST_INDICES = 4096  # parsing takes hundreds of times the memory of the text
_CONVERSATION, _TURN, _USERS_TURN = "['[{", '{"role": ', '{"role": "user"'
"""Prefixes of a conversation in lm-eval's samples, of its turns, and of the user's turns."""
_Arguments = list[list[Any]]


def read_samples(output: Path, config: EvaluationConfig) -> Iterator[Sample]:
    """Yields every question of the run in `output`, then the questions skipped because of too long prompts."""
    plan, results, stamped = read_files(output)
    ends = read_asked(output).ends
    evals = {task.metric_key: task for task in config.evals}
    by_name = {name: evals[key] for key, tasks in plan.benchmarks.items() for name in tasks}
    for name, task in plan.tasks.items():
        by_question: dict[str, list[Mapping[str, Any]]] = {}
        for line in sample_lines(stamped(name)):
            by_question.setdefault(_id(line), []).append(line)
        docs = {number: lines[0].get("doc") for number, lines in by_question.items()}
        asked = by_name[name]
        clusters = clusters_of((asked.name, name), docs, cluster_by=asked.cluster_by)
        for number, lines in by_question.items():
            given = lines[0].get("doc_id")
            document = given if isinstance(given, int) else -1
            end = ends.get(name, {}).get(document, Ends())
            before = task.contexts.get(document, 0)
            yield _sample(name, number, lines, task.output_type, results, before=before).model_copy(
                update={
                    "cluster": clusters.get(number),
                    "finish": end.finish,
                    "tokens": end.tokens[0] if end.tokens else None,
                    "truncated": document in task.truncated_questions,
                }
            )
    for line in sample_lines(output / SKIPPED_NAME):
        yield Sample(
            benchmark=str(line.get("benchmark")),
            id=_id(line),
            prompt=str(line.get("prompt")),
            output="",
            target=str(line.get("target")),
            scores={},
        )


def _id(line: Mapping[str, Any]) -> str:
    digest = str(line.get("doc_hash") or "")[:_HASH_DIGITS]
    return f"{line.get('doc_id')}-{digest}" if digest else str(line.get("doc_id"))


def _sample(
    name: str,
    number: str,
    lines: list[Mapping[str, Any]],
    output_type: str,
    results: Results,
    *,
    before: int,
) -> Sample:
    first = lines[0]
    arguments, answers = _arguments(first), _answers(first)
    response, target = "", str(first.get("target"))
    prompt = str(arguments[0][0]) if arguments and arguments[0] else ""
    if prompt.startswith(_CONVERSATION):
        before = prompt.rfind(_USERS_TURN) if prompt.count(_TURN) > 1 else 0
    choices: list[str] = []
    if output_type == "multiple_choice":
        choices = _choices(arguments, before=before)
        response = _likeliest(choices, answers)
        target = _named(target, choices)
    elif output_type == "generate_until":
        response = str(answers[0]) if answers else ""
    elif answers:
        response = str(_log_probability(answers[0]))
    return Sample(
        benchmark=name,
        id=number,
        prompt=prompt[max(before, 0) :],
        output=response,
        target=None if output_type == "loglikelihood_rolling" else target,
        scores=_scores(name, lines, results),
        ratios=_ratios(name, lines, results),
        log_likelihoods=() if output_type == "generate_until" else _log_likelihoods(answers),
        choices=tuple(choices),
        context=prompt[: max(before, 0)],
    )


def _arguments(line: Mapping[str, Any]) -> _Arguments:
    given = line.get("arguments")
    requests = given.values() if isinstance(given, dict) else given if isinstance(given, list) else []
    return [
        list(request.values()) if isinstance(request, dict) else list(request)
        for request in requests
        if isinstance(request, dict | list)
    ]


def _answers(line: Mapping[str, Any]) -> list[Any]:
    responses = line.get("resps")
    return (
        [response[0] for response in responses if isinstance(response, list) and response]
        if isinstance(responses, list)
        else []
    )


def _choices(arguments: _Arguments, *, before: int) -> list[str]:
    pairs = [pair for pair in arguments if len(pair) > 1 and pair[0] != ""]
    contexts = len({str(pair[0]) for pair in pairs})
    return [(str(pair[0])[before:] if contexts > 1 else str(pair[1])).strip() for pair in pairs]


def _likeliest(choices: list[str], answers: list[Any]) -> str:
    weighed = [_log_probability(answer) for answer in answers[: len(choices)]]
    if not weighed or any(math.isnan(weight) for weight in weighed):
        return ""
    return choices[weighed.index(max(weighed))]


def _named(target: str, choices: list[str]) -> str:
    try:
        number: Any = ast.literal_eval(target) if len(target) <= _LONGEST_INDICES else target
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return target
    numbers = number if isinstance(number, list) else [number]
    if not all(
        isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(choices) for index in numbers
    ):
        return target
    return " | ".join(choices[index] for index in dict.fromkeys(numbers))


def _log_likelihoods(answers: list[Any]) -> tuple[float, ...]:
    values = tuple(map(_log_probability, answers))
    return values if all(map(math.isfinite, values)) else ()


def _log_probability(answer: Any) -> float:
    number: Any = answer[0] if isinstance(answer, list) and answer else answer
    try:
        return float(number)
    except (TypeError, ValueError):
        return math.nan


def _ratios(name: str, lines: list[Mapping[str, Any]], results: Results) -> dict[str, tuple[float, float]]:
    ratios: dict[str, tuple[float, float]] = {}
    for line in lines:
        for metric in (*RATIOS, "perplexity"):
            match line.get(metric):
                case int() | float() as likelihood if metric == "perplexity" and is_finite(likelihood):
                    ratios[results.metric_name(name, metric, str(line.get("filter")))] = (float(likelihood), 1.0)
                case [int() | float() as likelihood, int() | float() as units] if is_finite(likelihood) and units > 0:
                    key = results.metric_name(name, metric, str(line.get("filter")))
                    ratios[key] = (float(likelihood), float(units))
    return ratios


def _scores(name: str, lines: list[Mapping[str, Any]], results: Results) -> dict[str, float]:
    scores: dict[str, float] = {}
    for line in lines:
        metrics = line.get("metrics")
        for metric in metrics if isinstance(metrics, list) else []:
            score = _score(str(metric), line.get(str(metric)))
            if score is not None:
                scores[results.metric_name(name, str(metric), str(line.get("filter")))] = score
    return scores


def _score(metric: str, value: Any) -> float | None:
    try:
        if isinstance(value, bool):
            return float(value)
        if metric == "perplexity" and is_number(value):
            value = math.exp(-value)
        if metric in RATIOS and isinstance(value, list):
            per_unit = -value[0] / value[1]
            value = per_unit / math.log(2) if metric == "bits_per_byte" else math.exp(per_unit)
    except (ArithmeticError, TypeError, IndexError):
        return None
    return float(value) if is_number(value) and is_finite(value) else None
