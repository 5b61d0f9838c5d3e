"""Compositions: the questions behind a published value, which is a mean, a weighted mean or a ratio of sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from resources.errors import StorageError
from tasks.records.record import FoundRecord, Metric
from tasks.records.samples import KeptSamples, Question, Questions, is_close, kept_samples, ratio, scale_of, scores_in
from tasks.records.verification import Verification, verified_with
from tasks.verdicts.statistics.intervals import (
    Interval,
    RatioForm,
    Stratum,
    mean_interval,
    normal_interval,
    ratio_interval,
    ratio_value,
)
from tasks.verdicts.statistics.paired import Finding, PairedStratum, compare_pairs, paired_ratio

_SCALES = (1.0, 100.0)


class Asked(NamedTuple):
    """A question's part in a metric: sum and divisor, cluster, digest of the prompt, number of repeats."""

    sum: float
    size: float
    cluster: str
    prompt: bytes
    repeats: int


@dataclass(frozen=True)
class Composition:
    """The questions of a value by benchmark and name, the weights of the benchmarks, and the scale of the value."""

    asked: Mapping[str, Mapping[str, Asked]]
    weights: Mapping[str, float]
    scale: float = 1.0
    form: RatioForm | None = None
    left_out: int = 0
    """For a mean of several values: questions that are missing in some of them."""

    @property
    def is_plain(self) -> bool:
        """True for a mean over independent questions of a single benchmark."""
        return self.clusters is None and len(self.asked) == 1 and self.form is None

    @property
    def clusters(self) -> int | None:
        """Number of clusters, with repeats of a question counted once; None if all questions are independent."""
        every = [question for asked in self.asked.values() for question in asked.values()]
        clusters = len({question.cluster for question in every})
        return clusters if clusters < sum(question.repeats for question in every) else None


class Paired(NamedTuple):
    """Two values over their common questions, their difference, and the numbers of left-out questions."""

    finding: Finding
    values: tuple[float, float]
    pairs: int
    only_first: int
    only_second: int
    other_prompts: int


def composition_of(metric: Metric, questions: Questions, metrics: Iterable[Metric]) -> Composition | str:
    """Returns the questions in its record's samples that make a metric's value, or the reason why they are unknown."""
    own = questions.get(metric.benchmark, ())
    if parts := [question.ratios[metric.name] for question in own if metric.name in question.ratios]:
        form: RatioForm = "bits" if metric.name.startswith("bits_per") else "exp"
        if is_close(ratio(metric.name, parts), metric.value):
            return Composition({metric.benchmark: _asked(metric.name, own)}, {metric.benchmark: 1.0}, form=form)
    if scores := scores_in(metric, own):
        scale = scale_of(metric, scores)
        if scale is None:
            return "its value is not the mean over single questions"
        return Composition({metric.benchmark: _asked(metric.name, own)}, {metric.benchmark: 1.0}, scale)
    for weights in _weights(metric, questions, {m.benchmark: m for m in metrics if m.name == metric.name}):
        if composition := _group(metric, questions, weights):
            return composition
    return "single questions have no score in it"


def mean_composition(values: Sequence[Composition | str]) -> Composition | str:
    """Returns the mean of several values over the questions common to all, or the reason why there is none.

    Questions with differing prompts keep no prompt digest. For ratios, the sums are averaged: the mean of perplexities
    is geometric.
    """
    compositions = [each for each in values if not isinstance(each, str)]
    if len(compositions) < len(values):
        return next(each for each in values if isinstance(each, str))
    first, *others = compositions
    if not others:
        return first
    if any((c.form, c.scale, c.asked.keys()) != (first.form, first.scale, first.asked.keys()) for c in others):
        return "they are made of other parts"
    asked = {
        part: {
            name: _mean_asked([composition.asked[part][name] for composition in compositions])
            for name in questions
            if all(name in composition.asked[part] for composition in others)
        }
        for part, questions in first.asked.items()
    }
    if not all(asked.values()):
        return "they have no question in common"
    every = {(part, name) for each in compositions for part, questions in each.asked.items() for name in questions}
    return replace(first, asked=asked, left_out=len(every) - sum(map(len, asked.values())))


