"""The commands about records: `assay records`, `assay compare`, `assay report` and `assay publish`."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.table import Table
from rich.text import Text

from flows.cli.options.exports import (
    Developer,
    Leaderboards,
    Organization,
    Samples,
    eval_results,
    form_to_write,
    write_every_eval_ever,
)
from flows.console.console import ERR, OUT, PrintableConsole, print_json, say_rejected, write
from resources.errors import BadInput
from resources.storage import storage

if TYPE_CHECKING:
    from tasks.records.record import FoundRecord, Record
    from tasks.records.search import RecordFilter
    from tasks.reports.contamination import Split
    from tasks.sinks.publishing import Published

_FILE_WIDTH = 200  # characters of a table in a file

_Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
_Path = Annotated[str, typer.Argument(help="Folder given as --output to evaluate.")]
_Evaluators = Annotated[list[str] | None, typer.Option("--evaluator", help="Evaluator; repeatable.")]
_Benchmarks = Annotated[list[str] | None, typer.Option("--benchmark", help="Benchmark or pattern; repeatable.")]
_Metrics = Annotated[list[str] | None, typer.Option("--metric", help="Metric or pattern; repeatable.")]
_Adjustment = Literal["bh", "holm", "none"]


def records(
    path: _Path = "evaluations",
    run: Annotated[list[str] | None, typer.Option("--run", help="Run or pattern; repeatable.")] = None,
    steps: Annotated[str | None, typer.Option(help="Training step, or first:last; either may be left out.")] = None,
    evaluator: _Evaluators = None,
    benchmark: _Benchmarks = None,
    metric: _Metrics = None,
    status: Annotated[list[str] | None, typer.Option("--status", help="Status; repeatable.")] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Tag or pattern; repeatable.")] = None,
    latest: Annotated[
        bool | None,
        typer.Option("--latest/--all", help="The newest record of each cell, or all, the default with --json."),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", help="table, csv, jsonl, parquet, every-eval-ever or eval-results; by --output when left out."
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="File to write, here or in an object store; for every-eval-ever, a folder.")
    ] = None,
    organization: Organization = None,
    developer: Developer = None,
    samples: Samples = True,
    sink: Leaderboards = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Find records and samples that were changed; exit code 1 if any.",
        ),
    ] = False,
    contamination: Annotated[
        bool,
        typer.Option("--contamination", help="Show each score whole, over clean questions and over flagged questions."),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show recorded results, export them, or verify that they are unchanged."""
    from tasks.records.builds import read_qualifications
    from tasks.records.export import exported, measured_rows
    from tasks.records.record import find_records
    from tasks.records.search import RecordFilter
    from tasks.reports.page import results_table, rows_table
    from tasks.spec.names import how_many

    form = form_to_write(format_, output=output, as_json=as_json)
    first, last = _step_range(steps)
    filters = RecordFilter(
        runs=tuple(run or ()),
        first_step=first,
        last_step=last,
        evaluators=tuple(evaluator or ()),
        benchmarks=tuple(benchmark or ()),
        metrics=tuple(metric or ()),
        statuses=tuple(status or ()),
        tags=tuple(tag or ()),
        latest=latest if latest is not None else not (as_json or verify),
    )
    filters.check()
    rejected: dict[str, str] = {}
    places = find_records(path, rejected=rejected)
    every = [place.record for place in places]
    records = filters.select(every)
    meant = {id(record) for record in records}
    chosen = [place for place in places if id(place.record) in meant]
    if verify:
        from tasks.records.verification import lost_cells

        rejected |= lost_cells(path)
        if records or rejected:
            _verify(chosen, rejected, as_json=as_json)
            return
    say_rejected(rejected)
    splits = _splits(records, path, filters) if contamination else []
    if as_json and contamination:
        print_json([row.as_row for row in splits])
        return
    if as_json:
        print_json([json.loads(record.model_dump_json()) for record in records])
        return
    if not every or (form == "table" and not records):
        raise BadInput(
            expected=f"records below {path}" + (" that match" if every else ""),
            found=f"none of {len(every):,}" if every else "none",
            remedy="take back a filter" if every else "evaluate something, or name another folder",
        )
    if form == "every-eval-ever":
        assert output is not None, "refused without"
        publisher = {"organization": organization, "developer": developer}
        summary = write_every_eval_ever(chosen, output, filters=filters, samples=samples, **publisher)
        ERR.print(summary, soft_wrap=True, highlight=False, markup=False)
        return
    if form == "eval-results":
        _write(eval_results(chosen, sink, filters=filters), output, label=how_many(len(records), "record"))
        return
    if form != "table":
        by_record: dict[int, dict[tuple[str, str], dict[str, Any]]] = {}
        for row in splits:
            by_record.setdefault(id(row.record), {})[row.metric.benchmark, row.metric.name] = row.columns
        rows = list(measured_rows(records, filters=filters, splits_of=lambda record: by_record.get(id(record), {})))
        label = f"{how_many(len(rows), 'row')} of {how_many(len(records), 'record')}"
        _write(exported(rows, form=form), output, label=label)
        return
    table = (
        _split_table(splits)
        if contamination
        else results_table(
            records,
            filters=filters,
            parts=bool(filters.benchmarks),
            qualifications=read_qualifications(path),
        )
        if filters.latest
        else rows_table(row for row in measured_rows(records, filters=filters) if filters.metrics or not row["smooth"])
    )
    if output is None:
        OUT.print(table)
        return
    page = PrintableConsole(file=io.StringIO(), width=_FILE_WIDTH)
    page.print(table)
    assert isinstance(page.file, io.StringIO)
    _write(page.file.getvalue().encode(), output, label=how_many(len(records), "record"))


