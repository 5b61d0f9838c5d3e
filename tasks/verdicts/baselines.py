"""Baselines of a gate: the checkpoints to compare with, their records, and their scores per question.

`previous`, `best` and `mean of last K` are resolved for each score among the recorded checkpoints of the same run with
lower steps that have the score; a checkpoint with a label has all steps before it. A best is chosen on the same
questions as the comparison, so its value is too high by chance; the allowed false alarms are therefore divided by the
number of candidates (union bound over the candidates).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pools.weights.merges import locations_of
from resources.errors import BadInput
from resources.storage import storage
from tasks.records.current import merged_by, told_apart
from tasks.records.details import CheckpointReference
from tasks.records.numbers import measured
from tasks.records.record import FoundRecord, find_records
from tasks.records.search import RecordFilter, records_of_checkpoints
from tasks.records.verdicts import Reason
from tasks.spec.names import how_many
from tasks.verdicts.comparison import Comparison, ScoreKey, by_metric, compare_chosen, mean_metric, metric_in
from tasks.verdicts.gate import EVERYTHING, BaselineRule, BoundRule, EarlierCheckpoints, NamedCheckpoint, OtherRun
from tasks.verdicts.statistics.composition import Composition, QuestionScores, composed, mean_composition

TRAINER_STATE = "trainer_state.json"
"""File of Hugging Face's trainer with the number of tokens read so far, if it counts them."""
Find = Callable[[str], list[FoundRecord]]


@dataclass(frozen=True)
class BaselineScore:
    """A score of a baseline: the records of the checkpoints that are averaged, latest step first."""

    key: ScoreKey
    records: tuple[FoundRecord, ...]
    chosen_from: int = 1
    """Number of checkpoints of which this is the best by this score."""
    note: str = ""
    """The rule that selected it, appended to its name."""

    def questions(self, scores: QuestionScores) -> Composition | str:
        """Returns the score of each question, averaged over the checkpoints, or the reason that scores are unknown."""
        return mean_composition([scores.of(item, metric_in(item, self.key)) for item in self.records])

    def value(self, scores: QuestionScores) -> tuple[float, float | None]:
        """Returns value and standard error over the questions common to all its checkpoints, else as recorded."""
        metric = mean_metric(self.records, self.key)
        questions = self.questions(scores) if len(self.records) > 1 else "as recorded"
        if isinstance(questions, str):
            return metric.value, metric.stderr
        value, interval = composed(questions)
        return value, interval.stderr

    def words(self, scores: QuestionScores) -> str:
        names = [f"{item.record.checkpoint.name} ({item.record.checkpoint.place})" for item in self.records]
        listed = names[0] if len(names) == 1 else f"the mean of {len(names)}, {names[-1]} to {names[0]}"
        value, stderr = self.value(scores)
        return f"{listed}: {measured(value, stderr)}{'' if stderr is None else ' (standard error)'}{self.note}"


@dataclass(frozen=True)
class Baseline:
    """The scores that a rule compares with.

    `earlier` are the (evaluator, benchmark) pairs recorded for earlier checkpoints; None for other kinds of baselines.
    """

    label: str
    scores: Mapping[ScoreKey, BaselineScore]
    earlier: frozenset[tuple[str, str]] | None = None

    def compared(
        self, rule: BaselineRule, records: Sequence[FoundRecord], *, name: str, scores: QuestionScores
    ) -> Comparison:
        """Compares a checkpoint's scores with the baseline.

        Raises `BadInput` if it has no matching scores, records were changed, or settings differ.
        """
        mine = by_metric(records, name, wanted_scores(rule))
        chosen = {
            key: (score.records, _alike(mine[key], {score.records[0].record.evaluation_hash}))
            for key, score in self.scores.items()
            if key in mine
        }
        comparison = compare_chosen(chosen, labels=(self.label, name), anyway=rule.anyway, scores=scores)
        hashes = {item.record.evaluation_hash for item in records}
        return replace(
            comparison,
            only_first=tuple(
                key
                for key, score in self.scores.items()
                if key not in mine and (self.earlier is None or score.records[0].record.evaluation_hash in hashes)
            ),
            only_second=tuple(key for key in mine if key not in self.scores),
        )

    def without(self, key: ScoreKey) -> tuple[str, bool]:
        """Returns the finding for a score that the baseline lacks, and True if it passes."""
        if self.earlier is None:
            return f"{key}: the baseline has no such score", False
        if (key.evaluator, key.benchmark) in self.earlier:
            return f"{key}: recorded for earlier checkpoints, none of which has this score", False
        return f"{key}: no earlier checkpoint was asked this, so there is nothing to compare with", True


