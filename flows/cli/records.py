"""`assay records`: recorded results as a table, in formats for other tools, or verified."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import RenderableType
from rich.table import Table

from flows.cli.options.pools import OptionGroup
from flows.console.console import ERR, OUT, Json, PrintableConsole, print_json, say, say_rejected, table_of, write
from resources.errors import BadInput
from resources.storage import storage
from tasks.errors import RecordsChanged
from tasks.records.builds import read_qualifications
from tasks.records.export import exported, form_of, measured_rows
from tasks.records.questions.flags import FOLDER, read_flags
from tasks.records.record import FoundRecord, Record, find_records
from tasks.records.search import RecordFilter
from tasks.records.verification import lost_cells, verified
from tasks.reports.contamination import Split, splits_of
from tasks.reports.page import results_table, rows_table
from tasks.sinks.forms.every_eval_ever import Publisher, write_every_eval_ever
from tasks.sinks.hugging_face import HuggingFaceSink, as_yaml, hub_entries
from tasks.sinks.publishing import sinks_in
from tasks.spec.names import how_many

_FILE_WIDTH = 200  # characters of a table in a file

Folder = Annotated[str, Parameter(help="Folder given as --output to evaluate.")]
Format = Literal["table", "csv", "jsonl", "parquet", "every-eval-ever", "eval-results"]


@Parameter(name="*")
@dataclass(frozen=True)
class FilterOptions(OptionGroup):
    """Benchmarks and evaluators of records."""

    evaluator: tuple[str, ...] = ()
    """Evaluator; repeatable."""
    benchmark: tuple[str, ...] = ()
    """Benchmark or pattern; repeatable."""

    def filter(self, **others: Any) -> RecordFilter:
        """Returns the filter for the options, checked."""
        filters = RecordFilter(evaluators=self.evaluator, benchmarks=self.benchmark, **others)
        filters.check()
        return filters


@Parameter(name="*")
@dataclass(frozen=True)
class ExportOptions(OptionGroup):
    """The format of records, and the file."""

    format: Format | None = None
    """By the name of --output when left out."""
    output: str | None = None
    """File to write, here or in an object store; for every-eval-ever, a folder."""
    organization: str | None = None
    """For every-eval-ever: the organization that evaluated, as on the Hugging Face hub."""
    developer: str | None = None
    """For every-eval-ever: the organization that trained; the same when left out."""
    samples: Annotated[bool, Parameter(negative="--no-samples")] = True
    """For every-eval-ever: also what was asked and answered."""
    sink: str | None = None
    """For eval-results: YAML file with a hugging_face sink and its leaderboards."""

    def form(self, *, as_json: bool) -> Format:
        """Returns the requested format, else the format by the extension of the file's name, else a table."""
        given, output = self.format, self.output
        if as_json and (given is not None or output is not None):
            raise BadInput(
                expected="--json, or --format and --output",
                found="both",
                remedy="--format jsonl exports a line of JSON for each metric",
            )
        by_name = form_of(output) if output else None
        if output is not None and by_name is None and given is None and not output.endswith(".txt"):
            raise BadInput(
                expected="--output that ends in .csv, .jsonl, .parquet or .txt, or a --format",
                found=output,
                remedy="--format table writes the table as text",
            )
        form: Format = given or by_name or "table"
        if form in ("parquet", "every-eval-ever") and output is None:
            example = "a file, such as --output results.parquet" if form == "parquet" else "a folder: --output exported"
            raise BadInput(
                expected=f"--output with --format {form}, which no terminal can show",
                found="none",
                remedy=f"name {example}",
            )
        return form


