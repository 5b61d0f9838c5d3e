"""Reads the metrics, counts and samples of lm-eval's runs.

Questions are counted in our plan, written before the first request; answers and scores in the samples.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from resources.storage.yaml_text import load_yaml
from tasks.evaluators.evaluator import Parsed
from tasks.evaluators.lm_eval.files import (
    HARNESS,
    NO_ANSWER,
    Asked,
    Ends,
    PlannedTask,
    Results,
    Run,
    is_finite,
    is_number,
    read_asked,
    read_plan,
    read_run,
    results_in,
    sample_lines,
    split,
)
from tasks.evaluators.reading import invalid_results, require_plan_of
from tasks.records.record import Counts, Metric
from tasks.records.samples import Sample
from tasks.records.verdicts import ANSWERED_NAME
from tasks.spec.benchmark_sets import SUITE_DATA
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
    texts = output_type == "generate_until"
    return all(
        isinstance(repeats, list)
        and repeats
        and all(isinstance(r, str) and r != NO_ANSWER if texts else math.isfinite(_log_probability(r)) for r in repeats)
        for repeats in responses
    )


def _is_scored(sample: Mapping[str, Any]) -> bool:
    names = sample.get("metrics")
    return isinstance(names, list) and bool(names) and all(_is_score(sample.get(str(name))) for name in names)


def _is_score(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_score(part) for part in value)
    return isinstance(value, str) or (isinstance(value, int | float) and is_finite(value))


SKIPPED_NAME = "skipped.jsonl"
RATIOS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
_HASH_DIGITS = 12
_LONGEST_INDICES = 4096  # parsing takes hundreds of times the memory of the text
_CONVERSATION, _TURN, _USERS_TURN = "['[{", '{"role": ', '{"role": "user"'
"""Prefixes of a conversation in lm-eval's samples, of its turns, and of the user's turns."""
_Arguments = list[list[Any]]


def read_samples(run: Run, output: Path, config: EvaluationConfig) -> Iterator[Sample]:
    """Yields every question of the run in `output`, then the questions skipped because of too long prompts."""
    evals = {task.metric_key: task for task in config.evals}
    by_name = {name: evals[key] for key, tasks in run.plan.benchmarks.items() for name in tasks}
    for name, task in run.plan.tasks.items():
        by_question: dict[str, list[Mapping[str, Any]]] = {}
        for line in run.samples_of(name):
            by_question.setdefault(_id(line), []).append(line)
        docs = {number: lines[0].get("doc") for number, lines in by_question.items()}
        asked = by_name[name]
        clusters = clusters_of((asked.name, name), docs, cluster_by=asked.cluster_by)
        for number, lines in by_question.items():
            yield _sample(name, number, lines, task, run, cluster=clusters.get(number))
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
    name: str, number: str, lines: list[Mapping[str, Any]], task: PlannedTask, run: Run, *, cluster: str | None
) -> Sample:
    first, output_type = lines[0], task.output_type
    given = first.get("doc_id")
    document = given if isinstance(given, int) else -1
    end, before = run.asked.ends.get(name, {}).get(document, Ends()), task.contexts.get(document, 0)
    arguments, answers = _arguments(first), _answers(first)
    response, target = "", str(first.get("target"))
    weighed = tuple(map(_log_probability, answers)) if output_type != "generate_until" else ()
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
        scores=_scores(name, lines, run.results),
        ratios=_ratios(name, lines, run.results),
        cluster=cluster,
        finish=end.finish,
        tokens=end.tokens[0] if end.tokens else None,
        truncated=document in task.truncated_questions,
        log_likelihoods=weighed if all(map(math.isfinite, weighed)) else (),
        choices=tuple(choices),
        context=prompt[: max(before, 0)],
    )


def _arguments(line: Mapping[str, Any]) -> _Arguments:
    given = line.get("arguments")
    requests = given.values() if isinstance(given, dict) else given if isinstance(given, list) else []
    return [list(r.values() if isinstance(r, dict) else r) for r in requests if isinstance(r, dict | list)]


def _answers(line: Mapping[str, Any]) -> list[Any]:
    responses = line.get("resps")
    whole = responses if isinstance(responses, list) else []
    return [response[0] for response in whole if isinstance(response, list) and response]


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


def clusters_of(names: Sequence[str], docs: Mapping[str, Any], *, cluster_by: str | None) -> dict[str, str]:
    """Returns the clusters of a benchmark's questions, by question; leaves out questions that share none.

    `names` are the harness's, and those it is published under; `docs` has the document of each question.
    """
    fields = [cluster_by] if cluster_by else _fields(names)
    for field in fields:
        clusters = {name: _digest(doc[field]) for name, doc in docs.items() if isinstance(doc, dict) and doc.get(field)}
        times = Counter(clusters.values())
        if cluster_by or (len(times) > 1 and max(times.values()) > 1):
            return {name: cluster for name, cluster in clusters.items() if times[cluster] > 1}
    return {}


@cache
def _keys() -> dict[str, Any]:
    return load_yaml((SUITE_DATA / "clusters.yaml").read_text())


def _fields(names: Sequence[str]) -> list[str]:
    patterns: dict[str, list[str]] = _keys()["benchmarks"]
    for pattern, fields in patterns.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return fields
    return _keys()["shared"]


def _digest(value: Any) -> str:
    content = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:_HASH_DIGITS]