def _mean_asked(each: Sequence[Asked]) -> Asked:
    prompts = {question.prompt for question in each}
    return each[0]._replace(
        sum=math.fsum(question.sum for question in each) / len(each),
        size=math.fsum(question.size for question in each) / len(each),
        prompt=prompts.pop() if len(prompts) == 1 else b"",
    )


def composed(whole: Composition) -> tuple[float, Interval]:
    """Returns the value computed from the questions, and its interval."""
    return _value(whole, {part: list(asked.values()) for part, asked in whole.asked.items()}), _interval(whole)


def part_of(whole: Composition, includes: Callable[[str, str], bool]) -> Composition | None:
    """Restricts a composition to the questions for which `includes(benchmark, name)` is True; None if there are none.

    The weights of benchmarks without questions go to the others in proportion.
    """
    kept = {part: {name: q for name, q in asked.items() if includes(part, name)} for part, asked in whole.asked.items()}
    kept = {part: asked for part, asked in kept.items() if asked}
    weight = math.fsum(whole.weights[part] for part in kept)
    if not kept or weight <= 0.0:
        return None
    return replace(whole, asked=kept, weights={part: whole.weights[part] / weight for part in kept})


def with_interval(metric: Metric, questions: Questions, metrics: Iterable[Metric]) -> Metric:
    """Returns a metric with 95 % interval, and the standard error given by clusters, weights or ratios."""
    composition = composition_of(metric, questions, metrics)
    if isinstance(composition, str):
        interval = normal_interval(metric.value, metric.stderr or None)
        return metric.model_copy(update={"low": interval.low, "high": interval.high})
    interval = _interval(composition)
    keeps = composition.is_plain and metric.stderr is not None
    stderr = metric.stderr if keeps or interval.stderr is None else interval.stderr
    low, high = (None if end is None or not math.isfinite(end) else end for end in (interval.low, interval.high))
    return metric.model_copy(update={"stderr": stderr, "low": low, "high": high})


def compare_compositions(first: Composition, second: Composition) -> Paired | str:
    """Tests the difference of two values on their common questions, or returns the reason why it cannot."""
    if (first.form, first.scale, first.asked.keys()) != (second.form, second.scale, second.asked.keys()):
        return "they are made of other parts"
    names = {part: sorted(asked.keys() & second.asked[part].keys()) for part, asked in first.asked.items()}
    pairs = sum(map(len, names.values()))
    if apart := [part for part, common in names.items() if not common]:
        return f"they have no question of {apart[0]} in common"
    if pairs < 2:
        return "they have a single question in common, which is too few for a test"
    both = {part: [(first.asked[part][n], second.asked[part][n]) for n in common] for part, common in names.items()}
    clusters = {part: [pair[1].cluster for pair in matched] for part, matched in both.items()}
    sides = [{part: [pair[side] for pair in matched] for part, matched in both.items()} for side in (0, 1)]
    if first.form is not None:
        before, after = ([(q.sum, q.size) for asked in side.values() for q in asked] for side in sides)
        [alone] = clusters.values()
        finding = paired_ratio(before, after, alone, form=first.form)
    else:
        scores = [{part: [q.sum for q in asked] for part, asked in side.items()} for side in sides]
        strata = [PairedStratum(scores[0][p], scores[1][p], clusters[p], first.weights[p]) for p in both]
        finding = compare_pairs(strata).scaled(first.scale)
    matches = list(chain.from_iterable(both.values()))
    return Paired(
        finding,
        (_value(first, sides[0]), _value(first, sides[1])),
        pairs=pairs,
        only_first=sum(map(len, first.asked.values())) - pairs + first.left_out,
        only_second=sum(map(len, second.asked.values())) - pairs,
        other_prompts=sum(question.prompt != other.prompt for question, other in matches),
    )


