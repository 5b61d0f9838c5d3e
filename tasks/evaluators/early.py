"""Early decisions: input and output of the harness's program; see `tasks/verdicts/statistics/early.py`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks.errors import CountsDisagree
from tasks.evaluators.reading import invalid_results
from tasks.records.builds import Build
from tasks.records.verdicts import ANSWERED_NAME, EarlyScore
from tasks.spec.evaluation import digest_of
from tasks.verdicts.statistics import early

WANTED_NAME = "early.json"
"""File in a harness's working folder; if it exists, requests follow its order."""
_DECISION_NAME = "early_decision.py"
Batches = tuple[tuple[tuple[str, str], ...], ...]  # benchmarks and ids of questions, by batch
NOT_EARLY = {
    "alpaca_eval": "a length-corrected win rate is no mean over questions",
    "helm": "its program asks all questions at once",
    "inspect_ai": "it asks all questions at once",
    "levanter_lm_evaluation_harness": "its program asks all questions at once",
}
"""Evaluators that cannot decide early, with the reason."""


@dataclass(frozen=True)
class WantedScore:
    """A score to decide: its rule and baseline, and the indexes of its questions in the order of requests."""

    benchmark: str
    metric: str
    rule: str
    baseline: str
    margin: float
    higher_is_better: bool
    alpha: float
    scale: float  # the score's value if every question has its largest value
    bound: float  # largest score of a question
    questions: tuple[int, ...]
    shares: tuple[float, ...]
    predictions: tuple[float, ...]  # from 0 to 1, higher is better
    builds: tuple[Build, ...] = ()
    """Versions of the baseline's records; empty if other versions may be compared with it."""

    @cached_property
    def expected(self) -> float:
        # From 0 to 1, higher is better.
        return sum(share * value for share, value in zip(self.shares, self.predictions, strict=True))

    def on_its_scale(self, unit: float) -> float:
        """Converts a score from 0 to 1, higher is better, to the harness's scale."""
        return self.scale * (unit if self.higher_is_better else 1 - unit)

    def as_dict(self) -> dict[str, Any]:
        same = ("metric", "bound", "questions", "shares", "predictions", "alpha")
        threshold = self.expected - self.margin / self.scale
        own = {name: getattr(self, name) for name in same}
        return {**own, "mirrored": not self.higher_is_better, "threshold": threshold}


@dataclass(frozen=True)
class EarlyQuestion:
    """A frozen question: benchmark, id, draw, and a digest of its prompt where that must be the same."""

    benchmark: str
    id: str
    draw: int
    prompt: str | None


@dataclass(frozen=True)
class WantedEarly:
    """All scores to decide for a cell, with its questions in the order of requests.

    Without scores, only `batches` are repeated before the rest: the journal finds a request by all of its prompts.
    """

    gate: str = ""
    alpha: float = 0.0
    questions: tuple[EarlyQuestion, ...] = ()
    scores: tuple[WantedScore, ...] = ()
    batches: Batches = field(default=(), compare=False)

    @cached_property
    def content(self) -> dict[str, Any]:
        return {
            "questions": [(question.benchmark, question.id) for question in self.questions],
            "draws": [question.draw for question in self.questions],
            "prompts": [question.prompt for question in self.questions],
            "scores": [score.as_dict() for score in self.scores],
        }

    @cached_property
    def digest(self) -> str:
        return digest_of([self.content, [score.rule for score in self.scores]])

    def stopped_after(self, output: Path) -> list[Answered] | None:
        """Returns the answered questions if the program stopped early; None if all were asked."""
        try:
            answered = read_answered((output / ANSWERED_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise invalid_results("lm-eval", output, f"no {ANSWERED_NAME} that can be read: {error}") from error
        return answered if len(answered) < len(self.questions) else None

    def files(self) -> dict[str, str]:
        """Returns files for the program's working folder: the scores to decide, and the module that decides."""
        content = {**self.content, "batches": self.batches}
        return {WANTED_NAME: json.dumps(content), _DECISION_NAME: inspect.getsource(early)}


class Answered(BaseModel):
    """An answered question, its batch, and its scores by metric."""

    benchmark: str
    id: str
    batch: int
    scores: dict[str, float]


def read_answered(content: str) -> list[Answered]:
    """Returns the answered questions in order; raises `ValueError` for other lines."""
    return [Answered.model_validate_json(line) for line in content.splitlines()]


def batches_in(content: str) -> Batches:
    """Returns benchmarks and ids of the answered questions, by batch."""
    batches: dict[int, list[tuple[str, str]]] = {}
    for line in read_answered(content):
        batches.setdefault(line.batch, []).append((line.benchmark, line.id))
    return tuple(map(tuple, batches.values()))


def scores_decided(answered: Sequence[Answered], plan: WantedEarly) -> tuple[EarlyScore, ...]:
    """Recomputes the verdicts from the answers, independently of the program."""
    places = {(question.benchmark, question.id): place for place, question in enumerate(plan.questions)}
    asking = early.EarlyAsking(plan.content)
    try:
        asking.take({places[line.benchmark, line.id]: line.scores for line in answered})
    except (ValueError, KeyError) as error:
        raise _undecided(str(error)) from error
    if not asking.decided:
        raise _undecided(f"no verdict after {len(answered)} of {len(places)}")
    return tuple(_score(score, decision) for score, decision in zip(plan.scores, asking.decisions, strict=True))


def _undecided(problem: str) -> CountsDisagree:
    return CountsDisagree(
        expected="a score of every question that was asked, and a verdict from them",
        found=problem,
        remedy="There is no verdict. Read harness.log next to the record, then evaluate again",
    )


def _score(score: WantedScore, decision: early.EarlyDecision) -> EarlyScore:
    assert decision.word is not None, "decided"
    estimate, *ends = map(score.on_its_scale, decision.estimate())
    same = ("benchmark", "metric", "rule", "baseline", "margin", "higher_is_better", "alpha")
    return EarlyScore(
        **{name: getattr(score, name) for name in same},
        baseline_value=score.on_its_scale(score.expected),
        verdict=decision.word,
        asked=decision.asked,
        questions=decision.questions,
        estimate=estimate,
        low=min(ends),
        high=max(ends),
    )