def wanted_scores(rule: BoundRule | BaselineRule) -> RecordFilter:
    """Returns the filter for the records and metrics of a rule."""
    evaluators = (rule.evaluator,) if rule.evaluator else ()
    metrics = () if rule.metric == EVERYTHING else (rule.metric,)
    return RecordFilter(evaluators=evaluators, benchmarks=(rule.benchmark,), metrics=metrics, latest=False)


def baseline_of(
    rule: BaselineRule,
    checkpoint: CheckpointReference,
    *,
    evaluation_path: str,
    hashes: Collection[str] = (),
    find: Find = find_records,
) -> Baseline | Reason:
    """Returns the baseline of a rule for a checkpoint, which needs no record yet, or a reason if there is none.

    Baseline records are preferred that have one of `hashes`, those of the checkpoint's measurements, done or planned.
    """
    try:
        match rule.baseline:
            case NamedCheckpoint(text):
                [records] = records_of_checkpoints([text], evaluation_path=evaluation_path)
                return _single(rule, records, hashes)
            case OtherRun() as other:
                records, note = _nearest(rule, other, checkpoint, other.path or evaluation_path, find)
                return _single(rule, records, hashes, note=note)
            case EarlierCheckpoints() as selection:
                earlier = _earlier(checkpoint, find(storage.join(evaluation_path, checkpoint.run)))
                if not earlier:
                    return Reason(checkpoint.name, rule.words, "first checkpoint, nothing before it", go=True)
                return _of_earlier(rule, selection, earlier, hashes)
    except BadInput as error:
        return Reason(checkpoint.name, rule.words, f"cannot be compared: {error.found}", go=False)


def _single(rule: BaselineRule, records: Sequence[FoundRecord], hashes: Collection[str], *, note: str = "") -> Baseline:
    having = by_metric(records, rule.not_worse_than, wanted_scores(rule))
    scores = {key: BaselineScore(key, (_alike(of_key, hashes),), note=note) for key, of_key in having.items()}
    return Baseline(rule.not_worse_than, scores)


def _alike(records: Sequence[FoundRecord], hashes: Collection[str]) -> FoundRecord:
    return next((item for item in records if item.record.evaluation_hash in hashes), records[0])


def _earlier(checkpoint: CheckpointReference, records: Iterable[FoundRecord]) -> list[FoundRecord]:
    of_name = [item for item in records if item.record.checkpoint.run == checkpoint.run]
    apart = told_apart([checkpoint, *(item.record.checkpoint for item in of_name)])
    run = apart(checkpoint).run
    steps = (item for item in of_name if item.record.checkpoint.label is None)
    lower = (item for item in steps if checkpoint.label or item.record.checkpoint.step < checkpoint.step)
    return [item for item in lower if apart(item.record.checkpoint).run == run]


def _of_earlier(
    rule: BaselineRule, selection: EarlierCheckpoints, earlier: Sequence[FoundRecord], hashes: Collection[str]
) -> Baseline:
    try:
        having = by_metric(earlier, rule.not_worse_than, wanted_scores(rule))
    except BadInput:  # no succeeded record
        having = {}
    asked = {
        (item.record.evaluator, name)
        for item in earlier
        for name in (*item.record.benchmarks, *(metric.benchmark for metric in item.record.metrics))
    }
    scores = {key: _among(selection, key, records, hashes) for key, records in having.items()}
    return Baseline(rule.not_worse_than, scores, frozenset(asked))


def _among(
    selection: EarlierCheckpoints, key: ScoreKey, records: Sequence[FoundRecord], hashes: Collection[str]
) -> BaselineScore:
    by_step: dict[int, list[FoundRecord]] = defaultdict(list)
    for item in records:
        by_step[item.record.checkpoint.step].append(item)
    latest_first = [_alike(by_step[step], hashes) for step in sorted(by_step, reverse=True)]
    if selection.take == "best" and (best := _best(key, latest_first, hashes)) is not None:
        return best
    taken = tuple(latest_first[: selection.most])
    note = f"; {selection.most} were asked for, more there are not" if len(taken) < selection.most else ""
    return BaselineScore(key, taken, note=note)


