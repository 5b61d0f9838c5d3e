"""Views of a comparison: a table of 80 characters, and JSON for scripts."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tasks.records.numbers import NOTHING, arrow, measured, signed
from tasks.spec.evaluators import evaluator_title
from tasks.spec.names import how_many
from tasks.verdicts.comparison import SIGNIFICANT, ComparedMetric, Comparison, Pairing, Verdict
from tasks.verdicts.statistics.intervals import CONFIDENCE
from tasks.verdicts.statistics.paired import Adjustment, TestName

_VERDICTS: dict[Verdict, tuple[str, str]] = {
    "better": ("better", "green"),
    "worse": ("worse", "red"),
    "different": ("different", ""),
    "no clear difference": ("not clear", ""),
    "not tested": ("not tested", ""),
}
_TESTS: dict[TestName, str] = {
    "McNemar, mid-p": "McNemar",
    "paired t": "paired t",
    "paired ratio": "ratio",
    "z, unpaired": "unpaired z",
    "none": NOTHING,
}
_EXPLAINED: dict[TestName, str] = {
    "McNemar, mid-p": "the mid-p, on questions that only one of them got right, and a score interval",
    "paired t": "a t test of paired differences",
    "paired ratio": "a t test of what each document adds to both",
}
_ADJUSTMENTS: dict[Adjustment, str] = {
    "bh": "Benjamini–Hochberg: of the differences called so, 1 in 20 is false at most, on average",
    "holm": "Holm: the chance that any difference called so is false is 1 in 20 at most",
    "none": "not adjusted: 1 test in 20 finds a difference where there is none",
}
_NAME_CHARACTERS = 14  # smallest width of the first column


def comparison_table(comparison: Comparison) -> Table:
    """Returns a table with a row per metric: both values, difference and interval, test, and verdict."""
    several = len({metric.evaluator for metric in comparison.metrics}) > 1
    title = Text(f"{comparison.second} against {comparison.first}")
    notes = Text("\n".join(_notes(comparison)))
    table = Table(title=title, box=box.SIMPLE_HEAD, leading=1, caption=notes, caption_justify="left")
    table.add_column(Text("benchmark\nmetric"), overflow="fold", min_width=_NAME_CHARACTERS)
    for heading in (
        f"{_short(comparison.first)}\n{_short(comparison.second)}",
        "difference\n95 % interval",
        "n\ntest",
        "p\nadjusted\nverdict",
    ):
        table.add_column(Text(heading), justify="right", overflow="fold")
    for metric in comparison.metrics:
        names = [evaluator_title(metric.evaluator)] if several else []
        names += [metric.benchmark, metric.metric + arrow(metric.higher_is_better)]
        table.add_row(
            Text("\n".join(names)),
            f"{measured(metric.first)}\n{measured(metric.second)}",
            f"{signed(metric.finding.difference, like=metric.finding.difference)}\n{_interval(metric)}",
            f"{_questions(metric)}\n{_TESTS[metric.finding.test]}",
            Text(f"{_p(metric.finding.p)}\n{_p(metric.adjusted_p)}\n").append(*_VERDICTS[metric.verdict]),
        )
    return table


def _notes(comparison: Comparison) -> list[str]:
    metrics = comparison.metrics
    notes = [f"Adjusted p below {SIGNIFICANT:g} is called a difference. {_ADJUSTMENTS[comparison.adjustment]}."]
    tests = {metric.finding.test for metric in metrics}
    notes += [f"{_TESTS[test]}: {words}." for test, words in _EXPLAINED.items() if test in tests]
    for metric in metrics:
        units = metric.finding.clusters
        if metric.pairing and units is not None and units < metric.pairing.pairs:
            notes.append(f"{metric.benchmark} · {metric.metric}: tested by {units:,} clusters of questions.")
    for why in dict.fromkeys(metric.unpaired_because for metric in metrics if metric.unpaired_because):
        concerned = [f"{metric.benchmark} · {metric.metric}" for metric in metrics if metric.unpaired_because == why]
        notes.append(f"Not paired ({why}): {', '.join(concerned)}.")
    for metric in metrics:
        alone = metric.pairing
        if alone and (alone.only_first or alone.only_second):
            notes.append(
                f"{metric.benchmark} · {metric.metric}: {how_many(alone.only_first, 'question')} only in "
                f"{comparison.first}, {alone.only_second:,} only in {comparison.second}, left out."
            )
    for benchmark, differences in comparison.differences.items():
        notes += [f"Not measured alike, {benchmark}: {difference}." for difference in differences]
    for benchmark, changes in comparison.qualified.items():
        notes.append(f"{benchmark}: {', '.join(changes)}.")
    notes += [f"{result.words}." for result in comparison.unverified]
    for label, only in ((comparison.first, comparison.only_first), (comparison.second, comparison.only_second)):
        if only:
            notes.append(f"Only {label} has {', '.join(map(str, only))}.")
    return notes


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the whole comparison as JSON values."""
    return {
        "first": comparison.first,
        "second": comparison.second,
        "adjustment": comparison.adjustment,
        "significant_below": SIGNIFICANT,
        "confidence": CONFIDENCE,
        "metrics": [_metric_json(metric) for metric in comparison.metrics],
        "only_first": list(map(str, comparison.only_first)),
        "only_second": list(map(str, comparison.only_second)),
        "qualified": {benchmark: list(changes) for benchmark, changes in comparison.qualified.items()},
        "unverified": [result.words for result in comparison.unverified],
        "measured_differently": {benchmark: list(reasons) for benchmark, reasons in comparison.differences.items()},
    }


def _metric_json(metric: ComparedMetric) -> dict[str, Any]:
    own = {**asdict(metric), "recorded": list(metric.recorded), "n": list(metric.n)}
    pairing, finding = own.pop("pairing"), own.pop("finding")
    finding["freedom"] = finding["freedom"] if math.isfinite(finding["freedom"]) else None
    counts = pairing or dict.fromkeys(field.name for field in fields(Pairing))
    return {**own, **counts, **finding, "verdict": metric.verdict}


def _short(label: str) -> str:
    return label if len(label) <= 14 else f"{label[:5]}…{label[-8:]}"


def _interval(metric: ComparedMetric) -> str:
    low, high, like = metric.finding.low, metric.finding.high, metric.finding.difference
    return NOTHING if low is None or high is None else f"{signed(low, like=like)} … {signed(high, like=like)}"


def _questions(metric: ComparedMetric) -> str:
    if metric.pairing:
        return f"{metric.pairing.pairs:,}"
    return f"{metric.n[0]:,}" if metric.n[0] == metric.n[1] else f"{metric.n[0]:,} and {metric.n[1]:,}"


def _p(p: float | None) -> str:
    if p is None or not math.isfinite(p):
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
