"""Texts about records and verdicts: provenance, judges, verdicts of gates, addresses of the harness's own pages."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from rich import box
from rich.table import Table
from rich.text import Text

from resources.storage import storage
from tasks.records.current import how_merged
from tasks.records.numbers import NOTHING
from tasks.records.record import Counts, Record, integrity
from tasks.records.search import found_below
from tasks.records.verdicts import Reason, Verdict
from tasks.spec.evaluators import evaluator_title

_ESCAPED_IN_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\|*<&[!`"})
_JUDGED = ("judge", "annotator")  # shown separately


def judge_of(record: Record) -> str | None:
    """Returns the judge that compared the answers, and its settings; None without a judge."""
    options = record.evaluation.get("evaluator")
    judge = options.get("judge") if isinstance(options, dict) else None
    if not isinstance(judge, dict):
        return None
    name = judge.get("model") or "the checkpoint itself"
    place = judge.get("base_url") or (f"pool {judge['pool_name']}" if judge.get("pool_name") else "the same pool")
    asked = f", asked as {judge['annotator']}" if judge.get("annotator") else ""
    return f"{name} at {place}{asked}" if judge.get("base_url") else f"{name} in {place}{asked}"


def counted(counts: Counts | None) -> str:
    """Formats the three counts, with = or ≠ between them."""
    if counts is None:
        return NOTHING
    first = "=" if counts.requested == counts.answered else "≠"
    second = "=" if counts.answered == counts.scored else "≠"
    return f"{counts.requested:,} {first} {counts.answered:,} {second} {counts.scored:,}"


def links_of(record: Record, *, records_at: str | None, page: str | None) -> list[tuple[str, str | None]]:
    """Returns the harness's pages by title, with the address relative to the report, or None if unknown."""
    if records_at is None or page is None:
        return [(title, None) for title in record.links]
    cell = found_below(records_at, record).cell_uri
    return [(title, _address(storage.join(cell, place), page)) for title, place in record.links.items()]


def _address(target: str, page: str) -> str | None:
    if storage.is_local(target) != storage.is_local(page):
        return None
    if storage.is_local(target):
        folder = storage.local_path(page).absolute().parent
        return quote(os.path.relpath(storage.local_path(target).absolute(), folder).replace(os.sep, "/"))
    (store, target), (other, page) = target.split("://", 1), page.split("://", 1)
    if store != other or target.partition("/")[0] != page.partition("/")[0]:
        return None
    return quote(posixpath.relpath(f"/{target}", f"/{posixpath.dirname(page)}"))


def engine_of(record: Record) -> dict[str, Any]:
    """Returns the engine as reported by the pool, and the requested settings."""
    model = (record.evaluation.get("pool_config") or {}).get("model") or {}
    asked = {key: model[key] for key in ("generation_params", "apply_chat_template") if model.get(key)}
    engine = record.served.get("engine")
    known = dict(engine) if isinstance(engine, dict) else dict(model.get("engine_kwargs") or {})
    return {**known, **asked}


def served(record: Record) -> str:
    """Formats how the checkpoint was served: method, seconds, reason."""
    facts = {key: value for key, value in record.served.items() if key != "engine" and value is not None}
    how = str(facts.pop("how", "")).replace("_", " ")
    took = f"in {facts.pop('seconds'):,.2f} s" if isinstance(facts.get("seconds"), (int, float)) else ""
    why = facts.pop("reason", facts.pop("why", None))
    facts.pop("by", None) if how else None
    return " ".join(filter(None, [how, took, f"({why})" if why else "", flat(facts) if facts else ""])) or NOTHING


def _asked_so(record: Record) -> dict[str, Any]:
    asking, details = record.asking, record.details.items()
    facts = {
        "seeds": asking.seeds,
        "first token": asking.bos,
        "choices": asking.loglikelihood and asking.loglikelihood.model_dump(exclude_none=True),
        "chat template": asking.chat_template and asking.chat_template[:12],
        "data": {name: benchmark.data[:12] for name, benchmark in details if benchmark.data},
        "prompts": {name: benchmark.prompts[:12] for name, benchmark in details if benchmark.prompts},
        "known answers": {name: benchmark.control for name, benchmark in details if benchmark.control},
        "ends of answers": {name: benchmark.finish_reasons for name, benchmark in details if benchmark.finish_reasons},
    }
    return {name: value for name, value in facts.items() if value}


_INTEGRITY = {"intact": "as written", "changed": "changed after they were written"}

PROVENANCE: dict[str, Callable[[Record], Any]] = {
    "Evaluator": lambda record: evaluator_title(record.evaluator),
    "Merged": lambda record: how_merged(record.checkpoint),
    "Judge": judge_of,
    "Evaluation hash": lambda record: record.evaluation_hash,
    "Code": lambda record: (
        f"{record.git_commit[:12]}{' with uncommitted changes' if record.git_dirty else ''}"
        if record.git_commit is not None
        else "not in a repository"
    ),
    "Versions": lambda record: {name: version for name, version in record.versions.items() if name not in _JUDGED},
    "Engine": engine_of,
    "Hardware": lambda record: {
        **record.hardware,
        **({"engine on": device} if (device := record.served.get("device")) else {}),
    },
    "Asked": _asked_so,
    "Records": lambda record: _INTEGRITY[integrity(record)],
    "Tags": lambda record: list(record.tags),
}


def flat(value: Any) -> str:
    """Formats a JSON-like value in a line."""
    if isinstance(value, dict):
        return " · ".join(f"{key} {flat(inner)}" for key, inner in value.items()) or NOTHING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(flat, value)) or NOTHING
    if value is None or isinstance(value, bool):
        return NOTHING if value is None else "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def pretty(value: Any) -> str:
    """Formats a JSON-like value over several lines."""
    return json.dumps(value, indent=2, sort_keys=True, default=str)


def as_markdown(text: str) -> str:
    """Escapes a text for a table cell in Markdown: its content adds no row, link, image or HTML."""
    return "<br>".join(text.translate(_ESCAPED_IN_MARKDOWN).splitlines())


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
