"""Early decisions as a harness's program is told of them, and answers to them: see `tasks/statistics/early.py`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from resources.errors import CountsDisagree
from tasks.evaluators.reading import invalid_results
from tasks.records.builds import Build
from tasks.records.early import ANSWERED_NAME, EarlyScore
from tasks.spec.evaluation import digest_of
from tasks.statistics import early

WANTED_NAME = "early.json"
"""File in a harness's working folder: its presence says that questions are asked in the order that it gives."""
_DECISION_NAME = "early_decision.py"
Batches = tuple[tuple[tuple[str, str], ...], ...]
"""Benchmarks and names of questions, batch by batch."""
NOT_EARLY = {
    "alpaca_eval": "a length-corrected win rate is no mean over questions",
    "helm": "its program asks all questions at once",
    "inspect_ai": "it asks all questions at once",
    "levanter_lm_evaluation_harness": "its program asks all questions at once",
}
"""Evaluators that cannot decide early, with the reason."""


@dataclass(frozen=True)
class WantedScore:
    """A score that is to be decided: what it is, and its questions by their places in the order of asking."""

    benchmark: str
    metric: str
    rule: str
    baseline: str
    margin: float
    higher_is_better: bool
    alpha: float
    scale: float
    """The score's value where every question has its largest one."""
    bound: float
    """Largest score of a question."""
    questions: tuple[int, ...]
    shares: tuple[float, ...]
    predictions: tuple[float, ...]
    """From 0 to 1, more being better."""
    builds: tuple[Build, ...] = ()
    """Builds of the baseline's records; empty if others may be compared with it."""

    @cached_property
    def expected(self) -> float:
        """The baseline's score, from 0 to 1, more being better."""
        return sum(share * value for share, value in zip(self.shares, self.predictions, strict=True))

    def on_its_scale(self, unit: float) -> float:
        """A score from 0 to 1, more being better, as the harness publishes it."""
        return self.scale * (unit if self.higher_is_better else 1 - unit)

    def as_dict(self) -> dict[str, Any]:
        """The part of it that the program decides with."""
        return {
            "metric": self.metric,
            "bound": self.bound,
            "mirrored": not self.higher_is_better,
            "questions": self.questions,
            "shares": self.shares,
            "predictions": self.predictions,
            "threshold": self.expected - self.margin / self.scale,
            "alpha": self.alpha,
        }


@dataclass(frozen=True)
class EarlyQuestion:
    """A frozen question: its benchmark, its name, its draw, and a digest of its prompt where that must be the same."""

    benchmark: str
    id: str
    draw: int
    prompt: str | None


@dataclass(frozen=True)
class WantedEarly:
    """All that is to be decided of one cell, its questions in the order of asking.

    Without scores it only says that what was asked in `batches` is asked in them again, before the rest: the journal
    knows requests, each with several prompts, as they were.
    """

    gate: str = ""
    alpha: float = 0.0
    questions: tuple[EarlyQuestion, ...] = ()
    scores: tuple[WantedScore, ...] = ()
    batches: Batches = field(default=(), compare=False)

    @cached_property
    def content(self) -> dict[str, Any]:
        """The questions and what is decided with them."""
        return {
            "questions": [(question.benchmark, question.id) for question in self.questions],
            "draws": [question.draw for question in self.questions],
            "prompts": [question.prompt for question in self.questions],
            "scores": [score.as_dict() for score in self.scores],
        }

    @cached_property
    def digest(self) -> str:
        """Digest over them."""
        return digest_of([self.content, [score.rule for score in self.scores]])

    def stopped_after(self, output: Path) -> list[Answered] | None:
        """The questions that were asked, where that were not all; None where there is a result of the whole."""
        try:
            answered = read_answered((output / ANSWERED_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise invalid_results("lm-eval", output, f"no {ANSWERED_NAME} that can be read: {error}") from error
        return answered if len(answered) < len(self.questions) else None

    def files(self) -> dict[str, str]:
        """Files for the program's working folder: what is wanted, and the module that decides."""
        content = {**self.content, "batches": self.batches}
        return {WANTED_NAME: json.dumps(content), _DECISION_NAME: inspect.getsource(early)}


class Answered(BaseModel):
    """A question that was asked, the batch that it was asked in, and its scores by metric."""

    benchmark: str
    id: str
    batch: int
    scores: dict[str, float]


def read_answered(content: str) -> list[Answered]:
    """The questions that were asked, in that order.

    Raises:
        ValueError: a line is no question.
    """
    return [Answered.model_validate_json(line) for line in content.splitlines()]


def batches_in(content: str) -> Batches:
    """Names of the questions that were asked, by batch."""
    batches: dict[int, list[tuple[str, str]]] = {}
    for line in read_answered(content):
        batches.setdefault(line.batch, []).append((line.benchmark, line.id))
    return tuple(map(tuple, batches.values()))


def scores_decided(answered: Sequence[Answered], wanted: WantedEarly) -> tuple[EarlyScore, ...]:
    """The verdicts that some answers give; decided here once more, whatever the program thought."""
    places = {(question.benchmark, question.id): place for place, question in enumerate(wanted.questions)}
    asking = early.EarlyAsking(wanted.content)
    try:
        asking.take({places[line.benchmark, line.id]: line.scores for line in answered})
    except (ValueError, KeyError) as error:
        raise _undecided(str(error)) from error
    if not asking.decided:
        raise _undecided(f"no verdict after {len(answered)} of {len(places)}")
    return tuple(_score(score, decision) for score, decision in zip(wanted.scores, asking.decisions, strict=True))


def _undecided(found: str) -> CountsDisagree:
    return CountsDisagree(
        expected="a score of every question that was asked, and a verdict from them",
        found=found,
        remedy="There is no verdict. Look into harness.log beside the record, then evaluate again",
    )


def _score(score: WantedScore, decision: early.EarlyDecision) -> EarlyScore:
    assert decision.word is not None, "decided"
    estimate, *ends = map(score.on_its_scale, decision.estimate())
    return EarlyScore(
        benchmark=score.benchmark,
        metric=score.metric,
        rule=score.rule,
        baseline=score.baseline,
        baseline_value=score.on_its_scale(score.expected),
        margin=score.margin,
        higher_is_better=score.higher_is_better,
        alpha=score.alpha,
        verdict=decision.word,
        asked=decision.asked,
        questions=decision.questions,
        estimate=estimate,
        low=min(ends),
        high=max(ends),
    )
