"""Results for people: a terminal table, plain rows, curves, and one page that needs nothing but itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.table import Table
from rich.text import Text

from resources import storage
from tasks.records import Record
from tasks.results import NOTHING, Outcome, Results, measured, questions

STATUS_MEANINGS = {
    "withheld": "requested, answered and scored were not the same number, so there is no score",
    "failed": "the model or the benchmark could not be evaluated; trying again will not help",
    "infra_failed": "something of ours broke; the next run tries again",
}
_STATUS_STYLES = {"withheld": "yellow", "failed": "red", "infra_failed": "magenta"}
_WIDE_COLUMNS = 4  # value columns that fit 80 characters; more are listed one per line instead


def results_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One plain row per checkpoint and metric, for a table artifact or a script; `value` is None without a score."""
    results = Results(records)
    return [
        {
            "run": checkpoint.run,
            "step": checkpoint.step,
            "checkpoint": checkpoint.name,
            "evaluator": column.evaluator,
            "benchmark": column.benchmark,
            "metric": column.metric,
            "value": outcome.metric.value if outcome.metric else None,
            "stderr": outcome.metric.stderr if outcome.metric else None,
            "n": outcome.metric.n if outcome.metric else None,
            "status": outcome.record.status,
            "reason": outcome.record.reason,
        }
        for checkpoint in results.checkpoints
        for column in results.columns
        if (outcome := results.outcome(checkpoint, column)) and (outcome.metric or not outcome.record.succeeded)
    ]


def results_table(records: Sequence[Record]) -> Table:
    """Checkpoints × metrics for a terminal: value ± standard error, or the status where there is no score.

    With more metrics than fit side by side in 80 characters, each gets a line of its own.
    """
    results = Results(records)
    columns = [column for column in results.columns if not column.part]
    parts = len(results.columns) - len(columns)
    caption = "value ± standard error"
    caption += f"; {parts} metrics of parts are in the report" if parts else ""
    title = f"Results of {results.runs[0]}" if len(results.runs) == 1 else "Results"
    table = Table(title=Text(title), caption=caption, box=box.SIMPLE_HEAD)
    if not results.records:
        table = Table(box=None)
        table.add_column(Text("No records yet"))
        return table
    if len(results.runs) > 1:
        table.add_column("run", overflow="fold", max_width=24)
    table.add_column("step", justify="right", no_wrap=True)
    wide = len(columns) <= _WIDE_COLUMNS - (len(results.runs) > 1)
    if wide:
        for column in columns:
            heading = Text(
                "\n".join(filter(None, [column.benchmark, column.metric, questions(results.metrics(column))]))
            )
            table.add_column(heading, justify="right", overflow="fold")
    else:
        for heading in ("benchmark", "metric"):
            table.add_column(heading, overflow="fold")
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("n", justify="right", no_wrap=True)
    shown_run = ""
    for checkpoint in results.checkpoints:
        start = [Text(checkpoint.run if checkpoint.run != shown_run else "")] if len(results.runs) > 1 else []
        start.append(Text(f"{checkpoint.step:,}"))
        shown_run = checkpoint.run
        outcomes = [results.outcome(checkpoint, column) for column in columns]
        if wide:
            table.add_row(*start, *map(_styled, outcomes))
            continue
        for number, (column, outcome) in enumerate(zip(columns, outcomes, strict=True)):
            lead = start if number == 0 else [Text("")] * len(start)
            n = f"{outcome.metric.n:,}" if outcome and outcome.metric else ""
            table.add_row(*lead, Text(column.benchmark), Text(column.metric), _styled(outcome), n,
                          end_section=number == len(columns) - 1)  # fmt: skip
    return table


def _styled(outcome: Outcome | None) -> Text:
    if outcome is None:
        return Text(NOTHING, style="dim")
    return Text(outcome.text, style="" if outcome.metric else _STATUS_STYLES.get(outcome.record.status, ""))


def curves_svg(records: Sequence[Record]) -> str:
    """All curves over training steps as one picture that stands alone, with 95 % intervals."""
    from tasks import plots

    results = Results(records)
    return plots.charts_svg([results.chart(column) for column in results.columns])


