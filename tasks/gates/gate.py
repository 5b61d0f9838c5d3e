"""Gates: what the records of a checkpoint must show before it goes on, as a file that can be reviewed.

A gate never says GO for what it cannot know: a score that is missing, or cannot be compared, is a reason for NO-GO.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from resources.config import AnyOfInForms, Config
from tasks.spec.evaluators import EvaluatorName

EVERYTHING = "*"


class _Scored(Config):
    """The scores that a rule is about."""

    benchmark: str
    """Benchmark, or a pattern such as mmlu*; every score that matches must pass."""
    metric: str
    """Metric, such as acc, or a pattern; `*` takes all but smooth scores (`bpb`, `choice_prob_norm`)."""
    evaluator: EvaluatorName | None = None
    """Only scores of this harness; every one when unset."""

    @property
    def scores(self) -> str:
        return f"{self.benchmark} · {self.metric}" + (f" ({self.evaluator})" if self.evaluator else "")


class BoundRule(_Scored):
    """A score must not be below, or above, a number."""

    at_least: float | None = None
    """The lowest value that passes."""
    at_most: float | None = None
    """The highest value that passes."""

    @model_validator(mode="after")
    def _bounded(self) -> BoundRule:
        if self.at_least is None and self.at_most is None:
            raise ValueError("expected at_least, at_most or not_worse_than in each rule, found none of them")
        for bound in (self.at_least, self.at_most):
            if bound is not None and not math.isfinite(bound):
                raise ValueError(f"expected a number, found {bound}")
        return self

    @property
    def words(self) -> str:
        """Returns what it asks for."""
        bounds = (("at least", self.at_least), ("at most", self.at_most))
        return f"{self.scores} {' and '.join(f'{word} {value:g}' for word, value in bounds if value is not None)}"


@dataclass(frozen=True)
class NamedCheckpoint:
    """A baseline that is one checkpoint, as `assay compare` names it."""

    text: str


@dataclass(frozen=True)
class EarlierCheckpoints:
    """A baseline among the checkpoints of the same run with lower steps; `most` are averaged for a mean."""

    take: Literal["previous", "best", "mean"]
    most: int = 1


@dataclass(frozen=True)
class OtherRun:
    """A baseline that is another run where it had come as far; its records lie below `path` where that is named."""

    run: str
    at: Literal["step", "tokens"]
    path: str | None = None


BaselineName = NamedCheckpoint | EarlierCheckpoints | OtherRun
_MEAN = re.compile(r"mean of last ([1-9]\d*)")
_OTHER_RUN = re.compile(r"(?:(.+):(?!//))?([^/:@]+)@same (step|tokens)")


def baseline_name(text: str) -> BaselineName:
    """Returns what the text of a rule means."""
    if text in ("previous", "best"):
        return EarlierCheckpoints(text)
    if mean := _MEAN.fullmatch(text):
        return EarlierCheckpoints("mean", int(mean[1]))
    if other := _OTHER_RUN.fullmatch(text):
        return OtherRun(other[2], "step" if other[3] == "step" else "tokens", other[1])
    if text.startswith("mean of ") or "@same" in text:
        raise ValueError(f"expected `mean of last 5`, `RUN@same step` or `RUN@same tokens`, found {text!r}")
    return NamedCheckpoint(text)


class BaselineRule(_Scored):
    """A score must be shown not to be worse than that of another checkpoint by a margin, on the questions both were
    asked where there are samples."""

    not_worse_than: str
    """The other checkpoint, as in `assay compare`: NAME, RUN@STEP, a merged one's name such as mean(RUN@last:5),
    PATH:NAME or the folder of a record. Or an earlier one of the same run: `previous`, `best`, `mean of last 5`. Or
    another run: `RUN@same step`, `RUN@same tokens`. For a merged checkpoint these are merged in the same way."""
    by_more_than: float = Field(gt=0)
    """The margin, on the metric's own scale: a loss as large must be ruled out by the 95 % interval of the change."""
    anyway: bool = False
    """Compare also what was not measured alike: other settings, questions put in other words, or another build."""
    nearest_within: float = Field(default=0.05, ge=0, lt=1)
    """Largest distance of another run's nearest checkpoint, as a share of the step, or of the tokens, judged."""
    tokens_per_step: dict[str, float] = {}
    """Tokens that each step of a run read, by the run's name, for `RUN@same tokens`; where unset, checkpoints say it
    themselves (`num_input_tokens_seen` in trainer_state.json)."""

    @field_validator("not_worse_than")
    @classmethod
    def _is_a_baseline(cls, text: str) -> str:
        baseline_name(text)
        return text

    @model_validator(mode="after")
    def _tokens_are_asked_for(self) -> BaselineRule:
        if self.tokens_per_step and not self.not_worse_than.endswith("@same tokens"):
            raise ValueError("tokens_per_step is for `not_worse_than: RUN@same tokens` only")
        if any(not tokens > 0 or not math.isfinite(tokens) for tokens in self.tokens_per_step.values()):
            raise ValueError("expected numbers above 0 in tokens_per_step")
        return self

    @property
    def baseline(self) -> BaselineName:
        """Returns what the baseline's name means."""
        return baseline_name(self.not_worse_than)

    @property
    def words(self) -> str:
        """Returns what it asks for."""
        return f"{self.scores} not worse than {self.not_worse_than} by more than {self.by_more_than:g}"


