"""Views of results: a terminal table, plain rows, curves, and a self-contained page, rewritten only if it changes."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from resources.errors import IrregularFile
from resources.storage import storage
from tasks.records.builds import Qualification, read_qualifications
from tasks.records.current import how_merged
from tasks.records.numbers import NOTHING, margin, measured
from tasks.records.questions.flags import Flags, read_flags
from tasks.records.record import Record, integrity
from tasks.records.search import RecordFilter
from tasks.records.verdicts import NOT_COVERED, EarlyVerdict, find_early
from tasks.reports.charts import chart_of, noise_note, summary_rows, wavering
from tasks.reports.contamination import contamination_view, searched
from tasks.reports.parts import (
    alert_lines,
    alert_parts,
    cost_part,
    early_parts,
    evaluator_parts,
    remarks,
    same,
    sink_parts,
    words_of_acknowledgements,
)
from tasks.reports.plots import chart_svg, charts_svg, step_label
from tasks.reports.table import CHANGED, ColumnResult, Results, change_of, mark, notes, questions, remarks_on
from tasks.reports.texts import PROVENANCE, counted, flat, pretty, served
from tasks.spec.evaluators import evaluator_title

STATUS_MEANINGS = {
    "withheld": "requested, answered and scored were not the same number, so there is no score",
    "failed": "the model or the benchmark could not be evaluated; trying again will not help",
    "infra_failed": "something of ours broke; the next run tries again",
    "gone": "the checkpoint was removed before its evaluation; nothing failed",
}
_STATUS_STYLES = {"withheld": "yellow", "failed": "red", "infra_failed": "magenta", "gone": "dim"}
_WIDE_COLUMNS = 4  # value columns that fit 80 characters; more are listed in a row each


def results_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns a plain row per checkpoint and metric, for table artifacts and scripts; `value` may be None."""
    results = Results(records)
    noises = {column: wavering(results, column) for column in results.columns}
    return [
        {
            "run": checkpoint.run,
            "step": checkpoint.step if checkpoint.label is None else None,
            "label": checkpoint.label,
            "checkpoint": checkpoint.name,
            "merge": how_merged(checkpoint),
            "evaluator": column.evaluator,
            "benchmark": column.benchmark,
            "metric": column.metric,
            "smooth": column.smooth,
            "settings": column.settings,
            **{name: getattr(outcome.metric, name, None) for name in ("value", "stderr", "low", "high")},
            "training_noise": noises[column][checkpoint.run].noise.stddev
            if outcome.metric and checkpoint.run in noises[column]
            else None,
            "n": getattr(outcome.metric, "n", None),
            "remarks": remarks_on(outcome),
            "integrity": integrity(outcome.record),
            "status": outcome.record.status,
            "reason": outcome.record.reason,
        }
        for checkpoint in results.checkpoints
        for column in results.columns
        if (outcome := results.outcome(checkpoint, column))
        and (outcome.metric or not (outcome.record.succeeded or column.smooth))
    ]


