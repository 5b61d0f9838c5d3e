"""Gates: conditions on the records of a checkpoint, as a file that can be reviewed.

Unknown counts as NO-GO: a score that is missing or cannot be compared fails the gate.
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
    benchmark: str
    """Benchmark, or a pattern such as mmlu*; every score that matches must pass."""
    metric: str
    """Metric, such as acc, or a pattern; `*` takes all but smooth scores (`bpb`, `choice_prob_norm`)."""
    evaluator: EvaluatorName | None = None
    """Only scores of this harness; all harnesses when unset."""

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
        bounds = (("at least", self.at_least), ("at most", self.at_most))
        return f"{self.scores} {' and '.join(f'{word} {value:g}' for word, value in bounds if value is not None)}"


@dataclass(frozen=True)
class NamedCheckpoint:
    """A baseline given as a checkpoint, named as in `assay compare`."""

    text: str


@dataclass(frozen=True)
class EarlierCheckpoints:
    """A baseline among the checkpoints of the same run with lower steps; `most` is the number averaged for a mean."""

    take: Literal["previous", "best", "mean"]
    most: int = 1


@dataclass(frozen=True)
class OtherRun:
    """A baseline in another run at the same step or tokens; its records are below `path` if set."""

    run: str
    at: Literal["step", "tokens"]
    path: str | None = None


BaselineName = NamedCheckpoint | EarlierCheckpoints | OtherRun
_MEAN = re.compile(r"mean of last ([1-9]\d*)")
_OTHER_RUN = re.compile(r"(?:(.+):(?!//))?([^/:@]+)@same (step|tokens)")


def _baseline_name(text: str) -> BaselineName:
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
    """A score must be shown not to be worse than that of another checkpoint by a margin, on the questions common to
    both where there are samples."""

    not_worse_than: str
    """The other checkpoint, as in `assay compare`: NAME, RUN@STEP, RUN@LABEL, the name of a merged checkpoint such as
    mean(RUN@last:5), PATH:NAME or the folder of a record. Or an earlier checkpoint of the same run: `previous`, `best`,
    `mean of last 5`. Or another run: `RUN@same step`, `RUN@same tokens`. For a merged checkpoint these are merged in
    the same way."""
    by_more_than: float = Field(gt=0)
    """The margin, on the metric's own scale: the 95 % interval of the change must rule out a loss of this size."""
    anyway: bool = False
    """Also compare scores that were measured differently: other settings, other prompt wording, or other versions."""
    nearest_within: float = Field(default=0.05, ge=0, lt=1)
    """Largest distance of another run's nearest checkpoint, as a share of the current step or token count."""
    tokens_per_step: dict[str, float] = {}
    """Tokens read per step, by run name, for `RUN@same tokens`; when unset, taken from the checkpoints
    (`num_input_tokens_seen` in trainer_state.json)."""

    @field_validator("not_worse_than")
    @classmethod
    def _is_a_baseline(cls, text: str) -> str:
        _baseline_name(text)
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
        return _baseline_name(self.not_worse_than)

    @property
    def words(self) -> str:
        return f"{self.scores} not worse than {self.not_worse_than} by more than {self.by_more_than:g}"


def _kind(rule: Any) -> str:
    named = rule if isinstance(rule, dict) else vars(rule)
    return "baseline" if "not_worse_than" in named else "bound"


Rule = Annotated[
    Annotated[BoundRule, Tag("bound")] | Annotated[BaselineRule, Tag("baseline")], Discriminator(_kind), AnyOfInForms()
]


class Gate(Config):
    """The conditions for GO. Without rules, every cell must have succeeded."""

    name: str = "gate"
    """Name of the gate in verdicts."""
    checkpoints: Literal["latest", "every"] = "latest"
    """Judge only the checkpoint with the highest step, or every checkpoint."""
    rules: tuple[Rule, ...] = ()
    """Rules for scores; each must hold."""
    false_alarms: Literal["per run", "per checkpoint"] = "per run"
    """The unit of which at most 5 % are refused by chance if nothing is worse than the baseline: the run with all of
    its checkpoints, or the checkpoint."""
    decide: Literal["whole", "early"] = "whole"
    """Judge whole evaluations, or stop requests early once it is known whether the whole will be worse than the
    baseline by more than the margin; only for rules with not_worse_than."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Largest probability that the whole contradicts any early verdict on a checkpoint, per command and baseline."""
    whole_every: int | None = Field(default=None, ge=2)
    """For a policy's own gate that decides early: every N-th checkpoint of a run that needs an evaluation, by step and
    starting with the first, is evaluated whole; 10 when unset."""
    max_withheld: int = Field(default=0, ge=0)
    """Tolerated number of cells of a checkpoint with a withheld score."""
    max_failed: int = Field(default=0, ge=0)
    """Tolerated number of cells of a checkpoint that failed or have no record."""

    @model_validator(mode="after")
    def _decidable(self) -> Gate:
        bounds = [rule.words for rule in self.rules if not isinstance(rule, BaselineRule)]
        if self.decide == "early" and (bounds or not self.rules):
            raise ValueError(
                "expected only rules with not_worse_than in a gate that decides early, "
                f"found {'; '.join(bounds) or 'none'}"
            )
        if self.whole_every is not None and self.decide == "whole":
            raise ValueError("expected `decide: early` with whole_every, found `decide: whole`")
        return self

    @property
    def looks_back(self) -> bool:
        """True if a rule compares with earlier checkpoints of the same run."""
        return any(isinstance(getattr(rule, "baseline", None), EarlierCheckpoints) for rule in self.rules)