def records(
    path: Folder = "evaluations",
    /,
    *,
    run: tuple[str, ...] = (),
    steps: str | None = None,
    filtering: FilterOptions = FilterOptions(),
    metric: tuple[str, ...] = (),
    status: tuple[str, ...] = (),
    tag: tuple[str, ...] = (),
    latest: Annotated[bool | None, Parameter(negative="--all")] = None,
    exporting: ExportOptions = ExportOptions(),
    verify: bool = False,
    contamination: bool = False,
    as_json: Json = False,
) -> None:
    """Show recorded results, export them, or verify that they are unchanged.

    Args:
        run: Run or pattern; repeatable.
        steps: Training step, or first:last; either may be left out.
        metric: Metric or pattern; repeatable.
        status: Status; repeatable.
        tag: Tag or pattern; repeatable.
        latest: The newest record of each cell, or all, the default with --json.
        verify: Find records and samples that were changed; exit code 1 if any.
        contamination: Show each score whole, over clean questions and over flagged questions.
    """
    form = exporting.form(as_json=as_json)
    first, last = _step_range(steps)
    filters = filtering.filter(
        runs=run,
        first_step=first,
        last_step=last,
        metrics=metric,
        statuses=status,
        tags=tag,
        latest=latest if latest is not None else not (as_json or verify),
    )
    rejected: dict[str, str] = {}
    every = find_records(path, rejected=rejected)
    chosen = select(every, filters)
    if verify:
        rejected |= lost_cells(path)
        if chosen or rejected:
            _verify(chosen, rejected, as_json=as_json)
            return
    say_rejected(rejected)
    meant = [item.record for item in chosen]
    splits = _splits(meant, path, filters) if contamination else []
    if as_json:
        every_record = (json.loads(record.model_dump_json()) for record in meant)
        rows = [row.as_row for row in splits] if contamination else list(every_record)
        print_json(rows)
        return
    if not every or (form == "table" and not chosen):
        raise none_of(len(every), path)
    if form == "every-eval-ever":
        say(_write_every_eval_ever(chosen, exporting, filters=filters), to=ERR)
        return
    label = how_many(len(chosen), "record")
    if form == "eval-results":
        content = eval_results(chosen, exporting.sink, filters=filters)
    elif form != "table":
        by_record: dict[int, dict[tuple[str, str], dict[str, Any]]] = {}
        for row in splits:
            by_record.setdefault(id(row.record), {})[row.metric.benchmark, row.metric.name] = row.columns
        rows = list(measured_rows(meant, filters=filters, splits_of=lambda record: by_record.get(id(record), {})))
        content, label = exported(rows, form=form), f"{how_many(len(rows), 'row')} of {label}"
    else:
        table = _split_table(splits) if contamination else _table(meant, path, filters)
        if exporting.output is None:
            OUT.print(table)
            return
        page = PrintableConsole(file=io.StringIO(), width=_FILE_WIDTH)
        page.print(table)
        content = page.file.getvalue().encode()  # pyright: ignore[reportAttributeAccessIssue]  # a StringIO
    if exporting.output is None:
        write(content)
        return
    storage.write_bytes(exporting.output, content)
    say(f"{label} in {exporting.output}", to=ERR)


def recorded(path: str) -> list[FoundRecord]:
    """Returns the records below a folder, and prints why others do not count; refuses a folder without a record."""
    rejected: dict[str, str] = {}
    every = find_records(path, rejected=rejected)
    say_rejected(rejected)
    if not every:
        raise none_of(0, path)
    return every


def none_of(number: int, path: str, *, remedy: str = "take back a filter") -> BadInput:
    """Returns the error for filters that match none of a number of records, or for a folder without records."""
    return BadInput(
        expected=f"records below {path}" + (" that match" if number else ""),
        found=f"none of {number:,}" if number else "none",
        remedy=remedy if number else "evaluate something, or name another folder",
    )


def select(records: Sequence[FoundRecord], filters: RecordFilter) -> list[FoundRecord]:
    """Returns the matching records in the given order."""
    meant = {id(record) for record in filters.select([item.record for item in records])}
    return [item for item in records if id(item.record) in meant]


def _table(records: Sequence[Record], path: str, filters: RecordFilter) -> RenderableType:
    if not filters.latest:
        rows = measured_rows(records, filters=filters)
        return rows_table(row for row in rows if filters.metrics or not row["smooth"])
    qualifications = read_qualifications(path)
    return results_table(records, filters=filters, parts=bool(filters.benchmarks), qualifications=qualifications)


def _splits(records: Sequence[Record], path: str, filters: RecordFilter) -> list[Split]:
    flags = read_flags(path)
    if not flags:
        raise BadInput(
            expected=f"flags of questions in {storage.join(path, FOLDER)}",
            found="none",
            remedy="assay contamination finds or imports them",
        )
    rows = splits_of(records, flags, evaluation_path=path)
    return [row for row in rows if filters.takes(row.metric.benchmark, row.metric.name)]


def _split_table(rows: Sequence[Split]) -> Table:
    headings = ("Checkpoint", "Benchmark · metric", "Whole", "Clean", "Flagged", "Clean − flagged", "Note")
    shown = [(row.record.checkpoint.name, row.label, *map(str, row.cells), row.note) for row in rows]
    return table_of(*headings, rows=shown)


