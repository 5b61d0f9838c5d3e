"""Smooth scores for HELM's runs that score each choice by itself. Needs the HELM environment.

Runs that request a choice's letter have none: the likelihoods of the other choices are not requested.
"""

from __future__ import annotations

import math
from dataclasses import replace

from choice_scoring import HIGHER_IS_BETTER, smooth_scores
from helm.benchmark.adaptation.adapter_spec import ADAPT_MULTIPLE_CHOICE_SEPARATE_METHODS, AdapterSpec
from helm.benchmark.adaptation.request_state import RequestState
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.metrics.basic_metrics import BasicReferenceMetric
from helm.benchmark.metrics.metric import MetricMetadata, MetricResult, MetricSpec
from helm.benchmark.metrics.metric_name import MetricName
from helm.benchmark.metrics.metric_service import MetricService
from helm.benchmark.metrics.reference_metric import ReferenceMetric
from helm.benchmark.metrics.statistic import Stat
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.window_services.window_service_factory import WindowServiceFactory
from helm.common.object_spec import get_class_by_name

ASKED_ALONE = "original"
"""Request mode of a choice behind its question; in the other mode, calibration, there is no question."""


def scores_choices(spec: RunSpec) -> bool:
    """Returns True if a run scores each choice by itself, and only by the log-probabilities of its own tokens."""
    metrics = [get_class_by_name(metric.class_name) for metric in spec.metric_specs]
    return spec.adapter_spec.method in ADAPT_MULTIPLE_CHOICE_SEPARATE_METHODS and all(
        metric in (BasicReferenceMetric, SmoothScores) for metric in metrics if issubclass(metric, ReferenceMetric)
    )


def with_smooth_scores(spec: RunSpec) -> RunSpec:
    """Returns the run with this metric behind its own, if it scores each choice by itself."""
    if not scores_choices(spec):
        return spec
    ours = MetricSpec(f"{__name__}.{SmoothScores.__name__}", {"names": list(HIGHER_IS_BETTER)})
    return replace(spec, metric_specs=[*spec.metric_specs, ours])


class SmoothScores(ReferenceMetric):
    """Smooth scores of each question, if every question has a single right choice; none at all otherwise."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def evaluate(
        self, scenario_state: ScenarioState, metric_service: MetricService, eval_cache_path: str, parallelism: int
    ) -> MetricResult:
        if any(sum(choice.is_correct for choice in asked.references) != 1 for asked in scenario_state.instances):
            return MetricResult([], [])
        return super().evaluate(scenario_state, metric_service, eval_cache_path, parallelism)

    def evaluate_references(
        self,
        adapter_spec: AdapterSpec,
        reference_request_states: list[RequestState],
        metric_service: MetricService,
        eval_cache_path: str,
    ) -> list[Stat]:
        # The tokens that HELM's own metric uses: those of a choice behind a space.
        asked = [state for state in reference_request_states if state.request_mode == ASKED_ALONE]
        choices = asked[0].instance.references
        window = WindowServiceFactory.get_window_service(adapter_spec.model_deployment, metric_service)
        weighed = [0.0] * len(choices)
        for state in asked:
            tokens = len(window.tokenize(f" {choices[state.reference_index].output.text}"))
            last = state.result.completions[0].tokens[-tokens:]
            weighed[state.reference_index] = math.fsum(token.logprob for token in last)
        [right] = [place for place, choice in enumerate(choices) if choice.is_correct]
        scores = smooth_scores(weighed, [choice.output.text for choice in choices], right)
        return [Stat(MetricName(name)).add(scores[name]) for name in self._names]

    def get_metadata(self) -> list[MetricMetadata]:
        return [MetricMetadata(name, lower_is_better=not HIGHER_IS_BETTER[name]) for name in self._names]