def results_table(
    records: Sequence[Record],
    *,
    filters: RecordFilter = RecordFilter(),  # noqa: B008 - it is frozen
    parts: bool = False,
    qualifications: Sequence[Qualification] = (),
) -> RenderableType:
    """Returns a terminal table of checkpoints × metrics: value and uncertainty, else the status, and notes.

    Uses the newest record of each cell. Metrics that do not fit side by side in 80 characters get a row each. `parts`
    adds parts of benchmarks; smooth scores are shown only if `filters` names metrics.
    """
    results = Results(records, filters=filters, qualifications=qualifications)
    if not results.records:
        return Text("No records yet")
    columns = [column for column in results.columns if parts or not column.part]
    left_out = len(results.columns) - len(columns)
    numbers = [metric for column in columns for metric in results.metrics(column)]
    with_intervals = any(metric.low is not None for metric in numbers)
    caption = ["value [95 % interval]"] if with_intervals else []
    caption += ["value ± standard error"] if any(m.low is None and m.stderr for m in numbers) else []
    caption += [f"{left_out} metrics of parts are in the report"] if left_out else []
    runs = list(dict.fromkeys(results.trained.values()))
    title = f"Results of {runs[0]}" if len(runs) == 1 else "Results"
    table = Table(title=Text(title), caption=Text("; ".join(caption)), box=box.SIMPLE_HEAD)
    if len(runs) > 1:
        table.add_column("run", overflow="fold", max_width=24)
    table.add_column("step", justify="right", no_wrap=True)
    wide = len(columns) <= _WIDE_COLUMNS - (len(runs) > 1) - with_intervals
    several = len(results.evaluators) > 1
    if wide:
        for column in columns:
            evaluator = evaluator_title(column.evaluator) if several else ""
            n = questions(results.metrics(column))
            lines = [evaluator, column.benchmark, column.metric, column.settings, n]
            table.add_column(Text("\n".join(filter(None, lines))), justify="right", overflow="fold")
    else:
        for heading in (*(["evaluator"] if several else []), "benchmark · metric"):
            table.add_column(heading, overflow="fold")
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("n", justify="right", no_wrap=True)
    shown_run = ""
    for checkpoint in results.checkpoints:
        run = results.trained[checkpoint.run]
        start = [Text(run if run != shown_run else "")] if len(runs) > 1 else []
        kind = results.merged_by(checkpoint.run).strip(" ()").replace(": ", ":\n")
        start.append(Text(f"{checkpoint.short_place}\n{kind}".rstrip()))
        shown_run = run
        outcomes = [results.outcome(checkpoint, column) for column in columns]
        values = [
            _styled(outcome, mark(results, checkpoint, column))
            for column, outcome in zip(columns, outcomes, strict=True)
        ]
        if wide:
            table.add_row(*start, *values)
            continue
        asked = [number for number, outcome in enumerate(outcomes) if outcome is not None]
        for number in asked:
            column, outcome = columns[number], outcomes[number]
            lead = start if number == asked[0] else [Text("")] * len(start)
            n = f"{outcome.metric.n:,}" if outcome and outcome.metric else ""
            names = ([evaluator_title(column.evaluator)] if several else []) + [column.label]
            table.add_row(*lead, *map(Text, names), values[number], n, end_section=number == asked[-1])
    alerts = [Text(line, style="red") for column in columns for line in alert_lines(results, column)]
    return Group(table, *alerts, *map(Text, [*notes(results, columns), *noise_note(results, columns)]))