def _verify(places: Sequence[FoundRecord], rejected: Mapping[str, str], *, as_json: bool) -> None:
    results = [verified(place) for place in places]
    lost = [f"{cell}: {why}" for cell, why in rejected.items()]
    if as_json:
        rows = [result.as_row() for result in results]
        print_json(rows + [{"cell": cell, "integrity": "changed", "findings": [why]} for cell, why in rejected.items()])
    else:
        say(*lost, *(f"{result.entry.cell_uri}: {result.words}" for result in results if result.findings))
        numbers = Counter(result.integrity for result in results)
        intact, unknown = how_many(numbers["intact"], "record"), numbers["unknown"]
        say(f"{intact} as written, {numbers['changed'] + len(lost)} changed, {unknown} not verifiable")
    if wrong := [*(result.words for result in results if result.integrity == "changed"), *lost]:
        raise RecordsChanged(
            expected=f"{how_many(len(results) + len(rejected), 'record')} as they were written",
            found=f"{len(wrong)} changed; the first: {wrong[0]}",
            remedy="restore what was written, move back folders that were renamed or copied, or delete record.json of "
            "each and evaluate again",
        )


def _write_every_eval_ever(records: Sequence[FoundRecord], exporting: ExportOptions, *, filters: RecordFilter) -> str:
    if exporting.organization is None:
        raise BadInput(
            expected="--organization with --format every-eval-ever, for the evaluating organization",
            found="none",
            remedy="for example --organization my-lab",
        )
    assert exporting.output is not None, "refused without"
    publisher = Publisher(exporting.organization, exporting.developer or exporting.organization)
    written = write_every_eval_ever(
        records, exporting.output, publisher=publisher, filters=filters, with_samples=exporting.samples
    )
    numbers = {"record": written.records, "result": written.results, "sample line": written.rows}
    parts = ", ".join(how_many(number, name) for name, number in numbers.items())
    left_out = ", ".join(f"{number} {reason}" for reason, number in written.left_out.items())
    return f"{parts} in {exporting.output}" + (f"; left out: {left_out}" if left_out else "")


def eval_results(records: Sequence[FoundRecord], sink_file: str | None, *, filters: RecordFilter) -> bytes:
    """Returns the content of a `.eval_results` file for a checkpoint."""
    sinks = [sink for sink in sinks_in(sink_file, None) or () if isinstance(sink, HuggingFaceSink)]
    every = sinks[0].leaderboards if sinks else {}
    leaderboards = {name: board for name, board in every.items() if filters.takes(name, board.metric)}
    if not every:
        raise BadInput(
            expected="--sink with a file that has a hugging_face sink with leaderboards, for --format eval-results",
            found=sink_file or "none",
            remedy="see docs/how-to/publish-results.md",
        )
    checkpoints = sorted({item.record.checkpoint.name for item in records})
    if len(checkpoints) > 1:
        raise BadInput(
            expected="records of a single checkpoint, for eval-results",
            found=f"{len(checkpoints)} checkpoints: {', '.join(checkpoints[:4])}",
            remedy="choose a checkpoint: --run and --steps",
        )
    made = [
        (item, entry)
        for item in records
        for entry in hub_entries(item.record, leaderboards, source_url=sinks[0].source_url).values()
    ]
    scored = {item.cell_uri: item for item, _ in made}
    if changed := [cell for cell, item in scored.items() if verified(item).integrity == "changed"]:
        raise BadInput(
            expected="records and samples that are as they were written",
            found=f"changed: {', '.join(changed)}",
            remedy="assay records --verify says how; leave them out by a filter, or evaluate again",
        )
    places: dict[tuple[str, str], list[str]] = {}
    for item, entry in made:
        places.setdefault((entry["dataset"]["id"], entry["dataset"]["task_id"]), []).append(item.cell_uri)
    for (dataset, task_id), cells in places.items():
        if len(cells) > 1:
            raise BadInput(
                expected=f"a single score for task {task_id} of {dataset}",
                found=f"{len(cells)}, of {', '.join(cells)}",
                remedy="choose a record by --evaluator, --benchmark or --tag, or name its folder",
            )
    if not made:
        raise BadInput(
            expected=f"a score, over all questions, of {', '.join(leaderboards or every)}",
            found=f"none in {how_many(len(records), 'record')} of {checkpoints[0]}" if checkpoints else "no record",
            remedy="name benchmarks as records do, and evaluate them without max_eval_instances",
        )
    return as_yaml([entry for _, entry in made]).encode()


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
