"""`assay publish`, as the command shows it. Importing it costs little: what it runs is loaded when it runs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tasks.sinks.backlog import Published


def publish(
    path: Annotated[str, typer.Argument(help="Folder given as --output to evaluate.")] = "evaluations",
    sink: Annotated[str | None, typer.Option(help="YAML file with a sink, or with a list of sinks.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file with an EvaluationConfig that names sinks.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Send also what a sink has already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Send recorded results to Weights & Biases, MLflow, an object store or a model card; only what is missing."""
    from resources.errors import SinkFailed
    from tasks.sinks.backlog import publish_missing, sinks_in

    out, errors = Console(), Console(stderr=True)

    def show(one: Published) -> None:
        errors.print(f"{one.what} → {one.sink}: {one.state.status}", style="dim", markup=False, highlight=False)

    outcomes = publish_missing(path, sinks_in(sink, config), again=again, on_published=show)
    if as_json:
        sys.stdout.write(json.dumps([one.as_row() for one in outcomes], indent=2) + "\n")
    elif not outcomes:
        out.print("Nothing to publish: every sink has every succeeded record.")
    else:
        table = Table("What", "Status", "Where, or why not")
        table.columns[2].overflow = "fold"  # a place is copied from here
        for one in outcomes:
            table.add_row(one.what, one.state.status, one.state.where or one.state.reason or one.sink)
        out.print(table)
    failed = [one for one in outcomes if one.state.status == "failed"]
    if failed:
        raise SinkFailed(
            expected=f"{len(outcomes)} to be published",
            found=f"{len(failed)} failed; the first, {failed[0].what}:\n{failed[0].state.reason}",
            remedy="mend what it says, and run it again: only what is missing is sent",
        )
