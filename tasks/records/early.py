"""Early verdicts: what was decided of a cell's scores before all of its questions were asked.

They lie beside where the record would, as `early.json`, and are no records: nothing that reads scores reads them, and
the report shows them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import AwareDatetime, FiniteFloat, ValidationError

from resources.errors import IrregularFile
from resources.storage import storage
from tasks.records.builds import Build
from tasks.records.cost import Cost, Spent, spent_on
from tasks.records.details import Part, PathPart, Whole, misplaced
from tasks.records.record import CheckpointReference, Record
from tasks.spec.names import how_many

EARLY_NAME = "early.json"
ANSWERED_NAME = "early.jsonl"
"""File in an attempt's folder with the questions that were asked, in that order, their scores, and their batches."""
NOT_COVERED = "the whole of these questions only: neither training's jitter nor other questions"
"""The reach of a verdict, in words."""


class EarlyScore(Part):
    """The verdict on one score against a baseline, on the metric's own scale."""

    benchmark: str
    """Name it is published under."""
    metric: str
    """Metric as the harness calls it."""
    rule: str
    """Rule of the gate that asks for it, in words."""
    baseline: str
    """Checkpoints that it is compared with."""
    baseline_value: FiniteFloat
    """Their score, or its mean."""
    margin: FiniteFloat
    """The loss that is not worse."""
    higher_is_better: bool
    """Direction of improvement."""
    alpha: FiniteFloat
    """Largest probability that the whole contradicts this verdict: this score's part of the verdict's."""
    verdict: Literal["not worse", "worse"]
    """The whole's score against the baseline's, less the margin."""
    asked: Whole
    """Questions of it that were asked until the verdict was known."""
    questions: Whole
    """Questions of the whole."""
    estimate: FiniteFloat
    """The whole's score, estimated."""
    low: FiniteFloat
    """Lower end of its interval, which is wrong with probability alpha at most, whenever asking was stopped."""
    high: FiniteFloat
    """Upper end, likewise."""
    unlike: tuple[str, ...] = ()
    """Changes of engine, harness or data since the baseline that nothing qualifies: it cannot be compared then."""

    @property
    def early(self) -> bool:
        """False if every question was asked, so that the verdict is that of the whole."""
        return self.asked < self.questions

    def value_in(self, record: Record) -> float | None:
        """The score in the record of a whole evaluation; None where that has none."""
        wanted = self.benchmark, self.metric
        return next((metric.value for metric in record.metrics if (metric.benchmark, metric.name) == wanted), None)

    def agrees_with(self, value: float) -> bool:
        """True if a score of the whole is on the side of the margin that the verdict says."""
        loss = self.baseline_value - value if self.higher_is_better else value - self.baseline_value
        return (loss <= self.margin + 1e-9) is (self.verdict == "not worse")


class EarlyVerdict(Part):
    """Verdicts on the scores of one cell, of which not all questions were asked."""

    schema_version: Literal[1] = 1
    """Version of this layout."""
    cell: PathPart
    """Name of the cell's folder."""
    checkpoint: CheckpointReference
    """The model state that was asked."""
    evaluator: PathPart
    """The harness."""
    benchmarks: tuple[str, ...]
    """The benchmarks, as they are published."""
    evaluation_hash: str
    """Over everything but the checkpoint that can change a score."""
    wanted: str
    """Digest over the scores, predictions, margins and probabilities that it was decided with."""
    gate: str
    """Name of the gate."""
    alpha: FiniteFloat
    """Largest probability that the whole contradicts any of these verdicts."""
    scores: tuple[EarlyScore, ...]
    """The verdicts."""
    asked: Whole
    """Questions that were asked in all, the last batch whole."""
    questions: Whole
    """Questions of the whole evaluation."""
    requests: dict[str, Whole] = {}
    """Requests of the attempt as the proxy counted them; empty for an endpoint of others."""
    seconds: dict[str, FiniteFloat] = {}
    """Wall seconds by phase."""
    cost: Cost | None = None
    """Price of the attempt, and of those before it."""
    chip_seconds: FiniteFloat = 0.0
    """Accelerators times seconds of the attempt; 0 on CPU."""
    build: Build = Build()
    """Versions of all that was asked with."""
    flow_run: str | None = None
    """Name of the flow run that wrote it."""
    attempt: PathPart
    """Folder beside it that holds the harness's own output."""
    created: AwareDatetime
    """Time it was written, UTC."""


def decided_words(score: EarlyScore, verdict: EarlyVerdict) -> str:
    """The number of questions that a score was decided by, and with what error, in words."""
    if not score.early:
        return f"all {how_many(score.questions, 'question')} asked"
    of = "one command and baseline"
    if score.alpha < verdict.alpha:
        of += f", for {how_many(len(verdict.scores), 'score')} together"
    return f"decided early at {score.asked:,} of {score.questions:,} questions (α = {verdict.alpha:g} of {of})"


def read_early(cell_uri: str) -> EarlyVerdict | None:
    """The early verdict on a cell; None if there is none in its folder, none that can be read, or another cell's."""
    try:
        found = EarlyVerdict.model_validate_json(storage.read_bytes(storage.join(cell_uri, EARLY_NAME)))
    except (FileNotFoundError, IrregularFile, ValidationError):
        return None
    return None if misplaced(found, cell_uri) else found


def spent_on_early(verdict: EarlyVerdict | None) -> Spent:
    """The cost of what was asked for an early verdict, and before; nothing without one."""
    if verdict is None or verdict.cost is None:
        return Spent()
    by_others = verdict.cost.replica_seconds is None
    return spent_on(verdict.cost, chip_seconds=verdict.chip_seconds, by_others=by_others)


def write_early(cell_uri: str, verdict: EarlyVerdict) -> None:
    """Writes the early verdict of a cell over an earlier one."""
    storage.write_bytes(storage.join(cell_uri, EARLY_NAME), verdict.model_dump_json(indent=2).encode())


def find_early(evaluation_path: str) -> Iterator[tuple[str, EarlyVerdict]]:
    """Every readable early verdict below a folder, with the folder of its cell."""
    for file in storage.list_files(evaluation_path):
        if storage.basename(file.uri) == EARLY_NAME and (found := read_early(storage.parent(file.uri))) is not None:
            yield storage.parent(file.uri), found
