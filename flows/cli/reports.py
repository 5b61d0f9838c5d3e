"""Recorded results for people: `assay compare`, `requalify`, `report`, `view` and `publish`."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated, Literal

from cyclopts import Parameter, validators
from rich import box
from rich.table import Column, Table
from rich.text import Text

from flows.cli.options.pools import AtLeastZero
from flows.cli.records import FilterOptions, Folder, none_of, recorded, select
from flows.console.console import OUT, Json, note, print_json, say, say_rejected, table_of
from flows.console.running import run_series
from resources.errors import BadInput
from resources.jobs.addresses import own_address
from resources.storage import storage
from tasks.errors import NumbersChanged, SinkFailed
from tasks.records.builds import Qualification, QualifiedBenchmark, QualifiedMetric, Verdict, write_qualification
from tasks.records.numbers import NOTHING, measured
from tasks.records.record import QUALIFICATIONS_FOLDER, FoundRecord, Record, now
from tasks.records.search import RecordFilter, records_of_checkpoints
from tasks.reports.comparison_views import comparison_json, comparison_table
from tasks.reports.page import write_report
from tasks.reports.viewer.page import MOST_ANSWERS, MOST_BYTES, answers_of, bytes_of, write_next_to_report, write_page
from tasks.reports.viewer.server import serve
from tasks.reports.viewer.view import View
from tasks.running.requalification import Side, asked_again, recorded_successes, side_of
from tasks.sinks.publishing import Published, publish_missing, sinks_in
from tasks.spec.evaluators import evaluator_title
from tasks.spec.names import how_many
from tasks.verdicts.comparison import compare as compare_records
from tasks.verdicts.qualification import qualify

_SIDE = "present (this Assay's pinned lists), a pinned list, a kept environment, or a folder of records"
_COLOURS: dict[Verdict, str] = {"identical": "green", "within noise": "green", "different": "red"}


def compare(
    first: str,
    second: str,
    /,
    *,
    path: Folder = "evaluations",
    filtering: FilterOptions = FilterOptions(),
    metric: tuple[str, ...] = (),
    adjust: Literal["bh", "holm", "none"] = "bh",
    anyway: bool = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints question by question: is the difference more than chance?

    Args:
        first: A checkpoint: NAME, RUN@STEP, RUN@LABEL, mean(RUN@STEPS), PATH:NAME or the folder of a record.
        second: The checkpoint to compare with it.
        metric: Metric or pattern; repeatable.
        adjust: For the number of tests: bh (Benjamini–Hochberg), holm or none.
        anyway: Also compare what was not measured alike.
    """
    filters = filtering.filter(metrics=metric)
    rejected: dict[str, str] = {}
    sides = records_of_checkpoints((first, second), evaluation_path=path, rejected=rejected)
    say_rejected(rejected)
    comparison = compare_records(
        sides[0], sides[1], labels=(first, second), filters=filters, adjustment=adjust, anyway=anyway
    )
    if as_json:
        print_json(comparison_json(comparison))
    else:
        OUT.print(comparison_table(comparison))


