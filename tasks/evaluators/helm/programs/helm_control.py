"""Scores known answers by a run's own metrics, for `helm_runs.py`, before its first request. Needs HELM's environment.

A grader that marks every answer wrong gives each model the same low score. So at least one of the scenario's right
answers, in one of several forms, must score differently from an empty answer. Only runs can fail that show references
as answers in their prompts, or request their letters. No model is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from helm.benchmark.adaptation.request_state import RequestState
from helm.benchmark.metrics.metric import PerInstanceStats
from helm.common.hierarchical_logger import hwarn
from helm.common.request import GeneratedOutput, RequestResult
from helm_asking import Run, missing_data
from refusals import Refused

PASSED, NO_GOLD = "passed", "no control: no gold answers"
NOT_IN_FORM = "no control: gold answers are not in the form that its metrics look for"
QUESTIONS = 8
FORMS = ("{}", "The answer is {}.", "#### {}", "### {}", "\\boxed{{{}}}", "$\\boxed{{{}}}$", "({})")  # of a gold text
Evaluate = Callable[[list[RequestState]], Iterable[PerInstanceStats]]
Scores = dict[Any, dict[str, float]]


def control(run: Run, states: list[RequestState], names: list[str], evaluate: Evaluate, *, withhold: bool) -> str:
    """Returns the outcome over the first questions that have gold answers.

    Args:
        names: of the metrics that count.
        evaluate: scores answered questions as the run itself does.
        withhold: refuse a run if its grader fails.
    """
    if any(state.request.echo_prompt for state in states) or run.spec.annotators:
        judged = "others judge its answers" if run.spec.annotators else "it does not only let the model write"
        return f"no control: {judged}"
    first = {state.instance.id: state for state in reversed(states) if not _is_varied(state) and gold(state)}
    known = [state for state in states if first.get(state.instance.id) is state][:QUESTIONS]
    if not known or not names:
        return NO_GOLD if names else "no control: no metric that counts is known beforehand"
    try:
        empty = scores(evaluate([answered(state, "") for state in known]), names)
        passed: set[Any] = set()
        for form in FORMS:
            right = scores(evaluate([answered(state, form.format(gold(state))) for state in known]), names)
            passed |= {question for question, metrics in right.items() if metrics != empty.get(question, {})}
            if passed:
                break
    except Exception as error:  # the boundary to HELM's metrics; if they fail so on answers, the run does
        if missing_data(error, run):
            raise
        hwarn(f"no control of {run.spec.name}: {type(error).__name__}")
        return f"no control: {type(error).__name__} as known answers were scored"
    if len(passed) == len(known):
        return PASSED
    if passed:
        return f"{PASSED} for {len(passed)} of {len(known)} known answers"
    if not (run.spec.adapter_spec.max_train_instances or known[0].output_mapping):
        return NOT_IN_FORM
    if withhold:
        raise Refused(
            expected=f"{run.key} to give its own right answers other scores than an empty answer",
            found=f"no difference for {len(known)} known answers, the first to question {known[0].instance.id}",
            remedy="The score is withheld, since every model would get it. Mend the run entry, or what its metrics need"
            " on this machine; if the control is wrong, set helm.failed_control to note",
            kind="GraderFailed",
        )
    return f"failed for {len(known)} known answers"


def _is_varied(state: RequestState) -> bool:
    return bool(state.train_trial_index or state.instance.perturbation or state.request.random)


def gold(state: RequestState) -> str:
    """Returns a right answer in the expected form: the letter if choices have letters; empty without any."""
    right = state.instance.first_correct_reference
    text = right.output.text if right else ""
    return next((letter for letter, choice in (state.output_mapping or {}).items() if choice == text), text)


def answered(state: RequestState, text: str) -> RequestState:
    """Returns a question with a made-up answer."""
    completions = [GeneratedOutput(text, 0.0, [], finish_reason={"reason": "stop"})] * state.request.num_completions
    result = RequestResult(
        success=True, cached=False, embedding=[], completions=completions, request_time=0.0, request_datetime=0
    )
    return replace(state, result=result)


def scores(per_instance_stats: Iterable[PerInstanceStats], names: list[str]) -> Scores:
    """Returns means of metrics by question."""
    result: Scores = {}
    for part in per_instance_stats:
        for stat in part.stats:
            if stat.name.name in names and stat.mean is not None and math.isfinite(stat.mean):
                result.setdefault(part.instance_id, {})[stat.name.name] = stat.mean
    return result
