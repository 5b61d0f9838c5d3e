"""Reads what HELM leaves behind: a plan (ours), and for each run a scenario state and two files of statistics.

The number of questions comes from the plan, which is written before a run asks anything. Answers are counted in the
scenario state, one by one, and scores in the statistics of each question. Nothing here trusts a file to be whole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from resources.errors import HarnessOutputInvalid
from tasks.config import EvaluationConfig
from tasks.evaluators.evaluator import Parsed
from tasks.records import Counts, Metric
from tasks.samples import Sample

PLAN_NAME = "plan.json"
RESULTS_FOLDER = "helm"
SITE = f"{RESULTS_FOLDER}/index.html"
_CORRECT = "correct"
_TRUNCATED = "prompt_truncated"

_Content = TypeVar("_Content")


class _PlannedRun(BaseModel):
    """One run of HELM, as our program planned it: the metrics that count, the first one most."""

    key: str
    label: str
    metrics: list[str]
    split: str | None = None
    questions: int | None


class _Plan(BaseModel):
    suite: str
    helm: str
    runs: dict[str, _PlannedRun]
    lower_is_better: list[str] = []


class _Perturbation(BaseModel, extra="allow"):
    name: str = ""


class _Name(BaseModel):
    name: str
    split: str | None = None
    perturbation: _Perturbation | None = None


class _Stat(BaseModel):
    name: _Name
    count: int
    mean: float | None = None


class _QuestionStats(BaseModel):
    instance_id: str
    train_trial_index: int = 0
    perturbation: _Perturbation | None = None
    stats: list[_Stat]


class _Text(BaseModel):
    text: str = ""


class _Reference(BaseModel):
    output: _Text
    tags: list[str] = []


class _Instance(BaseModel):
    id: str
    input: _Text
    references: list[_Reference] = []
    perturbation: _Perturbation | None = None


class _Request(BaseModel):
    prompt: str = ""
    messages: list[dict[str, Any]] | None = None
    random: str | None = None


class _Completion(BaseModel):
    text: str = ""
    logprob: float = 0.0


class _Result(BaseModel):
    success: bool
    completions: list[_Completion] = []


class _RequestState(BaseModel):
    instance: _Instance
    train_trial_index: int = 0
    reference_index: int | None = None
    request_mode: str | None = None
    output_mapping: dict[str, str] | None = None
    request: _Request
    result: _Result | None = None


class _ScenarioState(BaseModel):
    request_states: list[_RequestState]


class _Key(NamedTuple):
    """What makes a question of a run one: the same as in the plan."""

    instance: str
    trial: int
    perturbation: str
    random: str | None


@dataclass(frozen=True)
class _Run:
    plan: _PlannedRun
    states: Mapping[_Key, list[_RequestState]]
    stats: list[_Stat]
    by_question: Mapping[tuple[str, int, str], dict[str, float]]
    """Finite statistics of each question: instance, trial, perturbation."""

    @property
    def benchmark(self) -> str:
        return f"{self.plan.key}.{self.plan.label}" if self.plan.label else self.plan.key

    def scores(self, key: _Key) -> dict[str, float]:
        """Of one question, in the metrics that count."""
        found = self.by_question.get((key.instance, key.trial, key.perturbation), {})
        return {name: found[name] for name in self.plan.metrics if name in found}


def read_results(output: Path, config: EvaluationConfig) -> Parsed:
    """What the runs in `output` found out.

    Raises:
        HarnessOutputInvalid: plan or results are missing or cannot be read, or hold no usable number.
    """
    plan = _read(output / PLAN_NAME, _Plan)
    metrics: dict[str, list[list[Metric]]] = defaultdict(list)
    requested = answered = scored = truncated = 0
    for run in _runs(output, plan, config):
        found = list(_metrics(run, plan.lower_is_better))
        metrics[run.plan.key].append(found)
        whole = {key for key, states in run.states.items() if all(_is_answered(state) for state in states)}
        requested += run.plan.questions or 0
        answered += len(whole)
        scored += _scored(run, whole, found)
        truncated += sum(stats.get(_TRUNCATED, 0) > 0 for stats in run.by_question.values())
    counts = Counts(requested=requested, answered=answered, scored=scored, truncated=truncated)
    if requested == answered == scored:
        for key, runs in metrics.items():
            if not all(runs):
                raise _invalid(output, f"no usable number for {key}")
    return Parsed(
        metrics=tuple(metric for key, runs in metrics.items() for metric in _together(key, runs)),
        counts=counts,
        versions={"helm": plan.helm},
        links={"HELM": SITE} if (output / SITE).is_file() else {},
    )


def read_samples(output: Path, config: EvaluationConfig) -> Iterator[Sample]:
    """Every question of the runs in `output`, in each trial.

    Raises:
        HarnessOutputInvalid: plan or results are missing or cannot be read.
    """
    for run in _runs(output, _read(output / PLAN_NAME, _Plan), config):
        for key, states in run.states.items():
            further = (f"trial {key.trial}" if key.trial else "", key.perturbation, key.random or "")
            yield Sample(
                benchmark=run.benchmark,
                id="/".join([key.instance, *(part for part in further if part)]),
                prompt=_prompt(states),
                output=_output(states),
                target=_target(states[0]),
                scores=run.scores(key),
            )


def _runs(output: Path, plan: _Plan, config: EvaluationConfig) -> Iterator[_Run]:
    wanted, planned = {task.metric_key for task in config.evals}, {run.key for run in plan.runs.values()}
    if wanted != planned:
        raise _invalid(output, f"a plan for {', '.join(sorted(planned))}, not {', '.join(sorted(wanted))}")
    for name, planned_run in plan.runs.items():
        folder = output / RESULTS_FOLDER / "benchmark_output" / "runs" / plan.suite / name
        states: dict[_Key, list[_RequestState]] = defaultdict(list)
        for state in _read(folder / "scenario_state.json", _ScenarioState).request_states:
            states[_key(state)].append(state)
        by_question: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
        for question in _read(folder / "per_instance_stats.json", list[_QuestionStats]):
            place = (question.instance_id, question.train_trial_index, _named(question.perturbation))
            for stat in question.stats:
                if stat.mean is not None and math.isfinite(stat.mean):
                    by_question[place][stat.name.name] = stat.mean
        yield _Run(planned_run, states, _read(folder / "stats.json", list[_Stat]), by_question)


def _key(state: _RequestState) -> _Key:
    instance = state.instance
    return _Key(instance.id, state.train_trial_index, _named(instance.perturbation), state.request.random)


def _named(perturbation: _Perturbation | None) -> str:
    """A perturbation with its settings, in one word."""
    if perturbation is None:
        return ""
    settings = {name: value for name, value in (perturbation.model_extra or {}).items() if value is not None}
    return ",".join([perturbation.name, *(f"{name}={value}" for name, value in sorted(settings.items()))])


def _is_answered(state: _RequestState) -> bool:
    return state.result is not None and state.result.success and bool(state.result.completions)


def _scored(run: _Run, whole: set[_Key], metrics: list[Metric]) -> int:
    """Answered questions with the metric that counts most; all of them where it is one of the run, not of questions."""
    if not metrics:
        return 0
    name = metrics[0].name
    if not any(name in stats for stats in run.by_question.values()):
        return len(whole)
    return sum(name in run.scores(key) for key in whole)


def _metrics(run: _Run, lower_is_better: list[str]) -> Iterator[Metric]:
    """The metrics that count, as HELM has them: on the main split, without perturbations, over all trials."""
    for name in run.plan.metrics:
        found = {stat.name.split: stat for stat in run.stats if stat.name.name == name and not stat.name.perturbation}
        preferred = [split for split in (run.plan.split, "test", "valid", *found) if split in found]
        value = found[preferred[0]].mean if preferred else None
        if value is None or not math.isfinite(value):
            continue
        of_question: dict[str, list[float]] = defaultdict(list)
        for (instance, _, perturbation), stats in run.by_question.items():
            if name in stats and not perturbation:
                of_question[instance].append(stats[name])
        values = [fmean(trials) for trials in of_question.values()]
        yield Metric(
            benchmark=run.benchmark,
            name=name,
            value=value,
            stderr=stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
            n=len(values) or len({key.instance for key in run.states}),
            higher_is_better=name not in lower_is_better,
        )


def _together(key: str, runs: list[list[Metric]]) -> Iterator[Metric]:
    """The metrics of a benchmark: the mean over its runs first, where there are several, then those of each."""
    if len(runs) > 1:
        for first in runs[0]:
            same = [metric for metrics in runs for metric in metrics if metric.name == first.name]
            if len(same) < len(runs):
                continue
            errors = [metric.stderr for metric in same if metric.stderr is not None]
            yield Metric(
                benchmark=key,
                name=first.name,
                value=fmean(metric.value for metric in same),
                stderr=math.hypot(*errors) / len(same) if len(errors) == len(same) else None,
                n=sum(metric.n for metric in same),
                higher_is_better=first.higher_is_better,
            )
    for metrics in runs:
        yield from metrics


def _prompt(states: list[_RequestState]) -> str:
    """What was sent; where each choice was sent by itself, what they have in common."""
    if len(states) > 1:
        return states[0].instance.input.text
    messages = states[0].request.messages
    return "\n".join(str(message.get("content")) for message in messages) if messages else states[0].request.prompt


def _output(states: list[_RequestState]) -> str:
    """The answer, or the likeliest choice."""
    if len(states) == 1:
        result = states[0].result
        return result.completions[0].text if result and result.completions else ""
    offered = [state for state in states if _is_answered(state) and state.request_mode != "calibration"]
    if not offered:
        return ""
    likeliest = max(offered, key=lambda state: state.result.completions[0].logprob if state.result else -math.inf)
    references = likeliest.instance.references
    return references[likeliest.reference_index or 0].output.text if references else ""


def _target(state: _RequestState) -> str | None:
    """The right answer as it would be given: the letter, where a choice is made by letter."""
    right = [reference.output.text for reference in state.instance.references if _CORRECT in reference.tags]
    if not right:
        return None
    for letter, text in (state.output_mapping or {}).items():
        if text == right[0]:
            return letter
    return right[0]


def _read(path: Path, kind: type[_Content]) -> _Content:
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except OSError as error:
        raise _invalid(path.parent, f"no readable {path.name} ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise _invalid(path, f"not what HELM writes: {'.'.join(map(str, first['loc']))} {first['msg']}") from error


def _invalid(place: Path, found: str) -> HarnessOutputInvalid:
    return HarnessOutputInvalid(
        expected=f"results of HELM in {place}",
        found=found,
        remedy="Look into harness.log beside the record, then evaluate again",
    )