def render_report(records: Sequence[Record], *, title: str) -> str:
    """One self-contained HTML page: curves, numbers, what did not succeed, and where everything comes from.

    It has no script and asks nothing of the network; the same records give the same page.
    """
    from tasks import plots

    results = Results(records)
    charts = [
        (column, Markup(plots.chart_svg(results.chart(column), name=f"chart-{number}")))
        for number, column in enumerate(results.columns)
    ]
    succeeded = [record for record in results.records if record.succeeded]
    templates = Environment(loader=PackageLoader("tasks"), autoescape=True, undefined=StrictUndefined,
                            trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    templates.filters |= {
        "flat": _flat,
        "step": plots.step_label,
        "questions": questions,
        "pretty": _pretty,
        "served": _served,
    }
    return templates.get_template("report.html.j2").render(
        title=title,
        results=results,
        charts=charts,
        succeeded=succeeded,
        unsuccessful=[record for record in results.records if not record.succeeded],
        statuses=Counter(record.status for record in results.records),
        meanings=STATUS_MEANINGS,
        scored=sum(record.counts.scored for record in succeeded if record.counts),
        counted=[record for record in succeeded if record.counts],
        phases=list(dict.fromkeys(phase for record in results.records for phase in record.seconds)),
        same=lambda value_of: _same(results.records, value_of),
        provenance=_PROVENANCE,
        evaluation_of=lambda record: record.evaluation,
        measured=measured,
    )


def write_report(records: Sequence[Record], uri: str, *, title: str) -> str:
    """Writes the page to a path or object store, and returns where.

    Raises:
        StorageError: the place is not writable, or full.
    """
    storage.write_bytes(uri, render_report(records, title=title).encode())
    return uri


def _engine(record: Record) -> dict[str, Any]:
    """The engine as the pool names it, and what the configuration asks of it."""
    model = (record.evaluation.get("pool_config") or {}).get("model") or {}
    asked = {key: model[key] for key in ("generation_params", "apply_chat_template") if model.get(key)}
    engine = record.served.get("engine")
    known = dict(engine) if isinstance(engine, dict) else dict(model.get("engine_kwargs") or {})
    return {**known, **asked}


def _served(record: Record) -> str:
    """How the checkpoint came to be served: how, in how many seconds, why so."""
    served = {key: value for key, value in record.served.items() if key != "engine" and value is not None}
    how = str(served.pop("how", "")).replace("_", " ")
    took = f"in {served.pop('seconds'):,.2f} s" if isinstance(served.get("seconds"), (int, float)) else ""
    why = served.pop("reason", served.pop("why", None))
    served.pop("by", None) if how else None
    return " ".join(filter(None, [how, took, f"({why})" if why else "", _flat(served) if served else ""])) or NOTHING


def _code(record: Record) -> str:
    if record.git_commit is None:
        return "not in a repository"
    return record.git_commit[:12] + (" with uncommitted changes" if record.git_dirty else "")


_PROVENANCE: dict[str, Callable[[Record], Any]] = {
    "Evaluator": lambda record: record.evaluator,
    "Evaluation hash": lambda record: record.evaluation_hash,
    "Code": _code,
    "Versions": lambda record: record.versions,
    "Engine": _engine,
    "Hardware": lambda record: record.hardware,
    "Tags": lambda record: list(record.tags),
}


def _same(records: Sequence[Record], value_of: Callable[[Record], Any]) -> list[tuple[Any, list[str]]]:
    """The different values among the records, each with the checkpoints that have it."""
    groups: dict[str, tuple[Any, list[str]]] = {}
    for record in records:
        value = value_of(record)
        names = groups.setdefault(json.dumps(value, sort_keys=True, default=str), (value, []))[1]
        names += [record.checkpoint.name] if record.checkpoint.name not in names else []
    return list(groups.values())


def _flat(value: Any) -> str:
    """A JSON-like value in one line."""
    if isinstance(value, dict):
        return " · ".join(f"{key} {_flat(inner)}" for key, inner in value.items()) or NOTHING
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_flat, value)) or NOTHING
    if value is None or isinstance(value, bool):
        return NOTHING if value is None else "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, default=str)
