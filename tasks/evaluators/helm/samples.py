"""Reads HELM's samples of a run: prompt, answer and scores of each question."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tasks.evaluators.helm.runs import Instance, RequestState, finish, is_answered, planned_runs, read_plan
from tasks.records.samples import Sample
from tasks.spec.evaluation import EvaluationConfig

_CORRECT = "correct"
_CHOSEN = "predicted_index"
_HASH_DIGITS = 12


def read_samples(output: Path, config: EvaluationConfig) -> Iterator[Sample]:
    """Yields every question of the runs in `output`, in each trial."""
    for run in planned_runs(output, read_plan(output), config):
        forms = Counter(key.instance for key in run.states)
        for key, states in run.states.items():
            prompt, before = _prompt(states, input_prefix=run.input_prefix)
            further = (f"trial {key.trial}" if key.trial else "", key.perturbation, key.random or "")
            yield Sample(
                benchmark=run.benchmark,
                id="/".join([_id(states[0].instance), *(part for part in further if part)]),
                prompt=prompt,
                output=_output(states, run.statistics(key)),
                target=_target(states[0]),
                scores=run.shares(key),
                cluster=key.instance if forms[key.instance] > 1 else None,
                finish=finish(states),
                truncated=run.is_truncated(key),
                choices=_choices(states),
                context=before,
                tokens=_tokens(states),
            )


def _id(instance: Instance) -> str:
    offered = [[reference.output.text, _CORRECT in reference.tags] for reference in instance.references]
    content = json.dumps([instance.input.text, offered])
    return f"{instance.id}-{hashlib.sha256(content.encode()).hexdigest()[:_HASH_DIGITS]}"


def _prompt(states: list[RequestState], *, input_prefix: str) -> tuple[str, str]:
    question, messages = states[0].instance.input.text, states[0].request.messages
    sent = "\n".join(str(message.get("content")) for message in messages) if messages else states[0].request.prompt
    place = max(sent.rfind(question), 0) if question else 0
    if len(states) > 1:
        return question, sent[:place]
    place -= len(input_prefix) if sent[:place].endswith(input_prefix) else 0
    return sent[place:], sent[:place]


def _choices(states: list[RequestState]) -> tuple[str, ...]:
    if states[0].output_mapping:
        return tuple(states[0].output_mapping.values())
    references = states[0].instance.references
    numbers = [state.reference_index for state in states if state.request_mode != "calibration"]
    return tuple(
        references[number].output.text for number in numbers if number is not None and number < len(references)
    )


def _tokens(states: list[RequestState]) -> int | None:
    result = states[0].result
    if len(states) > 1 or states[0].request.echo_prompt or result is None or not result.completions:
        return None
    return len(result.completions[0].tokens) or None


def _output(states: list[RequestState], statistics: Mapping[str, float]) -> str:
    if len(states) == 1:
        result = states[0].result
        return result.completions[0].text if result and result.completions else ""
    offered = [state for state in states if is_answered(state) and state.request_mode != "calibration"]
    if not offered:
        return ""
    likeliest = max(offered, key=lambda state: state.result.completions[0].logprob if state.result else -math.inf)
    references = likeliest.instance.references
    chosen = int(statistics.get(_CHOSEN, likeliest.reference_index or 0))
    return references[chosen].output.text if 0 <= chosen < len(references) else ""


def _target(state: RequestState) -> str | None:
    right = [reference.output.text for reference in state.instance.references if _CORRECT in reference.tags]
    if not right:
        return None
    for letter, text in (state.output_mapping or {}).items():
        if text == right[0]:
            return letter
    return right[0]
