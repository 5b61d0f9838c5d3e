"""Reads what HELM leaves behind: a plan (ours), and for each run a scenario state and two files of statistics.

The number of questions comes from the plan, which is written before a run asks anything. Answers are counted in the
scenario state, one by one, and scores in the statistics of each question. Nothing here trusts a file to be whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from pydantic import BaseModel

from tasks.evaluators.evaluator import Parsed
from tasks.evaluators.reading import PLAN_NAME, Unanswered, finish_of, invalid_results, is_unclosed, read_result
from tasks.records.details import Asking, BenchmarkDetails
from tasks.records.record import Counts, Metric
from tasks.records.samples import Sample
from tasks.spec.evaluation import EvaluationConfig

_HARNESS = "HELM"

RESULTS_FOLDER = "helm"
SITE = f"{RESULTS_FOLDER}/index.html"
_CORRECT = "correct"
_TRUNCATED = "prompt_truncated"
_CHOSEN = "predicted_index"
_HASH_DIGITS = 12


class _PlannedRun(BaseModel):
    """One run of HELM, as our program planned it: the metrics that count, the first one most."""

    key: str
    label: str
    metrics: list[str]
    split: str | None = None
    questions: int | None
    control: str | None = None


class _Plan(BaseModel):
    suite: str
    helm: str
    runs: dict[str, _PlannedRun]
    lower_is_better: list[str] = []
    smooth: list[str] = []
    asking: Asking = Asking()
    unanswered: Unanswered = Unanswered()


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
    echo_prompt: bool = False


class _Completion(BaseModel):
    text: str = ""
    tokens: list[Any] = []
    logprob: float = 0.0
    finish_reason: dict[str, Any] | None = None


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


class _Adapter(BaseModel):
    input_prefix: str = ""


class _ScenarioState(BaseModel):
    adapter_spec: _Adapter = _Adapter()
    request_states: list[_RequestState]


class _Key(NamedTuple):
    """Identifies a question of a run, as the plan does."""

    instance: str
    trial: int
    perturbation: str
    random: str | None


@dataclass(frozen=True)
class _Run:
    plan: _PlannedRun
    input_prefix: str
    """Text that it puts before each question."""
    states: Mapping[_Key, list[_RequestState]]
    stats: list[_Stat]
    by_question: Mapping[tuple[str, int, str], dict[str, float]]
    """Finite statistics of each question: instance, trial, perturbation."""
    splits: Mapping[str, str | None]
    """The split that an instance belongs to."""

    @property
    def benchmark(self) -> str:
        return f"{self.plan.key}.{self.plan.label}" if self.plan.label else self.plan.key

    def statistics(self, key: _Key) -> Mapping[str, float]:
        """Of one question, all that HELM has."""
        return self.by_question.get((key.instance, key.trial, key.perturbation), {})

    def is_truncated(self, key: _Key) -> bool:
        """True if the prompt of a question was cut."""
        return self.statistics(key).get(_TRUNCATED, 0) > 0

    def scores(self, key: _Key) -> dict[str, float]:
        """Of one question, in the metrics that count."""
        found = self.statistics(key)
        return {name: found[name] for name in self.plan.metrics if name in found}

    @cached_property
    def published(self) -> dict[str, _Stat]:
        """The metrics that count, as HELM has them: on the main split, without perturbations, over all trials."""
        chosen: dict[str, _Stat] = {}
        for name in self.plan.metrics:
            found = {
                stat.name.split: stat for stat in self.stats if stat.name.name == name and not stat.name.perturbation
            }
            preferred = [split for split in (self.plan.split, "test", "valid", *found) if split in found]
            if preferred:
                chosen[name] = found[preferred[0]]
        return chosen

    def shares(self, key: _Key) -> dict[str, float]:
        """The scores of one question that are part of published metrics; perturbed ones and other splits have none."""
        split = self.splits.get(key.instance)
        of_split = {name for name, stat in self.published.items() if stat.name.split == split and not key.perturbation}
        return {name: score for name, score in self.scores(key).items() if name in of_split}


def read_results(output: Path, config: EvaluationConfig) -> Parsed:
    """Reads the metrics and counts of the runs in `output`.

    Raises:
        HarnessOutputInvalid: plan or results are missing or cannot be read, or hold no usable number.
    """
    plan = read_result(_HARNESS, output / PLAN_NAME, _Plan)
    metrics: dict[str, list[list[Metric]]] = defaultdict(list)
    details: dict[str, BenchmarkDetails] = {}
    requested = answered = scored = truncated = 0
    for run in _runs(output, plan, config):
        found = list(_metrics(run, plan))
        metrics[run.plan.key].append(found)
        whole = {key for key, states in run.states.items() if all(_is_answered(state) for state in states)}
        requested += run.plan.questions or 0
        answered += len(whole)
        scored += _scored(run, whole, found)
        truncated += sum(stats.get(_TRUNCATED, 0) > 0 for stats in run.by_question.values())
        details[run.benchmark] = _details(run)
    counts = Counts(requested=requested, answered=answered, scored=scored, truncated=truncated)
    if requested == answered == scored:
        for key, runs in metrics.items():
            if not all(runs):
                raise invalid_results(_HARNESS, output, f"no usable number for {key}")
    return Parsed(
        metrics=tuple(metric for key, runs in metrics.items() for metric in _together(key, runs)),
        counts=counts,
        versions={"helm": plan.helm},
        links={"HELM": SITE} if (output / SITE).is_file() else {},
        details=details,
        asking=plan.asking,
        endpoint_failure=plan.unanswered.endpoint_failure,
    )


def read_samples(output: Path, config: EvaluationConfig) -> Iterator[Sample]:
    """Every question of the runs in `output`, in each trial.

    Raises:
        HarnessOutputInvalid: plan or results are missing or cannot be read.
    """
    for run in _runs(output, read_result(_HARNESS, output / PLAN_NAME, _Plan), config):
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
                finish=_finish(states),
                truncated=run.is_truncated(key),
                choices=_choices(states),
                context=before,
                tokens=_tokens(states),
            )


def _runs(output: Path, plan: _Plan, config: EvaluationConfig) -> Iterator[_Run]:
    wanted, planned = {task.metric_key for task in config.evals}, {run.key for run in plan.runs.values()}
    if wanted != planned:
        raise invalid_results(
            _HARNESS, output, f"a plan for {', '.join(sorted(planned))}, not {', '.join(sorted(wanted))}"
        )
    for name, planned_run in plan.runs.items():
        folder = output / RESULTS_FOLDER / "benchmark_output" / "runs" / plan.suite / name
        states: dict[_Key, list[_RequestState]] = defaultdict(list)
        scenario = read_result(_HARNESS, folder / "scenario_state.json", _ScenarioState)
        for state in scenario.request_states:
            states[_key(state)].append(state)
        by_question: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
        splits: dict[str, str | None] = {}
        for question in read_result(_HARNESS, folder / "per_instance_stats.json", list[_QuestionStats]):
            place = (question.instance_id, question.train_trial_index, _named(question.perturbation))
            for stat in question.stats:
                if stat.mean is not None and math.isfinite(stat.mean):
                    by_question[place][stat.name.name] = stat.mean
                    splits[question.instance_id] = stat.name.split
        stats = read_result(_HARNESS, folder / "stats.json", list[_Stat])
        yield _Run(planned_run, scenario.adapter_spec.input_prefix, states, stats, by_question, splits)


def _key(state: _RequestState) -> _Key:
    instance = state.instance
    return _Key(instance.id, state.train_trial_index, _named(instance.perturbation), state.request.random)


def _id(instance: _Instance) -> str:
    """Name and content of a question: most names are places in the data, where another question may come to stand."""
    offered = [[reference.output.text, _CORRECT in reference.tags] for reference in instance.references]
    content = json.dumps([instance.input.text, offered])
    return f"{instance.id}-{hashlib.sha256(content.encode()).hexdigest()[:_HASH_DIGITS]}"


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


def _metrics(run: _Run, plan: _Plan) -> Iterator[Metric]:
    """The metrics that count, with the questions that each is taken over."""
    for name, stat in run.published.items():
        if stat.mean is None or not math.isfinite(stat.mean):
            continue
        of_question: dict[str, list[float]] = defaultdict(list)
        for (instance, _, perturbation), stats in run.by_question.items():
            if name in stats and not perturbation and run.splits[instance] == stat.name.split:
                of_question[instance].append(stats[name])
        values = [fmean(trials) for trials in of_question.values()]
        yield Metric(
            benchmark=run.benchmark,
            name=name,
            value=stat.mean,
            stderr=stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
            n=len(values) or len({key.instance for key in run.states}),
            higher_is_better=name not in plan.lower_is_better,
            smooth=name in plan.smooth,
        )


def _together(key: str, runs: list[list[Metric]]) -> Iterator[Metric]:
    """The metrics of a benchmark: the mean over its runs first, where there are several, then those of each."""
    if len(runs) > 1:
        for first in runs[0]:
            same = [metric for metrics in runs for metric in metrics if metric.name == first.name]
            if len(same) < len(runs):
                continue
            errors = [metric.stderr for metric in same if metric.stderr is not None]
            yield first.model_copy(
                update={
                    "benchmark": key,
                    "value": fmean(metric.value for metric in same),
                    "stderr": math.hypot(*errors) / len(same) if len(errors) == len(same) else None,
                    "n": sum(metric.n for metric in same),
                }
            )
    for metrics in runs:
        yield from metrics


def _prompt(states: list[_RequestState], *, input_prefix: str) -> tuple[str, str]:
    """Returns a question as it was sent, and what stood before it; of choices sent one by one, what they share."""
    question, messages = states[0].instance.input.text, states[0].request.messages
    sent = "\n".join(str(message.get("content")) for message in messages) if messages else states[0].request.prompt
    place = max(sent.rfind(question), 0) if question else 0
    if len(states) > 1:
        return question, sent[:place]
    place -= len(input_prefix) if sent[:place].endswith(input_prefix) else 0
    return sent[place:], sent[:place]


def _choices(states: list[_RequestState]) -> tuple[str, ...]:
    """Texts of the choices of a question, by letter or one by one; none where an answer is written."""
    if states[0].output_mapping:
        return tuple(states[0].output_mapping.values())
    references = states[0].instance.references
    numbers = [state.reference_index for state in states if state.request_mode != "calibration"]
    return tuple(references[number].output.text for number in numbers if number is not None)


def _tokens(states: list[_RequestState]) -> int | None:
    """Tokens of a written answer, up to the place where HELM cut it."""
    result = states[0].result
    if len(states) > 1 or states[0].request.echo_prompt or result is None or not result.completions:
        return None
    return len(result.completions[0].tokens) or None


def _output(states: list[_RequestState], statistics: Mapping[str, float]) -> str:
    """The answer, or the likeliest choice: the one that HELM scores, which may weigh choices by their length."""
    if len(states) == 1:
        result = states[0].result
        return result.completions[0].text if result and result.completions else ""
    offered = [state for state in states if _is_answered(state) and state.request_mode != "calibration"]
    if not offered:
        return ""
    likeliest = max(offered, key=lambda state: state.result.completions[0].logprob if state.result else -math.inf)
    references = likeliest.instance.references
    chosen = int(statistics.get(_CHOSEN, likeliest.reference_index or 0))
    return references[chosen].output.text if 0 <= chosen < len(references) else ""


def _finish(states: list[_RequestState], *, of_letters: bool = False) -> str | None:
    """The reason that the answers to a question ended; none where given texts are weighed, or letters asked for."""
    if any(state.request.echo_prompt or (state.output_mapping and not of_letters) for state in states):
        return None
    completions = [completion for state in states if state.result for completion in state.result.completions]
    return finish_of((completion.finish_reason or {}).get("reason") for completion in completions)


def _details(run: _Run) -> BenchmarkDetails:
    """Details of a run beyond what its samples show."""
    answers = [
        [completion.text for state in states if state.result for completion in state.result.completions]
        for states in run.states.values()
        if _finish(states) is not None
    ]
    return BenchmarkDetails(
        questions=run.plan.questions or 0,
        truncated=sum(run.is_truncated(key) for key in run.states),
        control=run.plan.control,
        finish_reasons=dict(
            Counter(filter(None, (_finish(states, of_letters=True) for states in run.states.values())))
        ),
        unclosed=sum(any(map(is_unclosed, texts)) for texts in answers),
    )


def _target(state: _RequestState) -> str | None:
    """The right answer as it would be given: the letter, where a choice is made by letter."""
    right = [reference.output.text for reference in state.instance.references if _CORRECT in reference.tags]
    if not right:
        return None
    for letter, text in (state.output_mapping or {}).items():
        if text == right[0]:
            return letter
    return right[0]
