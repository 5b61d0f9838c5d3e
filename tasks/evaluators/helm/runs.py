"""HELM's runs as files, any of which may be incomplete: a plan (ours), and three files for each run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from tasks.evaluators.reading import Unanswered, finish_of, read_result, require_plan_of
from tasks.records.details import Asking, PathPart
from tasks.spec.evaluation import EvaluationConfig

HARNESS = "HELM"
RESULTS_FOLDER = "helm"
TRUNCATED = "prompt_truncated"


class PlannedRun(BaseModel):
    """A planned run of HELM: the metrics that count, the most important first."""

    key: str
    label: str
    metrics: list[str]
    split: str | None = None
    questions: int | None
    control: str | None = None


class Plan(BaseModel):
    """The runs by name, as our program planned them before the first request."""

    suite: PathPart
    helm: str
    runs: dict[PathPart, PlannedRun]
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


class Stat(BaseModel):
    """A statistic."""

    name: _Name
    count: int
    mean: float | None = None


class _QuestionStats(BaseModel):
    instance_id: str
    train_trial_index: int = 0
    perturbation: _Perturbation | None = None
    stats: list[Stat]


class _Text(BaseModel):
    text: str = ""


class _Reference(BaseModel):
    output: _Text
    tags: list[str] = []


class Instance(BaseModel):
    """A question of a scenario, with the answers that it offers."""

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


class RequestState(BaseModel):
    """A request for a question, or for one of its choices, with its result."""

    instance: Instance
    train_trial_index: int = 0
    reference_index: int | None = Field(default=None, ge=0)
    request_mode: str | None = None
    output_mapping: dict[str, str] | None = None
    request: _Request
    result: _Result | None = None


class _Adapter(BaseModel):
    input_prefix: str = ""


class _ScenarioState(BaseModel):
    adapter_spec: _Adapter = _Adapter()
    request_states: list[RequestState]


class QuestionKey(NamedTuple):
    """Identifies a question of a run, as the plan does."""

    instance: str
    trial: int
    perturbation: str
    random: str | None


@dataclass(frozen=True)
class Run:
    """A run as read from its files."""

    plan: PlannedRun
    input_prefix: str  # before each question
    states: Mapping[QuestionKey, list[RequestState]]
    stats: list[Stat]
    by_question: Mapping[tuple[str, int, str], dict[str, float]]
    """Finite statistics of each question: instance, trial, perturbation."""
    splits: Mapping[str, str | None]  # of each instance

    @property
    def benchmark(self) -> str:
        return f"{self.plan.key}.{self.plan.label}" if self.plan.label else self.plan.key

    def statistics(self, key: QuestionKey) -> Mapping[str, float]:
        return self.by_question.get((key.instance, key.trial, key.perturbation), {})

    def is_truncated(self, key: QuestionKey) -> bool:
        return self.statistics(key).get(TRUNCATED, 0) > 0

    def scores(self, key: QuestionKey) -> dict[str, float]:
        """Returns a question's scores in the metrics that count."""
        values = self.statistics(key)
        return {name: values[name] for name in self.plan.metrics if name in values}

    @cached_property
    def published(self) -> dict[str, Stat]:
        """HELM's values of the metrics that count: on the main split, without perturbations, over all trials."""
        chosen: dict[str, Stat] = {}
        for name in self.plan.metrics:
            by_split = {
                stat.name.split: stat for stat in self.stats if stat.name.name == name and not stat.name.perturbation
            }
            preferred = [split for split in (self.plan.split, "test", "valid", *by_split) if split in by_split]
            if preferred:
                chosen[name] = by_split[preferred[0]]
        return chosen

    def shares(self, key: QuestionKey) -> dict[str, float]:
        """Returns a question's scores that enter published metrics; none for perturbed questions and other splits."""
        split = self.splits.get(key.instance)
        of_split = {name for name, stat in self.published.items() if stat.name.split == split and not key.perturbation}
        return {name: score for name, score in self.scores(key).items() if name in of_split}


def planned_runs(output: Path, plan: Plan, config: EvaluationConfig) -> Iterator[Run]:
    """Yields the runs in `output`."""
    require_plan_of((run.key for run in plan.runs.values()), config, harness=HARNESS, output=output)
    for name, planned_run in plan.runs.items():
        folder = output / RESULTS_FOLDER / "benchmark_output" / "runs" / plan.suite / name
        states: dict[QuestionKey, list[RequestState]] = defaultdict(list)
        scenario = read_result(HARNESS, folder / "scenario_state.json", _ScenarioState)
        for state in scenario.request_states:
            states[_key(state)].append(state)
        by_question: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
        splits: dict[str, str | None] = {}
        for question in read_result(HARNESS, folder / "per_instance_stats.json", list[_QuestionStats]):
            place = (question.instance_id, question.train_trial_index, _named(question.perturbation))
            for stat in question.stats:
                if stat.mean is not None and math.isfinite(stat.mean):
                    by_question[place][stat.name.name] = stat.mean
                    splits[question.instance_id] = stat.name.split
        stats = read_result(HARNESS, folder / "stats.json", list[Stat])
        yield Run(planned_run, scenario.adapter_spec.input_prefix, states, stats, by_question, splits)


def _key(state: RequestState) -> QuestionKey:
    instance = state.instance
    return QuestionKey(instance.id, state.train_trial_index, _named(instance.perturbation), state.request.random)


def _named(perturbation: _Perturbation | None) -> str:
    if perturbation is None:
        return ""
    settings = {name: value for name, value in (perturbation.model_extra or {}).items() if value is not None}
    return ",".join([perturbation.name, *(f"{name}={value}" for name, value in sorted(settings.items()))])


def is_answered(state: RequestState) -> bool:
    """Returns True if a request has an answer."""
    return state.result is not None and state.result.success and bool(state.result.completions)


def finish(states: list[RequestState], *, of_letters: bool = False) -> str | None:
    """Returns the finish reason of a question's answers; None if given texts are scored, or letters requested."""
    if any(state.request.echo_prompt or (state.output_mapping and not of_letters) for state in states):
        return None
    completions = [completion for state in states if state.result for completion in state.result.completions]
    return finish_of((completion.finish_reason or {}).get("reason") for completion in completions)
