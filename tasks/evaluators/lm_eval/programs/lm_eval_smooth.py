"""Adds smooth scores to lm-eval's multiple-choice benchmarks, for `run_lm_eval.py`.

If choices are part of the context, as in winogrande, the text behind them is scored, the same for all, and its bytes
count. Benchmarks have no such scores if a question does not have a single right choice, or if their own code scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.registry import get_aggregation
from lm_eval.api.task import ConfigurableTask, Task
from smooth_scores import HIGHER_IS_BETTER, smooth_scores

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
    several = sum(right_choice(task, doc) is None for doc in docs)
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


def right_choice(task: ConfigurableTask, doc: Any) -> int | None:
    """Returns the number of a question's right choice, as lm-eval finds it; None if it is not unique."""
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
    scores = smooth_scores(weighed, texts, right_choice(task, doc))
    return {**process(doc, results), **{name: scores[name] for name in task.smooth}}