def _best(key: ScoreKey, latest_first: Sequence[FoundRecord], hashes: Collection[str]) -> BaselineScore | None:
    metrics = [(metric_in(item, key), item) for item in latest_first if item.record.evaluation_hash in hashes]
    valued = [(metric, item) for metric, item in metrics if math.isfinite(metric.value)]
    if not valued or valued[0][0].higher_is_better is None:
        return None
    sign = 1 if valued[0][0].higher_is_better else -1
    _, item = max(valued, key=lambda pair: sign * pair[0].value)
    others = len(latest_first) - len(valued)
    note = f", the best of {len(valued)} by these questions, so too high by chance" if len(valued) > 1 else ""
    note += f" ({how_many(others, 'checkpoint')} with other settings not looked at)" if others else ""
    return BaselineScore(key, (item,), len(valued), note)


def _nearest(
    rule: BaselineRule, other: OtherRun, checkpoint: CheckpointReference, path: str, find: Find
) -> tuple[list[FoundRecord], str]:
    records = [item for item in find(storage.join(path, other.run)) if item.record.checkpoint.run == other.run]
    kind = merged_by(checkpoint)
    records = [item for item in records if item.record.succeeded and merged_by(item.record.checkpoint) == kind]
    meant = {id(record) for record in wanted_scores(rule).select([item.record for item in records])}
    by_step: dict[int, list[FoundRecord]] = defaultdict(list)
    for item in records:
        if id(item.record) in meant and item.record.checkpoint.label is None:
            by_step[item.record.checkpoint.step].append(item)
    apart = told_apart([item.record.checkpoint for item in records])
    if len(runs := {apart(item.record.checkpoint).run for item in records}) > 1:
        raise _not_found(rule, f"several runs of that name: {', '.join(sorted(runs))}")
    positions = {step: _reached(rule, other, items[0].record.checkpoint) for step, items in by_step.items()}
    known = {step: reached for step, reached in positions.items() if reached is not None}
    if not known:
        raise _not_found(
            rule, f"no succeeded record of {other.run}{kind} below {path}" if not positions else _no_tokens(other.run)
        )
    position = _reached(rule, other, checkpoint)
    if position is None:
        unplaced = f"{checkpoint.name} has no step" if other.at == "step" else _no_tokens(checkpoint.run)
        raise _not_found(rule, unplaced)
    step = min(known, key=lambda step: (abs(known[step] - position), -step))
    far = abs(known[step] - position)
    unit = "step" if other.at == "step" else "tokens"
    if far > rule.nearest_within * position:
        raise _not_found(
            rule,
            f"the nearest checkpoint of {other.run} is at {unit} {known[step]:,.0f}, this checkpoint at "
            f"{position:,.0f}: further than nearest_within, {rule.nearest_within:.1%}",
        )
    return by_step[step], "" if far == 0 else f"; at {unit} {known[step]:,.0f}, this checkpoint at {position:,.0f}"


def _not_found(rule: BaselineRule, problem: str) -> BadInput:
    return BadInput(expected=f"a baseline {rule.not_worse_than}", found=problem, remedy="name another baseline")


def _no_tokens(run: str) -> str:
    return f"nothing says how many tokens {run} had read: no tokens_per_step in the rule, and none in {TRAINER_STATE}"


def _reached(rule: BaselineRule, other: OtherRun, checkpoint: CheckpointReference) -> float | None:
    if other.at == "step":
        return float(checkpoint.step) if checkpoint.label is None else None
    if checkpoint.label is None and (per_step := rule.tokens_per_step.get(checkpoint.run)) is not None:
        return per_step * checkpoint.step
    try:
        state = json.loads(storage.read_bytes(storage.join(locations_of(checkpoint.uri)[-1], TRAINER_STATE)))
        seen = state["num_input_tokens_seen"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return float(seen) if isinstance(seen, int) and seen > 0 else None  # 0 if the trainer does not count tokens
