"""Verdicts as values: of gates with their reasons, and on scores of a cell before all questions were evaluated.

Early verdicts are stored as `early.json` in the cell's folder and are not records: nothing that reads scores reads
them, and the report shows them separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import FiniteFloat

from resources.storage import storage
from tasks.errors import GateRefused
from tasks.records.builds import Build
from tasks.records.cost import Cost, Spent, spent_on
from tasks.records.details import OfCell, Part, Whole, misplaced, read_model
from tasks.records.numbers import measured
from tasks.records.record import Record
from tasks.spec.names import how_many

EARLY_NAME = "early.json"
ANSWERED_NAME = "early.jsonl"
"""File in an attempt's folder with the evaluated questions in order, their scores and batches."""
NOT_COVERED = "the whole of these questions only: neither training's jitter nor other questions"
"""Scope of a verdict, formatted."""


class EarlyScore(Part):
    """Verdict on a score against a baseline, on the metric's own scale."""

    benchmark: str
    """Benchmark name, as published."""
    metric: str
    """Name of the metric in the harness."""
    rule: str
    """Gate rule that requires the verdict, formatted."""
    baseline: str
    """Baseline checkpoints."""
    baseline_value: FiniteFloat
    """Score of the baseline, or the mean of its scores."""
    margin: FiniteFloat
    """Largest loss that still counts as not worse."""
    higher_is_better: bool
    """Direction of improvement."""
    alpha: FiniteFloat
    """Largest probability that the full evaluation contradicts this verdict: this score's share of the cell's alpha."""
    verdict: Literal["not worse", "worse"]
    """Verdict on the full evaluation's score against the baseline's, less the margin."""
    asked: Whole
    """Questions evaluated before the verdict."""
    questions: Whole
    """Questions of the full evaluation."""
    estimate: FiniteFloat
    """Estimated score of the full evaluation."""
    low: FiniteFloat
    """Lower end of its interval, which is wrong with probability alpha at most, at any stopping time."""
    high: FiniteFloat
    """Upper end of the same interval."""
    unlike: tuple[str, ...] = ()
    """Unqualified changes of engine, harness or data since the baseline, which prevent a comparison."""

    @property
    def early(self) -> bool:
        """False if every question was evaluated, so that the verdict is final."""
        return self.asked < self.questions

    def value_in(self, record: Record) -> float | None:
        key = self.benchmark, self.metric
        return next((metric.value for metric in record.metrics if (metric.benchmark, metric.name) == key), None)

    def agrees_with(self, value: float) -> bool:
        """Returns True if a score of the full evaluation is on the same side of the margin as the verdict."""
        loss = self.baseline_value - value if self.higher_is_better else value - self.baseline_value
        return (loss <= self.margin + 1e-9) is (self.verdict == "not worse")


class EarlyVerdict(OfCell):
    """Verdicts on the scores of a cell before all of its questions were evaluated."""

    schema_version: Literal[1] = 1
    """Version of this layout."""
    wanted: str
    """Digest over the scores, predictions, margins and probabilities behind the decision."""
    gate: str
    """Name of the gate."""
    alpha: FiniteFloat
    """Largest probability that the full evaluation contradicts any of these verdicts."""
    scores: tuple[EarlyScore, ...]
    """Verdicts by score."""
    asked: Whole
    """Questions evaluated in total, including the whole last batch."""
    questions: Whole
    """Questions of the full evaluation."""
    requests: dict[str, Whole] = {}
    """Requests of the attempt as counted by the proxy; empty for a foreign endpoint."""
    seconds: dict[str, FiniteFloat] = {}
    """Wall seconds by phase."""
    cost: Cost = Cost()
    """Price of the attempt and of earlier attempts."""
    chip_seconds: FiniteFloat = 0.0
    """Accelerators times seconds of the attempt; 0 on CPU."""
    build: Build = Build()
    """Versions used."""


def decided_words(score: EarlyScore, verdict: EarlyVerdict) -> str:
    """Returns the number of questions behind a score's decision and its error probability, formatted."""
    if not score.early:
        return f"all {how_many(score.questions, 'question')} asked"
    of = "command and baseline"
    if score.alpha < verdict.alpha:
        of += f", for {how_many(len(verdict.scores), 'score')} together"
    return f"decided early at {score.asked:,} of {score.questions:,} questions (α = {verdict.alpha:g} per {of})"