def _splits(records: Sequence[Record], path: str, filters: RecordFilter) -> list[Split]:
    from tasks.records.questions.flags import FOLDER, read_flags
    from tasks.reports.contamination import splits_of

    flags = read_flags(path)
    if not flags:
        raise BadInput(
            expected=f"flags of questions in {storage.join(path, FOLDER)}",
            found="none",
            remedy="assay contamination scan, or import",
        )
    rows = splits_of(records, flags, evaluation_path=path)
    return [row for row in rows if filters.takes(row.metric.benchmark, row.metric.name)]


def _split_table(rows: Sequence[Split]) -> Table:
    table = Table("Checkpoint", "Benchmark · metric", "Whole", "Clean", "Flagged", "Clean − flagged", "Note")
    for row in rows:
        table.add_row(*map(Text, (row.record.checkpoint.name, row.label, *map(str, row.cells), row.note)))
    return table


def _verify(places: Sequence[FoundRecord], rejected: Mapping[str, str], *, as_json: bool) -> None:
    from collections import Counter

    from tasks.errors import RecordsChanged
    from tasks.records.verification import verified
    from tasks.spec.names import how_many

    results = [verified(place) for place in places]
    if as_json:
        rows = [result.as_row() for result in results]
        rows += [{"cell": cell, "integrity": "changed", "findings": [why]} for cell, why in rejected.items()]
        print_json(rows)
    else:
        for cell, why in rejected.items():
            OUT.print(f"{cell}: {why}", soft_wrap=True, highlight=False, markup=False)
        for result in results:
            if result.findings:
                OUT.print(f"{result.entry.cell_uri}: {result.words}", soft_wrap=True, highlight=False, markup=False)
        numbers = Counter(result.integrity for result in results)
        intact, unknown = how_many(numbers["intact"], "record"), numbers["unknown"]
        changed = numbers["changed"] + len(rejected)
        OUT.print(f"{intact} as written, {changed} changed, {unknown} not verifiable", highlight=False)
    wrong = [result.words for result in results if result.integrity == "changed"]
    wrong += [f"{cell}: {why}" for cell, why in rejected.items()]
    if wrong:
        raise RecordsChanged(
            expected=f"{how_many(len(results) + len(rejected), 'record')} as they were written",
            found=f"{len(wrong)} changed; the first: {wrong[0]}",
            remedy="restore what was written, move back folders that were renamed or copied, or delete record.json of "
            "each and evaluate again",
        )


