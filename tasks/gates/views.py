"""Verdicts as a terminal table, and as Markdown for CI job summaries and Prefect's UI."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from tasks.gates.reasons import Reason, Verdict
from tasks.reports.texts import as_markdown


def verdict_table(verdict: Verdict) -> Table:
    """Returns a table with a row for each reason, NO-GO first."""
    style = "green" if verdict.go else "red"
    title = Text(f"{verdict.gate}: ").append(verdict.word, style=f"bold {style}")
    table = Table(title=title, box=box.SIMPLE_HEAD, leading=1)
    table.add_column("", no_wrap=True)
    for heading in ("checkpoint", "asked", "found"):
        table.add_column(heading, overflow="fold")
    for reason in _ordered(verdict):
        mark = Text("GO", style="green") if reason.go else Text("NO-GO", style="red")
        table.add_row(mark, *map(Text, (reason.checkpoint, reason.rule, reason.found)))
    return table


def verdict_markdown(verdict: Verdict) -> str:
    """Returns the verdict as a Markdown list, since Prefect's UI does not wrap table cells."""
    lines = [f"## {verdict.word}: {verdict.gate}", ""]
    for reason in _ordered(verdict):
        checkpoint, rule, finding = map(as_markdown, (reason.checkpoint, reason.rule, reason.found))
        lines.append(f"- **{'GO' if reason.go else 'NO-GO'}** {checkpoint}, {rule}: {finding}")
    return "\n".join(lines) + "\n"


def _ordered(verdict: Verdict) -> list[Reason]:
    return sorted(verdict.reasons, key=lambda reason: reason.go)
