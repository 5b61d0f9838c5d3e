"""Scores the choices of HELM's runs, for `helm_asking.py`. Needs HELM's environment.

HELM's adapters send and echo the whole prompt for each choice, and its metric uses the last tokens only: as many as the
choice has by itself. The tokens before these are the context that `choice_scoring.py` sends once.

Runs that score each choice by itself get smooth scores. Runs that request a choice's letter have none: the likelihoods
of the other choices are not requested.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import openai
import valid_answers
from choice_scoring import (
    CACHED,
    ECHO,
    HIGHER_IS_BETTER,
    Choice,
    NotTakenError,
    Outcome,
    Row,
    Scorer,
    Trust,
    smooth_scores,
)
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
from helm.common.request import GeneratedOutput, RequestResult, Token
from refusals import read_tokenizer

NOT_ABLE = "the engine does not score from its prefix cache"
NOTHING_BEFORE = "choices have nothing in front of them"


@dataclass(frozen=True)
class Text:
    """A request with its last tokens to score: `ids` as the engine reads it, `weighed` of them."""

    state: RequestState
    ids: tuple[int, ...]
    weighed: int

    @property
    def choice(self) -> Choice:
        return Choice(self.ids[: -self.weighed], self.ids[-self.weighed :])


def together(plan: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns the scoring method over all runs of a plan; None if no run scored choices."""
    ways = {name: way for name, run in plan.items() if (way := run.get("loglikelihood"))}
    differences = [way["largest_difference"] for way in ways.values() if way["largest_difference"] is not None]
    echoed = [f"{name}: {way['reason']}" for name, way in ways.items() if way["way"] == ECHO]
    outcome = Outcome(
        way=ECHO if echoed else CACHED,
        audited=sum(way["audited"] for way in ways.values()),
        largest_difference=max(differences, default=None),
        reason="; ".join(echoed) or None,
    )
    return asdict(outcome) if ways else None


def weigh(
    states: Sequence[RequestState],
    job: Mapping[str, Any],
    *,
    length: Callable[[str], int],
    raw: Callable[[Any], dict[str, Any]],
    on_weighed: Callable[[int], None],
) -> tuple[dict[int, RequestResult], dict[str, Any]]:
    """Returns results of scored choices by request index, and the scoring method; other choices must be echoed.

    Args:
        length: number of tokens that HELM's metric counts in a text.
        raw: body with which HELM's own client sends a request.
        on_weighed: called with the number of newly scored choices.
    """
    outcome = Outcome()
    if not job["scores_from_cache"]:
        outcome.reason = NOT_ABLE
        return {}, asdict(outcome)
    tokenizer = read_tokenizer(job["tokenizer"], trusted=job["trust_remote_code"])
    prompts = tokenizer([state.request.prompt for state in states], return_attention_mask=False).input_ids
    texts: dict[int, Text] = {}
    for place, (state, ids) in enumerate(zip(states, prompts, strict=True)):
        assert state.reference_index is not None  # as all requests that score choices
        weighed = length(f" {state.instance.references[state.reference_index].output.text}")
        if 0 < weighed < len(ids):  # else the metric counts tokens without any context
            texts[place] = Text(state, tuple(ids), weighed)
    if not texts:
        outcome.reason = NOTHING_BEFORE
        return {}, asdict(outcome)
    began = time.monotonic()
    rows = asyncio.run(_rows(list(texts.values()), job, raw=raw, outcome=outcome, on_weighed=on_weighed))
    batch = {"batch_size": len(texts), "batch_request_time": time.monotonic() - began}

    @cache
    def read(token: int) -> str:
        return tokenizer.decode([token])

    pairs = zip(texts.items(), rows or [], strict=False)
    return {place: _result(text, weighed, read, batch=batch) for (place, text), weighed in pairs}, asdict(outcome)


def _result(text: Text, rows: Sequence[Row], read: Callable[[int], str], *, batch: Mapping[str, Any]) -> RequestResult:
    values = [0.0] * (len(text.ids) - text.weighed) + [value for value, _ in rows]
    tokens = [Token(text=read(token), logprob=value) for token, value in zip(text.ids, values, strict=True)]
    completion = GeneratedOutput(text=text.state.request.prompt, logprob=sum(values), tokens=tokens)
    return RequestResult(success=True, cached=False, completions=[completion], embedding=[], **batch)


async def _rows(
    texts: Sequence[Text],
    job: Mapping[str, Any],
    *,
    raw: Callable[[Any], dict[str, Any]],
    outcome: Outcome,
    on_weighed: Callable[[int], None],
) -> list[Sequence[Row]] | None:
    by_choice = {text.choice: text for text in texts}
    http_client = openai.DefaultAsyncHttpxClient(event_hooks=valid_answers.later_hooks())
    tries = job["request_retries"] + 1
    async with openai.AsyncOpenAI(
        base_url=job["base_url"],
        timeout=job["request_timeout_seconds"],
        max_retries=job["request_retries"],
        http_client=http_client,
    ) as client:

        async def ask(path: str, body: dict[str, Any], read: Callable[[Any], Any]) -> Any:
            unreadable = valid_answers.Malformed("none")
            for _ in range(tries):
                try:
                    address = job["base_url"].removesuffix("/v1") + path
                    return read(await client.post(address, cast_to=object, body=body))
                except openai.OpenAIError as error:
                    raise NotTakenError(f"{valid_answers.described(error)} for {path}") from error
                except valid_answers.Malformed as error:
                    unreadable = error
            raise NotTakenError(f"{unreadable} for {path}")

        async def echo(together: Sequence[Choice]) -> list[list[Row]]:
            [text] = [by_choice[choice] for choice in together]
            return [await ask("/v1/completions", raw(text.state.request), lambda answer: _echoed(answer, text))]

        scorer = Scorer(
            model=job["model"],
            ask=ask,
            echo=echo,
            most_requests=job["num_threads"],
            kv_cache_tokens=job["kv_cache_tokens"],
            trust=Trust.of(job),
            longest_prompt=job["max_model_len"] - 1 if job["max_model_len"] else sys.maxsize,
            on_weighed=on_weighed,
            outcome=outcome,
        )
        try:
            await echo([texts[0].choice])  # checks if the engine reads a text as the same tokens
        except NotTakenError as error:
            outcome.reason = str(error)
            return None
        return await scorer.weigh([text.choice for text in texts])


def _echoed(answer: Any, text: Text) -> list[Row]:
    try:
        columns = answer["choices"][0]["logprobs"]
        values, tops = columns["token_logprobs"], columns["top_logprobs"]
        if len(values) != len(text.ids):
            raise NotTakenError(f"the engine reads {len(values)} tokens where the tokenizer has {len(text.ids)}")
        last = range(len(values) - text.weighed, len(values))
        return [(float(values[place]), max(tops[place].values())) for place in last]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise valid_answers.Malformed(f"{type(error).__name__} in an echo") from error


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
        asked: list[Any] = [state for state in reference_request_states if state.request_mode == ASKED_ALONE]
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
