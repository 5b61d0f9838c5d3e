"""The commands about contaminated benchmarks: `assay contamination`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from flows.console.console import ERR, OUT, Json, print_json
from resources.errors import BadInput

if TYPE_CHECKING:
    from tasks.contamination.scan import Progress
    from tasks.records.questions.asked import AskedQuestion
    from tasks.records.questions.flags import Flags, Tool

contamination_app = typer.Typer(
    help="Questions that occur in training texts: scanned here, or imported.", no_args_is_help=True
)

_Path = Annotated[str, typer.Argument(help="Folder given as --output to evaluate.")]
_Name = Annotated[str, typer.Option(help="Name of the flags; those of the same name are replaced.")]
_LISTED = "list"


@contamination_app.command("scan")
def scan_texts(
    path: _Path = "evaluations",
    texts: Annotated[
        list[str] | None,
        typer.Option(
            "--texts", help="Training texts, .jsonl, .parquet or .txt: a file, pattern or folder; repeatable."
        ),
    ] = None,
    train_config: Annotated[
        str | None, typer.Option(help="Configuration of train_lm or train-and-evaluate: its training data is scanned.")
    ] = None,
    field: Annotated[str, typer.Option(help="Field of a document with its text.")] = "text",
    name: _Name = "scan",
    n: Annotated[int, typer.Option("--n", help="Words of an n-gram.", min=1)] = 13,
    shortest: Annotated[int, typer.Option(help="Words that a question needs to be looked for.", min=1)] = 8,
    threshold: Annotated[float, typer.Option(help="Share of a question's n-grams that flags it.")] = 0.5,
    processes: Annotated[int | None, typer.Option(help="Processes; the number of cores when left out.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Search training texts for the questions of all records."""
    from resources.storage.bounded_folder import size_text
    from tasks.contamination.scan import Settings, scan
    from tasks.contamination.texts import TextSource, training_texts

    sources = [TextSource(location, field) for location in texts or ()]
    not_read: list[str] = []
    if train_config is not None:
        named, not_read = training_texts(train_config)
        sources += named
    if not sources:
        raise BadInput(
            expected="--texts or --train-config with training texts",
            found="; ".join(not_read) or "none",
            remedy="name files, such as --texts 'data/*.jsonl.gz'",
        )
    settings = Settings(n=n, shortest=shortest, threshold=threshold)
    settings.check()

    def show(progress: Progress) -> None:
        size = f"{size_text(progress.bytes)} of {size_text(progress.of_bytes)}"
        ERR.print(f"{progress.parts:,} of {progress.of:,} parts, {size}", style="dim", highlight=False)

    flags = scan(
        path, name, sources, _questions(path), settings=settings, not_read=not_read, processes=processes,
        on_progress=show,
    )  # fmt: skip
    _show(flags, as_json=as_json)


@contamination_app.command("import")
def import_flags(
    files: Annotated[list[str], typer.Argument(help="Output of the tool: files, patterns or folders.")],
    path: Annotated[str, typer.Option(help="Folder given as --output to evaluate.")] = "evaluations",
    tool: Annotated[str, typer.Option("--from", help="decon (allenai/decon), marin (its datakit), or list.")] = _LISTED,
    benchmark: Annotated[str | None, typer.Option(help="Benchmark or pattern that the findings are about.")] = None,
    covers: Annotated[
        list[str] | None,
        typer.Option("--covers", help="Benchmark that was looked for whole: the rest of it is clean; repeatable."),
    ] = None,
    name: _Name = "imported",
    as_json: Json = False,
) -> None:
    """Import questions that another tool found: reports of decon, attributes of Marin's datakit, or a list."""
    from tasks.contamination.imported import import_flags as imported
    from tasks.records.questions.flags import Tool

    known: Sequence[Tool] = [choice for choice in get_args(Tool) if choice != "assay"]
    chosen = next((choice for choice in known if choice == tool), None)
    if chosen is None:
        raise BadInput(expected=f"--from {', '.join(known)}", found=tool, remedy="choose one of these")
    flags = imported(path, name, files, _questions(path), tool=chosen, benchmark=benchmark, covers=covers or ())
    _show(flags, as_json=as_json)


def _questions(path: str) -> list[AskedQuestion]:
    from tasks.records.questions.asked import every_question
    from tasks.records.record import find_records

    questions = every_question(find_records(path))
    if not questions:
        raise BadInput(
            expected=f"records with samples below {path}",
            found="none",
            remedy="evaluate something, or name another folder",
        )
    return questions


def _show(flags: Flags, *, as_json: bool) -> None:
    from tasks.reports.contamination import searched

    if as_json:
        print_json(flags.search.model_dump(mode="json") | {"file": flags.uri, "sha256": flags.digest})
        return
    for fact in searched(flags.search):
        OUT.print(fact, highlight=False, markup=False, soft_wrap=True)
    OUT.print(flags.uri, highlight=False, markup=False, soft_wrap=True)
