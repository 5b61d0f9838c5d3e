"""Scores of ours by a benchmark's own code, for `run_lm_eval.py`: a control of its grader, and smooth scores.

A grader that marks every answer wrong gives each model the same low score. So at least one of the benchmark's right
answers, in one of several forms, must score better than an empty answer. Only benchmarks can fail that show gold
answers as they are in prompts, have filters that leave them so, or have programs that solve their tasks. No model is
called.

Multiple-choice benchmarks get smooth scores. If choices are part of the context, as in winogrande, the text behind them
is scored, the same for all, and its bytes count. Benchmarks have no such scores if a question does not have a single
right choice, or if their own code scores.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from choice_scoring import HIGHER_IS_BETTER, smooth_scores
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.registry import METRIC_REGISTRY, get_aggregation
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval_measures import digest

PASSED, NO_GOLD = "passed", "no control: no gold answers"
NOT_IN_FORM = "no control: gold answers are not in the form that its filters look for"
QUESTIONS, LOOKED_AT = 8, 64
FORMS = (
    "{}",
    " {}",
    "The answer is {}.",
    "So the answer is {}.",
    "So the answer is ({}).",
    "#### {}",
    "\\boxed{{{}}}",
    "$\\boxed{{{}}}$",
    "Final Answer: The final answer is ${}$. I hope it is correct.",
    "**Final Answer**: {}",
    "({})",
    "[ANSWER]{}[/ANSWER]",
)
"""Usual forms of an answer around its gold text."""
PLAIN_FILTERS = {"take_first", "remove_whitespace", "lowercase", "uppercase"}
PROGRAMS = {"canonical_solution": (), "code": ("test_list",)}
"""Fields with a program that solves a task, each with the fields that must exist with it."""
FOLDER = "controls"
_log = logging.getLogger("lm_eval")
_Scores = dict[str, float]


@dataclass(frozen=True)
class Failure:
    """A known answer to a question that scores no better than an empty answer."""

    doc_id: int
    question: str
    answer: str
    scores: _Scores
    empty: _Scores


def control(task: Task, asked: list[tuple[int, Any]]) -> tuple[str, Failure | None]:
    """Returns the outcome over the first questions with gold answers, and the first failure if none passed."""
    if len(task.instances) > len({instance.doc_id for instance in task.instances}):
        return "no control: it does not only let the model write", None
    path = None if getattr(task, "UNSAFE_CODE", False) else Path(sys.prefix) / FOLDER / _key(task, asked)
    with suppress(OSError, ValueError):
        if path is not None:
            return path.read_text(encoding="utf-8"), None
    outcome, failure = _controlled(task, asked)
    if path is not None and failure is None:
        with suppress(OSError):  # a read-only environment
            path.parent.mkdir(exist_ok=True)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}")
            unfinished.write_text(outcome, encoding="utf-8")
            unfinished.replace(path)
    return outcome, failure


def _controlled(task: Task, asked: list[tuple[int, Any]]) -> tuple[str, Failure | None]:
    passed, failures = 0, list[Failure]()
    certain = _is_plain(task) or _shows_gold(task)
    try:
        answers = {doc_id: _answers(task, doc) for doc_id, doc in asked[:LOOKED_AT]}
        known = [(doc_id, doc) for doc_id, doc in asked[:LOOKED_AT] if answers[doc_id]][:QUESTIONS]
        answered = [_answered(task, doc, ["", *answers[doc_id]]) for doc_id, doc in known]
        for ensemble in task._filters if known else ():  # once: a filter of lm-eval takes half a second for a table
            ensemble.apply([instance for instances in answered for instance in instances])
        for (doc_id, doc), (nothing, *instances) in zip(known, answered, strict=True):
            empty, first = _scores(task, nothing), _scores(task, instances[0])
            if _better(task, first, empty) or any(_better(task, _scores(task, each), empty) for each in instances[1:]):
                passed += 1
            else:
                certain = certain or _has_program(doc)
                failures.append(Failure(doc_id, str(task.doc_to_text(doc)), answers[doc_id][0], first, empty))
    except Exception as error:  # noqa: BLE001 - a grader is third-party code; if it fails so on answers, the run does
        _log.warning("no control", exc_info=error)
        return f"no control: {type(error).__name__} as known answers were scored", None
    if not failures:
        return (PASSED if passed else NO_GOLD), None
    if passed:
        return f"{PASSED} for {passed} of {passed + len(failures)} known answers", None
    return (f"failed for {len(failures)} known answers", failures[0]) if certain else (NOT_IN_FORM, None)


def _answers(task: Task, doc: Any) -> list[str]:
    programs = [doc[name] for name in PROGRAMS if _has_program(doc, name)]
    return [*programs, *(form.format(gold) for gold in _gold(task, doc) for form in FORMS)]


def _has_program(doc: Any, *names: str) -> bool:
    return any(name in doc and all(field in doc for field in PROGRAMS[name]) for name in names or PROGRAMS)


def _is_plain(task: Task) -> bool:
    metrics = [entry["metric"] for entry in task.config.metric_list or ()]
    filters = [part["function"] for entry in task.config.filter_list or () for part in entry["filter"]]
    own = task.config.process_results or type(task).process_results is not ConfigurableTask.process_results
    known = bool(metrics) and all(isinstance(name, str) and name in METRIC_REGISTRY for name in metrics)
    return known and not own and PLAIN_FILTERS.issuperset(filters)


def _shows_gold(task: Task) -> bool:
    shown = task.config.fewshot_config
    other = shown.samples is not None or shown.doc_to_target != task.config.doc_to_target
    return bool(task.config.num_fewshot) and not other


def _gold(task: Task, doc: Any) -> Iterator[str]:
    if isinstance(task.config.doc_to_target, int) and task.config.doc_to_choice is None:
        return  # means no target
    target = task.doc_to_target(doc)
    if task.config.doc_to_choice is not None and isinstance(target, int):
        target = task.doc_to_choice(doc)[target]
    for text in target if isinstance(target, list | tuple) else [target]:
        if isinstance(text, str | int | float) and str(text).strip():
            yield str(text)


def _answered(task: Task, doc: Any, answers: list[str]) -> list[Instance]:
    repeats = task.config.repeats or 1
    about = (task.task_name, 0, repeats)
    return [Instance("generate_until", deepcopy(doc), ("", {}), 0, about, [answer] * repeats) for answer in answers]


def _scores(task: Any, answered: Instance) -> _Scores:
    scores: _Scores = {}
    for name, response in answered.filtered_resps.items():
        for metric, value in task.process_results(deepcopy(answered.doc), [response]).items():
            number = value if isinstance(value, bool | int | float) else task.aggregation()[metric]([value])
            scores[f"{metric},{name}"] = float(number)
    return scores


def _better(task: Task, scores: _Scores, empty: _Scores) -> bool:
    higher = task.higher_is_better()
    return any(
        value < empty[key] if higher.get(key.partition(",")[0], True) is False else value > empty[key]
        for key, value in scores.items()
        if key in empty
    )


def _key(task: Task, asked: list[tuple[int, Any]]) -> str:
    source = (task.config.metadata or {}).get("config_source")
    folder = Path(source).parent if source and Path(source).is_file() else None
    code = [Path(__file__), *(sorted(folder.glob("*.py")) if folder else ())]
    config = {key: value for key, value in task.dump_config().items() if key != "metadata"}
    parts = [[version("lm_eval")], [config], asked[:LOOKED_AT], [path.read_text() for path in code]]
    return hashlib.sha256(digest(parts).encode()).hexdigest()[:32]


def evidence(name: str, failure: Failure) -> str:
    """Formats a failure as JSON for people."""
    content = {"benchmark": name, **failure.__dict__}
    return json.dumps(content, indent=2, ensure_ascii=False)


WITHOUT = f"Without {' and '.join(HIGHER_IS_BETTER)}:"


def add_smooth_scores(task: Task, docs: Sequence[Any]) -> None:
    """Adds smooth scores to a task if they are defined for all of its documents; else adds a note with the reason."""
    task.smooth = []
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    if (
        not isinstance(task, ConfigurableTask)
        or type(task).process_results is not ConfigurableTask.process_results
        or callable(task.config.process_results)
    ):
        task.notes.append(f"{WITHOUT} code of its own scores the choices, and may take several for right.")
        return
    several = sum(_right_choice(task, doc) is None for doc in docs)
    if several:
        task.notes.append(f"{WITHOUT} {several} of {len(docs)} questions do not have exactly 1 right choice.")
        return
    task.smooth = [name for name in HIGHER_IS_BETTER if name not in task.aggregation()]
    for name in task.smooth:
        task._aggregation_list[name] = get_aggregation("mean")
        task._higher_is_better[name] = HIGHER_IS_BETTER[name]
    task.process_results = partial(_scored, task, task.process_results)


def weigh_in_groups(groups: Iterable[Group]) -> None:
    """Adds means of smooth scores, weighted like its first metric, to each group with these scores in all parts."""
    for group in groups:
        if metrics := group.aggregate_metric_list:
            parts = group.get_all_tasks()
            names = [name for name in HIGHER_IS_BETTER if all(name in part.smooth for part in parts)]
            group.aggregate_metric_list = [*metrics, *(replace(metrics[0], metric=name) for name in names)]


def _right_choice(task: ConfigurableTask, doc: Any) -> int | None:
    choices = task.doc_to_choice(doc)
    given = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    match given if isinstance(given, list) else [given]:
        case [int() as number] if 0 <= number < len(choices):
            return number
        case [str() as text] if text in choices:
            return choices.index(text)
    return None


def _scored(
    task: ConfigurableTask, process: Callable[..., dict[str, Any]], doc: Any, results: Sequence[Any]
) -> dict[str, Any]:
    choices = task.doc_to_choice(doc)
    texts = [str(task.doc_to_target(doc))] * len(choices) if task.multiple_input else choices
    weighed = [float(log_likelihood) for log_likelihood, _ in results[: len(choices)]]  # the rest has no context
    right = _right_choice(task, doc)
    assert right is not None  # else the task has no smooth scores
    scores = smooth_scores(weighed, texts, right)
    return {**process(doc, results), **{name: scores[name] for name in task.smooth}}
