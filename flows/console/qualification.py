"""The verdict on a change of package versions, as a table."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from tasks.records.builds import Qualification, QualifiedBenchmark, QualifiedMetric, Verdict
from tasks.records.numbers import NOTHING, measured
from tasks.spec.evaluators import evaluator_title

_COLOURS: dict[Verdict, str] = {"identical": "green", "within noise": "green", "different": "red"}


def qualification_table(qualification: Qualification) -> Table:
    """Returns a table with a line per metric: both values, interval of the difference, differing samples, verdict."""
    before, after = qualification.compared
    title = Text(f"{qualification.checkpoint.name}: {before} → {after}")
    notes = Text("\n".join(_notes(qualification)))
    table = Table(title=title, box=box.SIMPLE_HEAD, leading=1, caption=notes, caption_justify="left")
    table.add_column(Text("benchmark\nmetric"), overflow="fold")
    for heading in ("before\nafter", "difference at most\np, adjusted", "questions\ndiffering"):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    table.add_column(Text("verdict"), no_wrap=True)
    for benchmark in qualification.benchmarks:
        for metric in benchmark.metrics:
            table.add_row(
                Text(f"{evaluator_title(benchmark.evaluator)}: {benchmark.benchmark}\n{metric.name}"),
                f"{measured(metric.before)}\n{measured(metric.after)}",
                f"{_bound(metric)}\n{NOTHING if metric.p is None else f'{metric.p:.3f}'}",
                f"{benchmark.questions:,}\n{_differing(benchmark):,}",
                Text(metric.verdict, _COLOURS[metric.verdict]),
            )
    return table


def _bound(metric: QualifiedMetric) -> str:
    if metric.verdict == "identical":
        return "none"
    return "unknown" if metric.bound is None else f"{metric.bound:.4g}"


def _differing(benchmark: QualifiedBenchmark) -> int:
    most = max(
        benchmark.other_prompts, benchmark.other_outputs, benchmark.other_scores, benchmark.other_log_likelihoods
    )
    return most + benchmark.only_before + benchmark.only_after


def _notes(qualification: Qualification) -> list[str]:
    changes = dict.fromkeys(
        change for benchmark in qualification.benchmarks for change in benchmark.before.changes(benchmark.after)
    )
    notes = [f"Changed: {', '.join(changes)}." if changes else "Nothing is known to have changed."]
    for benchmark in qualification.benchmarks:
        alone = f", {benchmark.only_before:,} only before, {benchmark.only_after:,} only after"
        shift = "" if not benchmark.largest_shift else f" (by {benchmark.largest_shift:.2g} at most)"
        notes.append(
            f"{benchmark.benchmark}: {benchmark.verdict}; other prompts {benchmark.other_prompts:,}, outputs "
            f"{benchmark.other_outputs:,}, log-likelihoods {benchmark.other_log_likelihoods:,}{shift}, "
            f"scores {benchmark.other_scores:,} of {benchmark.questions:,}"
            f"{alone if benchmark.only_before or benchmark.only_after else ''}."
        )
        if benchmark.verdict == "different" and benchmark.evidence:
            notes.append(f"  for example {benchmark.evidence[0]}")
    notes.append(f"Different: proven (adjusted p below 0.05), or by more than {qualification.margin:g}.")
    return notes
