"""Formats of `assay records`, and the files in formats for other tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from resources.errors import BadInput

if TYPE_CHECKING:
    from tasks.records.record import FoundRecord
    from tasks.records.search import RecordFilter

TableFormat = Literal["table", "csv", "jsonl", "parquet"]
EVERY_EVAL_EVER, EVAL_RESULTS = "every-eval-ever", "eval-results"
Format = TableFormat | Literal["every-eval-ever", "eval-results"]

Organization = Annotated[
    str | None, typer.Option(help="For every-eval-ever: the organization that evaluated, as on the Hugging Face hub.")
]
Developer = Annotated[
    str | None, typer.Option(help="For every-eval-ever: the organization that trained; the same when left out.")
]
Samples = Annotated[
    bool, typer.Option("--samples/--no-samples", help="For every-eval-ever: also what was asked and answered.")
]
Leaderboards = Annotated[
    str | None,
    typer.Option("--sink", help="For eval-results: YAML file with a hugging_face sink and its leaderboards."),
]


def form_to_write(given: str | None, *, output: str | None, as_json: bool) -> Format:
    """Returns the requested format, else the format by the extension of the file's name, else a table."""
    from tasks.records.export import form_of

    known = [*get_args(TableFormat), EVERY_EVAL_EVER, EVAL_RESULTS]
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
    if given is not None and given not in known:
        raise BadInput(expected=f"--format {', '.join(known)}", found=given, remedy="choose one of these")
    form: Format = given or by_name or "table"  # pyright: ignore[reportAssignmentType]  # it is one of them
    if form in ("parquet", EVERY_EVAL_EVER) and output is None:
        example = "a file, such as --output results.parquet" if form == "parquet" else "a folder: --output exported"
        raise BadInput(
            expected=f"--output with --format {form}, which no terminal can show",
            found="none",
            remedy=f"name {example}",
        )
    return form


def write_every_eval_ever(
    records: Sequence[FoundRecord],
    output: str,
    *,
    filters: RecordFilter,
    organization: str | None,
    developer: str | None,
    samples: bool,
) -> str:
    """Writes records in the format of Every Eval Ever; returns a line with their number and why others are omitted."""
    from tasks.sinks.forms.every_eval_ever import Publisher, write_every_eval_ever
    from tasks.spec.names import how_many

    if organization is None:
        raise BadInput(
            expected="--organization with --format every-eval-ever, for the evaluating organization",
            found="none",
            remedy="for example --organization my-lab",
        )
    publisher = Publisher(organization, developer or organization)
    written = write_every_eval_ever(records, output, publisher=publisher, filters=filters, with_samples=samples)
    parts = [
        how_many(written.records, "record"),
        how_many(written.results, "result"),
        how_many(written.rows, "sample line"),
    ]
    left_out = [f"{number} {reason}" for reason, number in written.left_out.items()]
    return f"{', '.join(parts)} in {output}" + (f"; left out: {', '.join(left_out)}" if left_out else "")


def eval_results(records: Sequence[FoundRecord], sink_file: str | None, *, filters: RecordFilter) -> bytes:
    """Returns the content of a `.eval_results` file for a checkpoint."""
    from tasks.records.verification import verified
    from tasks.sinks.hugging_face import HuggingFaceSink, as_yaml, hub_entries
    from tasks.sinks.publishing import sinks_in
    from tasks.spec.names import how_many

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
    entries = [entry for _, entry in made]
    if not entries:
        raise BadInput(
            expected=f"a score, over all questions, of {', '.join(leaderboards or every)}",
            found=f"none in {how_many(len(records), 'record')} of {checkpoints[0]}" if checkpoints else "no record",
            remedy="name benchmarks as records do, and evaluate them without max_eval_instances",
        )
    return as_yaml(entries).encode()