def read_early(cell_uri: str) -> EarlyVerdict | None:
    """Returns the early verdict in a cell's folder; None if it is missing, unreadable or of another cell."""
    verdict = read_model(storage.join(cell_uri, EARLY_NAME), EarlyVerdict)
    return None if verdict is None or misplaced(verdict, cell_uri) else verdict


def spent_on_early(verdict: EarlyVerdict | None) -> Spent:
    """Returns the cost of an early verdict and of earlier attempts; zero without a verdict."""
    return Spent() if verdict is None else spent_on(verdict.cost, chip_seconds=verdict.chip_seconds)


def write_early(cell_uri: str, verdict: EarlyVerdict) -> None:
    """Writes the early verdict of a cell, replacing an earlier verdict."""
    storage.write_bytes(storage.join(cell_uri, EARLY_NAME), verdict.model_dump_json(indent=2).encode())


def find_early(evaluation_path: str) -> Iterator[tuple[str, EarlyVerdict]]:
    """Yields folder of the cell and verdict for each readable early verdict below a folder."""
    for file in storage.list_files(evaluation_path):
        if storage.basename(file.uri) == EARLY_NAME and (verdict := read_early(storage.parent(file.uri))) is not None:
            yield storage.parent(file.uri), verdict


@dataclass(frozen=True)
class Reason:
    """The finding of a rule on a checkpoint, or on one of its scores."""

    checkpoint: str
    rule: str
    found: str
    go: bool
    early: EarlyScore | None = None
    """The early verdict on the score, if it was decided early."""

    def as_dict(self) -> dict[str, Any]:
        content = {name: value for name, value in vars(self).items() if name != "early"}
        return content if self.early is None else {**content, "early": self.early.model_dump()}


@dataclass(frozen=True)
class Verdict:
    """The decision of a gate, with its reasons."""

    gate: str
    reasons: tuple[Reason, ...]

    @property
    def go(self) -> bool:
        """True if there are reasons and all of them are GO."""
        return bool(self.reasons) and all(reason.go for reason in self.reasons)

    @property
    def word(self) -> str:
        return "GO" if self.go else "NO-GO"

    @property
    def refusals(self) -> tuple[Reason, ...]:
        """The reasons for NO-GO."""
        return tuple(reason for reason in self.reasons if not reason.go)

    def about(self, checkpoint: str) -> Verdict:
        """Returns the part on a single checkpoint."""
        return Verdict(self.gate, tuple(reason for reason in self.reasons if reason.checkpoint == checkpoint))

    def as_dict(self) -> dict[str, Any]:
        return {"gate": self.gate, "verdict": self.word, "reasons": [reason.as_dict() for reason in self.reasons]}

    def raise_unless_go(self) -> None:
        """Raises GateRefused if the verdict is NO-GO."""
        if self.go:
            return
        lines = [f"{refusal.checkpoint}: {refusal.rule}: {refusal.found}" for refusal in self.refusals] or [
            "no record to look at"
        ]
        raise GateRefused(
            expected=f"the gate {self.gate} to say GO",
            found=f"NO-GO, for {len(lines)} of {max(1, len(self.reasons))} reasons:\n" + "\n".join(lines),
            remedy="look at these scores; a checkpoint that is meant to pass needs a gate with other rules",
        )


def early_words(score: EarlyScore, verdict: EarlyVerdict) -> str:
    """Returns an early verdict on a score as text, with its limits."""
    ends = f"{measured(score.low)} to {measured(score.high)}"
    text = (
        f"{score.benchmark} · {score.metric}: {decided_words(score, verdict)}: {score.verdict}; "
        f"{measured(score.baseline_value)} → {measured(score.estimate)} ({ends}); "
        f"speaks of {NOT_COVERED}"
    )
    return f"{text}; cannot be compared: {', '.join(score.unlike)}" if score.unlike else text


def agreement(verdict: EarlyVerdict, record: Record) -> Iterator[tuple[EarlyScore, str]]:
    """Yields a comparison with the whole evaluation for each early verdict on a score of the record."""
    for score in verdict.scores:
        if (value := score.value_in(record)) is None:
            continue
        agrees = "agrees with" if score.agrees_with(value) else "contradicts"
        yield (
            score,
            f"{score.benchmark} · {score.metric}: the whole, {measured(value)} over {score.questions:,} "
            f"questions, {agrees} the early verdict, {score.verdict} at {score.asked:,} of them",
        )