def _value(like: Composition, asked: Mapping[str, Sequence[Asked]]) -> float:
    means = {part: math.fsum(q.sum for q in group) / math.fsum(q.size for q in group) for part, group in asked.items()}
    mean = math.fsum(like.weights[part] * mean for part, mean in means.items())
    return like.scale * mean if like.form is None else ratio_value(mean, like.form)


def _interval(composition: Composition) -> Interval:
    if composition.form is not None:
        [asked] = composition.asked.values()
        sums = [(question.sum, question.size) for question in asked.values()]
        return ratio_interval(sums, [question.cluster for question in asked.values()], form=composition.form)
    strata = [
        Stratum([q.sum for q in asked.values()], [q.cluster for q in asked.values()], composition.weights[part])
        for part, asked in composition.asked.items()
    ]
    return mean_interval(strata).scaled(composition.scale)


def _asked(name: str, questions: Sequence[Question]) -> dict[str, Asked]:
    repeats: dict[str, list[Question]] = {}
    for question in questions:
        if name in question.ratios or math.isfinite(question.scores.get(name, math.nan)):
            repeats.setdefault(question.id, []).append(question)
    return {
        identity: Asked(*_sum(name, asked), asked[0].cluster or f"\0{identity}", asked[0].prompt, len(asked))
        for identity, asked in repeats.items()
    }


def _sum(name: str, repeats: Sequence[Question]) -> tuple[float, float]:
    if ratios := [question.ratios[name] for question in repeats if name in question.ratios]:
        return math.fsum(pair[0] for pair in ratios), math.fsum(pair[1] for pair in ratios)
    return math.fsum(question.scores[name] for question in repeats) / len(repeats), 1.0


def _weights(metric: Metric, questions: Questions, others: Mapping[str, Metric]) -> Iterable[dict[str, float]]:
    if metric.parts:
        yield _leaves(metric, others)
        return
    parts = [b for b, asked in questions.items() if b.startswith(f"{metric.benchmark}_") and scores_in(metric, asked)]
    sizes = {part: len({question.id for question in questions[part]}) for part in parts}
    yield {part: size / sum(sizes.values()) for part, size in sizes.items()}
    yield {part: 1 / len(parts) for part in parts}


def _leaves(metric: Metric, others: Mapping[str, Metric]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for part, weight in metric.parts.items():
        inner = others.get(part)
        shares = _leaves(inner, others) if inner and inner.parts and part != metric.benchmark else {part: 1.0}
        for leaf, share in shares.items():
            weights[leaf] = weights.get(leaf, 0.0) + weight * share
    return weights


def _group(metric: Metric, questions: Questions, weights: Mapping[str, float]) -> Composition | None:
    asked = {part: _asked(metric.name, questions.get(part, ())) for part in weights}
    if not asked or not all(asked.values()) or any(q.size != 1.0 for part in asked.values() for q in part.values()):
        return None
    mean = _value(Composition(asked, weights), {part: list(by_name.values()) for part, by_name in asked.items()})
    scale = next((scale for scale in _SCALES if is_close(mean * scale, metric.value)), None)
    return None if scale is None else Composition(asked, weights, scale)


class QuestionScores:
    """Reads scores from the samples of records; each file is read once."""

    def __init__(self) -> None:
        self._read: dict[tuple[str, str], KeptSamples | StorageError | None] = {}

    def of(self, entry: FoundRecord, metric: Metric) -> Composition | str:
        """Returns the questions behind a metric, or the reason why they are unknown."""
        kept = self._kept(entry)
        if kept is None:
            return "no samples were kept"
        if isinstance(kept, StorageError):
            return f"its samples cannot be read: {kept.found}"
        return composition_of(metric, kept.questions, entry.record.metrics)

    def verified(self, entry: FoundRecord) -> Verification:
        """Verifies a record by its own digests and its samples."""
        return verified_with(entry, self._kept(entry))

    def _kept(self, entry: FoundRecord) -> KeptSamples | StorageError | None:
        place = entry.cell_uri, entry.record.attempt
        if place not in self._read:
            try:
                self._read[place] = kept_samples(entry)
            except StorageError as error:
                self._read[place] = error
        return self._read[place]