def rows_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Formats exported rows for a terminal, a line each, including records that newer records replaced."""
    table = Table(box=box.SIMPLE_HEAD, caption="value ± standard error")
    for heading in ("run", "step", "evaluator", "benchmark", "metric", "value", "n", "status", "written"):
        table.add_column(heading, justify="right" if heading in ("step", "value", "n") else "left", overflow="fold")
    for row in rows:
        value = NOTHING if row["value"] is None else measured(row["value"], row["stderr"])
        value += f" {CHANGED}" if row["integrity"] == "changed" else ""
        step = Text(row["label"] if row["step"] is None else f"{row['step']:,}")
        n = NOTHING if row["n"] is None else f"{row['n']:,}"
        names = evaluator_title(row["evaluator"]), row["benchmark"], row["metric"] or NOTHING
        status = Text(row["status"], style=_STATUS_STYLES.get(row["status"], ""))
        table.add_row(Text(row["run"]), step, *map(Text, names), value, n, status, f"{row['created']:%Y-%m-%d %H:%M}")
    return table


def _styled(outcome: ColumnResult | None, sign: str) -> Text:
    if outcome is None:
        return Text(NOTHING, style="dim")
    style = "" if outcome.metric else _STATUS_STYLES.get(outcome.record.status, "")
    return Text(f"{outcome.text} {sign}".rstrip(), style="red" if sign == CHANGED else style)


def curves_svg(records: Sequence[Record], *, qualifications: Sequence[Qualification] = ()) -> str:
    """Returns a standalone SVG of curves over training steps with 95 % intervals; omits parts and smooth scores."""
    results = Results(records, qualifications=qualifications)
    columns = [column for column in results.columns if not column.part and not column.smooth]
    return charts_svg([chart_of(results, column, title=results.named(column)) for column in columns])


def render_report(
    records: Sequence[Record],
    *,
    title: str,
    records_at: str | None = None,
    page: str | None = None,
    qualifications: Sequence[Qualification] = (),
    flags: Sequence[Flags] = (),
    acknowledged: Mapping[str, str] | None = None,
    early: Sequence[EarlyVerdict] = (),
    questions_page: str | None = None,
) -> str:
    """Returns a self-contained HTML page: curves, numbers, cells without success, and provenance.

    The page has no script and makes no network request; the same records give the same page. Uses the newest record of
    each cell.

    Args:
        records_at: folder of the records; needed for links to pages made by harnesses, and for splits by `flags`.
        page: URI of the report, from which those links start.
        flags: contaminated questions.
        acknowledged: comments of acknowledged alerts, by alert id.
        questions_page: page with questions and answers, in the same folder.
    """
    results = Results(records, qualifications=qualifications)
    charts = {
        column: Markup(chart_svg(chart_of(results, column, acknowledged=acknowledged or ())))
        for column in results.columns
    }
    succeeded = [record for record in results.records if record.succeeded]
    templates = Environment(loader=PackageLoader("tasks.reports"), autoescape=True, undefined=StrictUndefined,
                            trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    templates.filters |= {
        "counted": counted,
        "evaluator": evaluator_title,
        "flat": flat,
        "change": change_of,
        "margin": margin,
        "pretty": pretty,
        "questions": questions,
        "searched": searched,
        "served": served,
        "step": step_label,
    }
    return templates.get_template("report.html.j2").render(
        title=title,
        questions_page=quote(storage.basename(questions_page)) if questions_page else None,
        opened_by=f"assay view {shlex.quote(records_at)}" if records_at and any(r.samples for r in records) else None,
        results=results,
        charts=charts,
        evaluators=evaluator_parts(results.records, records_at=records_at, page=page),
        sinks=sink_parts(results.records),
        contamination=contamination_view(results.records, flags, evaluation_path=records_at) if records_at else None,
        alerts=alert_parts(results, records_at=records_at, acknowledged=acknowledged),
        early=early_parts(early, records),
        not_covered=NOT_COVERED,
        whole=lambda columns, run: summary_rows(results, columns, run),
        cost=cost_part(results.records) if results.records else None,
        several_ways=list(dict.fromkeys(f"{c.benchmark} · {c.metric}" for c in results.columns if c.settings)),
        remarks=remarks,
        remarks_on=remarks_on,
        mark=lambda checkpoint, column: mark(results, checkpoint, column),
        notes=notes(results, results.columns),
        changed_sign=CHANGED,
        succeeded=succeeded,
        unsuccessful=[record for record in results.records if not record.succeeded],
        statuses=Counter(record.status for record in results.records),
        meanings=STATUS_MEANINGS,
        scored=sum(record.counts.scored for record in succeeded if record.counts),
        scores=[column for column in results.columns if not column.smooth],
        smooth=[column for column in results.columns if column.smooth],
        with_n={column for column in results.columns if len({metric.n for metric in results.metrics(column)}) > 1},
        with_counts=[record for record in succeeded if record.counts],
        phases=list(dict.fromkeys(phase for record in results.records for phase in record.seconds)),
        same=lambda value_of: same(results.records, value_of),
        provenance=PROVENANCE,
        evaluation_of=lambda record: record.evaluation,
        measured=measured,
    )


def write_report(
    records: Sequence[Record],
    uri: str,
    *,
    title: str,
    records_at: str | None = None,
    run: str | None = None,
    questions_page: str | None = None,
) -> str:
    """Writes the report page to `uri` and returns it; leaves a page that would be the same unchanged.

    `records_at` is the folder of the records, `run` limits early verdicts to a run, and `questions_page` is a page in
    the same folder to link.
    """
    below = storage.join(records_at, run) if records_at and run else records_at
    page = render_report(
        records,
        title=title,
        records_at=records_at,
        page=uri,
        qualifications=read_qualifications(records_at) if records_at is not None else (),
        flags=read_flags(records_at) if records_at is not None else (),
        acknowledged=words_of_acknowledgements(records, records_at=records_at) if records_at else {},
        early=[verdict for _, verdict in find_early(below)] if below else [],
        questions_page=questions_page,
    ).encode()
    try:
        is_same = storage.read_bytes(uri) == page
    except (FileNotFoundError, IrregularFile):
        is_same = False
    if not is_same:
        storage.write_bytes(uri, page)
    return uri