def requalify(
    checkpoint: Annotated[str, Parameter(help="A checkpoint with records: NAME, RUN@STEP or RUN@LABEL.")],
    /,
    *,
    before: Annotated[str | None, Parameter("--from", help=f"{_SIDE}; those in --path when left out.")] = None,
    after: Annotated[str, Parameter("--to", help=f"{_SIDE}.")] = "present",
    path: Folder = "evaluations",
    filtering: FilterOptions = FilterOptions(),
    margin: Annotated[float, AtLeastZero] = 0.01,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint with two sets of versions: are the results identical, within noise or different?

    The verdict is written below --path.

    Args:
        margin: Largest difference that is noise; a share of the value where that is above 1.
    """
    filters = filtering.filter()
    sides = side_of(before or path), side_of(after)
    [known] = records_of_checkpoints((checkpoint,), evaluation_path=sides[0].records or path)
    meant = [record for record in filters.select([item.record for item in known]) if record.succeeded]
    if not meant:
        raise BadInput(
            expected=f"a succeeded record of {checkpoint} below {sides[0].records or path} that is wanted here",
            found="none",
            remedy="evaluate it first, or take back --evaluator or --benchmark",
        )
    asked = storage.join(path, QUALIFICATIONS_FOLDER, "asked", f"{now():%Y%m%dT%H%M%S}-{meant[0].checkpoint.name}")
    pair = [_records(side, meant, storage.join(asked, name)) for side, name in zip(sides, ("from", "to"), strict=True)]
    qualification = qualify(*pair, compared=(sides[0].label, sides[1].label), margin=margin)
    written = write_qualification(path, qualification)
    if as_json:
        print_json({"file": written, **json.loads(qualification.model_dump_json())})
    else:
        OUT.print(qualification_table(qualification))
        say(f"Verdict: {written}")
    changed = [verdict for verdict in qualification.benchmarks if verdict.verdict == "different"]
    if changed:
        raise NumbersChanged(
            expected=f"the same numbers of {checkpoint} with both",
            found=f"{len(changed)} of {how_many(len(qualification.benchmarks), 'benchmark')} different: "
            + ", ".join(verdict.benchmark for verdict in changed),
            remedy=f"look at the questions in {written}; keep to the former build, or evaluate all that is to be "
            "compared with the later build, into another evaluation_path",
        )


def _records(side: Side, meant: list[Record], evaluation_path: str) -> list[FoundRecord]:
    if side.records is None:
        from flows.evaluation import ask_again  # with Prefect

        run = meant[0].checkpoint.run
        for configs in asked_again(meant, evaluation_path):
            result = run_series(
                lambda configs=configs: ask_again(configs, side.label, side.lists), evaluation_path, run
            )
            if result.error is not None:
                raise result.error
    records = recorded_successes(side.records or evaluation_path, digest=meant[0].checkpoint.digest)
    evaluations = {(record.evaluator, record.benchmarks) for record in meant}
    return [item for item in records if (item.record.evaluator, item.record.benchmarks) in evaluations]


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


def report(path: Folder = "evaluations", /, *, output: str = "report.html", title: str | None = None) -> None:
    """Write a self-contained HTML page with curves and tables, and a page with the questions if they are few.

    Args:
        output: File to write the page to.
        title: Heading of the page.
    """
    places = recorded(path)
    heading = title or ", ".join(sorted({place.record.checkpoint.run for place in places}))
    questions = write_next_to_report(places, output, title=heading, location=path)
    records = [place.record for place in places]
    say(write_report(records, output, title=heading, records_at=path, questions_page=questions))


def view(
    path: Folder = "evaluations",
    /,
    *,
    output: str | None = None,
    run: tuple[str, ...] = (),
    benchmark: tuple[str, ...] = (),
    title: str | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))] = 0,
) -> None:
    """Show questions and answers at every checkpoint, as a page for a browser.

    Args:
        output: File to write the page to, with all that it shows, in place of a server.
        run: Run or pattern; repeatable.
        benchmark: Benchmark or pattern; repeatable.
        title: Heading of the page.
        host: Address of this machine to listen at.
        port: Port to listen at; a free port when left out.
    """
    filters = RecordFilter(runs=run, benchmarks=benchmark, latest=False)
    every = recorded(path)
    named = [item for item in every if any(filters.takes(name, "") for name in item.record.benchmarks)]
    records = select(named, filters)
    if not records:
        raise none_of(len(every), path, remedy="take back a filter, or name the group that a benchmark is a part of")
    heading = title or ", ".join(sorted({item.record.checkpoint.run for item in records}))
    if output is not None:
        if answers_of(records) > MOST_ANSWERS or bytes_of(records) > MOST_BYTES:
            raise BadInput(
                expected=f"a single page of at most {MOST_ANSWERS:,} answers, in {MOST_BYTES:,} bytes of samples",
                found=f"{answers_of(records):,} answers, {bytes_of(records):,} bytes in {len(records):,} records",
                remedy="leave out --output, and a server has them all; or choose with --run and --benchmark",
            )
        say(write_page(records, output, title=heading, location=path, filters=filters))
        return
    with closing(View(records, title=heading, location=path, filters=filters)) as shown:

        def show(address: str) -> None:
            say(address.replace("//0.0.0.0:", f"//{own_address()}:"))  # browsers cannot open the wildcard address
            note("Ctrl-C ends it.")

        serve(shown, host=host, port=port, on_address=show)


def publish(
    path: Folder = "evaluations",
    /,
    *,
    sink: str | None = None,
    config: str | None = None,
    again: bool = False,
    as_json: Json = False,
) -> None:
    """Send recorded results that are missing at Weights & Biases, MLflow, an object store or a model card.

    Args:
        sink: YAML file with a sink, or with a list of sinks.
        config: YAML file with an EvaluationConfig that names sinks.
        again: Send also what a sink has already.
    """

    def show(published: Published) -> None:
        note(f"{published.title} → {published.sink}: {published.state.status}")

    rejected: dict[str, str] = {}
    outcomes = publish_missing(path, sinks_in(sink, config), again=again, on_published=show, rejected=rejected)
    say_rejected(rejected)
    if as_json:
        print_json([outcome.as_row() for outcome in outcomes])
    elif not outcomes:
        OUT.print("Nothing to publish: every sink has every succeeded record.")
    else:
        states = [(outcome, outcome.state) for outcome in outcomes]
        rows = [(each.title, state.status, state.where or state.reason or each.sink) for each, state in states]
        OUT.print(table_of("What", "Status", Column("Where, or why not", overflow="fold"), rows=rows))
    if failed := [outcome for outcome in outcomes if outcome.state.status == "failed"]:
        raise SinkFailed(
            expected=f"{len(outcomes)} to be published",
            found=f"{len(failed)} failed; the first, {failed[0].title}:\n{failed[0].state.reason}",
            remedy="mend what it says, and run it again: only what is missing is sent",
        )