def _kind(rule: Any) -> str:
    named = rule if isinstance(rule, dict) else vars(rule)
    return "baseline" if "not_worse_than" in named else "bound"


Rule = Annotated[
    Annotated[BoundRule, Tag("bound")] | Annotated[BaselineRule, Tag("baseline")],
    Discriminator(_kind),
    AnyOfInForms(),
]


class Gate(Config):
    """The conditions for GO. Without rules, every cell must have succeeded."""

    name: str = "gate"
    """Name of the gate in verdicts."""
    checkpoints: Literal["latest", "every"] = "latest"
    """Judge the checkpoint with the highest step, or each."""
    rules: tuple[Rule, ...] = ()
    """Rules for scores; each must hold."""
    false_alarms: Literal["per run", "per checkpoint"] = "per run"
    """The unit of which 5 % at most are refused by chance where nothing is worse than the baseline: the run, with all
    of its checkpoints, or the checkpoint."""
    decide: Literal["whole", "early"] = "whole"
    """Judge whole evaluations, or stop asking once it is known whether the whole will be worse than the baseline by
    more than the margin; rules with not_worse_than only."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Largest probability that the whole contradicts any early verdict on a checkpoint, of one command and baseline."""
    whole_every: int | None = Field(default=None, ge=2)
    """In a policy's own gate that decides early, of the checkpoints of a run that an evaluation is wanted of, by step:
    the first and each so many-th after it is evaluated whole; 10 when unset."""
    max_withheld: int = Field(default=0, ge=0)
    """Cells of a checkpoint whose score may be withheld."""
    max_failed: int = Field(default=0, ge=0)
    """Cells of a checkpoint that may have failed, or have no record."""

    @model_validator(mode="after")
    def _decidable(self) -> Gate:
        bounds = [rule.words for rule in self.rules if not isinstance(rule, BaselineRule)]
        if self.decide == "early" and (bounds or not self.rules):
            raise ValueError(
                "expected only rules with not_worse_than in a gate that decides early, "
                f"found {'; '.join(bounds) or 'none'}"
            )
        if self.whole_every is not None and self.decide == "whole":
            raise ValueError("expected `decide: early` beside whole_every, found `decide: whole`")
        return self

    @property
    def looks_back(self) -> bool:
        """True if a rule compares with earlier checkpoints of the same run."""
        return any(isinstance(getattr(rule, "baseline", None), EarlierCheckpoints) for rule in self.rules)
