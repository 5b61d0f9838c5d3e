"""The command that shows questions: `assay view`."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from flows.console.console import ERR, OUT, say_rejected
from resources.errors import BadInput


def view(
    path: Annotated[str, typer.Argument(help="Folder given as --output to evaluate, here or in a store.")] = (
        "evaluations"
    ),
    output: Annotated[
        str | None, typer.Option(help="File to write the page to, with all that it shows, in place of a server.")
    ] = None,
    run: Annotated[list[str] | None, typer.Option("--run", help="Run or pattern; repeatable.")] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option("--benchmark", help="Benchmark or pattern; repeatable.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    host: Annotated[str, typer.Option(help="Address of this machine to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; a free port when left out.", min=0, max=65535)] = 0,
) -> None:
    """Show questions and answers at every checkpoint, as a page for a browser."""
    from resources.jobs.addresses import own_address
    from tasks.records.record import find_records
    from tasks.records.search import RecordFilter
    from tasks.reports.viewer.page import MOST_ANSWERS, MOST_BYTES, answers_of, bytes_of, write_page
    from tasks.reports.viewer.server import serve
    from tasks.reports.viewer.view import View

    filters = RecordFilter(runs=tuple(run or ()), benchmarks=tuple(benchmark or ()), latest=False)
    rejected: dict[str, str] = {}
    every = find_records(path, rejected=rejected)
    say_rejected(rejected)
    named = [item for item in every if any(filters.takes(benchmark, "") for benchmark in item.record.benchmarks)]
    meant = {id(record) for record in filters.select([item.record for item in named])}
    records = [item for item in named if id(item.record) in meant]
    if not records:
        raise BadInput(
            expected=f"records below {path}" + (" that match" if every else ""),
            found=f"none of {len(every):,}" if every else "none",
            remedy="take back a filter, or name the group that a benchmark is a part of"
            if every
            else "evaluate something, or name another folder",
        )
    heading = title or ", ".join(sorted({item.record.checkpoint.run for item in records}))
    if output is not None:
        if answers_of(records) > MOST_ANSWERS or bytes_of(records) > MOST_BYTES:
            raise BadInput(
                expected=f"a single page of at most {MOST_ANSWERS:,} answers, in {MOST_BYTES:,} bytes of samples",
                found=f"{answers_of(records):,} answers, {bytes_of(records):,} bytes in {len(records):,} records",
                remedy="leave out --output, and a server has them all; or choose with --run and --benchmark",
            )
        page = write_page(records, output, title=heading, location=path, filters=filters)
        OUT.print(page, soft_wrap=True, highlight=False)
        return
    with closing(View(records, title=heading, location=path, filters=filters)) as shown:

        def show(address: str) -> None:
            address = address.replace("//0.0.0.0:", f"//{own_address()}:")  # browsers cannot open the wildcard address
            OUT.print(address, soft_wrap=True, highlight=False, markup=False)
            ERR.print("Ctrl-C ends it.", style="dim")

        serve(shown, host=host, port=port, on_address=show)