def compare(
    first: Annotated[
        str,
        typer.Argument(help="A checkpoint: NAME, RUN@STEP, mean(RUN@STEPS), PATH:NAME or the folder of a record."),
    ],
    second: Annotated[str, typer.Argument(help="The checkpoint to compare with it.")],
    path: Annotated[str, typer.Option(help="Folder given as --output to evaluate.")] = "evaluations",
    evaluator: _Evaluators = None,
    benchmark: _Benchmarks = None,
    metric: _Metrics = None,
    adjust: Annotated[str, typer.Option(help="For the number of tests: bh (Benjamini–Hochberg), holm or none.")] = "bh",
    anyway: Annotated[bool, typer.Option("--anyway", help="Also compare what was not measured alike.")] = False,
    as_json: _Json = False,
) -> None:
    """Compare two checkpoints question by question: is the difference more than chance?"""
    from tasks.records.search import RecordFilter, records_of_checkpoints
    from tasks.reports.comparison_views import comparison_json, comparison_table
    from tasks.verdicts.comparison import compare as compare_records

    adjustment = next((choice for choice in get_args(_Adjustment) if choice == adjust), None)
    if adjustment is None:
        raise BadInput(expected="--adjust bh, holm or none", found=adjust, remedy="leave it out for bh")
    filters = RecordFilter(
        evaluators=tuple(evaluator or ()), benchmarks=tuple(benchmark or ()), metrics=tuple(metric or ())
    )
    filters.check()
    rejected: dict[str, str] = {}
    sides = records_of_checkpoints((first, second), evaluation_path=path, rejected=rejected)
    say_rejected(rejected)
    comparison = compare_records(
        sides[0], sides[1], labels=(first, second), filters=filters, adjustment=adjustment, anyway=anyway
    )
    if as_json:
        print_json(comparison_json(comparison))
    else:
        OUT.print(comparison_table(comparison))


def report(
    path: _Path = "evaluations",
    output: Annotated[str, typer.Option(help="File to write the page to.")] = "report.html",
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
) -> None:
    """Write a self-contained HTML page with curves and tables, and a page with the questions if they are few."""
    from tasks.records.record import find_records
    from tasks.reports.page import write_report
    from tasks.reports.viewer.page import write_next_to_report

    rejected: dict[str, str] = {}
    places = find_records(path, rejected=rejected)
    say_rejected(rejected)
    records = [place.record for place in places]
    if not records:
        raise BadInput(
            expected=f"records below {path}", found="none", remedy="evaluate something, or name another folder"
        )
    runs = sorted({record.checkpoint.run for record in records})
    heading = title or ", ".join(runs)
    questions = write_next_to_report(places, output, title=heading, location=path)
    written = write_report(records, output, title=heading, records_at=path, questions_page=questions)
    OUT.print(written, soft_wrap=True, highlight=False)


def publish(
    path: _Path = "evaluations",
    sink: Annotated[str | None, typer.Option(help="YAML file with a sink, or with a list of sinks.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file with an EvaluationConfig that names sinks.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Send also what a sink has already.")] = False,
    as_json: _Json = False,
) -> None:
    """Send recorded results that are missing at Weights & Biases, MLflow, an object store or a model card."""
    from tasks.errors import SinkFailed
    from tasks.sinks.publishing import publish_missing, sinks_in

    def show(published: Published) -> None:
        ERR.print(
            f"{published.title} → {published.sink}: {published.state.status}",
            style="dim",
            markup=False,
            highlight=False,
        )

    rejected: dict[str, str] = {}
    outcomes = publish_missing(path, sinks_in(sink, config), again=again, on_published=show, rejected=rejected)
    say_rejected(rejected)
    if as_json:
        print_json([outcome.as_row() for outcome in outcomes])
    elif not outcomes:
        OUT.print("Nothing to publish: every sink has every succeeded record.")
    else:
        table = Table("What", "Status", "Where, or why not")
        table.columns[2].overflow = "fold"  # paths are copied from here
        for outcome in outcomes:
            table.add_row(
                outcome.title, outcome.state.status, outcome.state.where or outcome.state.reason or outcome.sink
            )
        OUT.print(table)
    failed = [outcome for outcome in outcomes if outcome.state.status == "failed"]
    if failed:
        raise SinkFailed(
            expected=f"{len(outcomes)} to be published",
            found=f"{len(failed)} failed; the first, {failed[0].title}:\n{failed[0].state.reason}",
            remedy="mend what it says, and run it again: only what is missing is sent",
        )


def _step_range(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    first, separator, last = text.partition(":")
    ends = [first, last if separator else first]
    if not any(ends) or not all(end.isdecimal() and len(end) < 19 for end in ends if end):
        raise BadInput(
            expected="--steps N, FIRST:LAST, FIRST: or :LAST",
            found=f"--steps {text}",
            remedy="for example --steps 1000:5000",
        )
    return int(ends[0]) if ends[0] else None, int(ends[1]) if ends[1] else None


def _write(content: bytes, output: str | None, *, label: str) -> None:
    if output is None:
        write(content)
        return
    storage.write_bytes(output, content)
    ERR.print(f"{label} in {output}", soft_wrap=True, highlight=False)
