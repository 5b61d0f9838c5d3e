"""Lets lm-eval's multiple-choice benchmarks have smooth scores beside their own, for `run_lm_eval.py`.

Where choices stand in the context, as in winogrande, what is weighed is the text behind them, which is the same for
all; so its bytes count. A benchmark with a question that has not exactly one right choice has no such scores, nor one
that scores by code of its own.
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
    """Lets a task score them too, where they mean something for all of its documents; else a note says why not."""
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
        task.notes.append(f"{WITHOUT} {several} of {len(docs)} questions have not exactly one right choice.")
        return
    task.smooth = [name for name in HIGHER_IS_BETTER if name not in task.aggregation()]
    for name in task.smooth:
        task._aggregation_list[name] = get_aggregation("mean")
        task._higher_is_better[name] = HIGHER_IS_BETTER[name]
    task.process_results = partial(_scored, task, task.process_results)


def weigh_in_groups(groups: Iterable[Group]) -> None:
    """Lets groups have the mean of them, weighed as their first metric, where all of their parts have them."""
    for group in groups:
        if metrics := group.aggregate_metric_list:
            parts = group.get_all_tasks()
            names = [name for name in HIGHER_IS_BETTER if all(name in part.smooth for part in parts)]
            group.aggregate_metric_list = [*metrics, *(replace(metrics[0], metric=name) for name in names)]


def right_choice(task: ConfigurableTask, doc: Any) -> int | None:
    """The number of a question's one right choice, as lm-eval finds it; None where there is none, or more than one."""
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
    found = smooth_scores(weighed, texts, right_choice(task, doc))
    return {**process(doc, results), **{name: found[name] for name in task.smooth}}
