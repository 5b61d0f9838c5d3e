"""The commands about contaminated benchmarks: `assay contamination`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, get_args

from cyclopts import Parameter

from flows.cli.options.pools import Positive
from flows.cli.records import Folder
from flows.console.console import Json, note, print_json, say
from resources.errors import BadInput
from resources.storage.bounded_folder import size_text
from tasks.contamination.imported import import_flags as imported
from tasks.contamination.scan import ScanProgress, ScanSettings, scan
from tasks.contamination.texts import TextSource, training_texts
from tasks.records.questions.asked import AskedQuestion, every_question
from tasks.records.questions.flags import Flags, Tool
from tasks.records.record import find_records
from tasks.reports.contamination import searched

_Name = Annotated[str, Parameter(help="Name of the flags; those of the same name are replaced.")]


def scan_texts(
    path: Folder = "evaluations",
    /,
    *,
    texts: tuple[str, ...] = (),
    train_config: str | None = None,
    field: str = "text",
    name: _Name = "scan",
    n: int = 13,
    shortest: int = 8,
    threshold: float = 0.5,
    processes: Annotated[int | None, Positive] = None,
    as_json: Json = False,
) -> None:
    """Search training texts for the questions of all records.

    Args:
        texts: Training texts, .jsonl, .parquet or .txt: a file, pattern or folder; repeatable.
        train_config: Configuration of train_lm or train-and-evaluate: its training data is scanned.
        field: Field of a document with its text.
        n: Words of an n-gram.
        shortest: Words that a question needs to be looked for.
        threshold: Share of a question's n-grams that flags it.
        processes: Processes; the number of cores when left out.
    """
    sources = [TextSource(location, field) for location in texts]
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
    settings = ScanSettings(n=n, shortest=shortest, threshold=threshold)
    settings.check()

    def show(progress: ScanProgress) -> None:
        size = f"{size_text(progress.bytes)} of {size_text(progress.of_bytes)}"
        note(f"{progress.parts:,} of {progress.of:,} parts, {size}")

    options = {"not_read": not_read, "processes": processes, "on_progress": show}
    _show(scan(path, name, sources, _questions(path), settings=settings, **options), as_json=as_json)


def import_flags(
    files: Annotated[tuple[str, ...], Parameter(help="Output of the tool: files, patterns or folders.")],
    /,
    *,
    path: Folder = "evaluations",
    tool: Annotated[str, Parameter("--from")] = "list",
    benchmark: str | None = None,
    covers: tuple[str, ...] = (),
    name: _Name = "imported",
    as_json: Json = False,
) -> None:
    """Import questions that another tool found: reports of decon, attributes of Marin's datakit, or a list.

    Args:
        tool: decon (allenai/decon), marin (its datakit), or list.
        benchmark: Benchmark or pattern that the findings are about.
        covers: Benchmark that was looked for whole: the rest of it is clean; repeatable.
    """
    known: Sequence[Tool] = [choice for choice in get_args(Tool) if choice != "assay"]
    chosen = next((choice for choice in known if choice == tool), None)
    if chosen is None:
        raise BadInput(expected=f"--from {', '.join(known)}", found=tool, remedy="choose one of these")
    _show(
        imported(path, name, files, _questions(path), tool=chosen, benchmark=benchmark, covers=covers), as_json=as_json
    )


def _questions(path: str) -> list[AskedQuestion]:
    questions = every_question(find_records(path))
    if not questions:
        raise BadInput(
            expected=f"records with samples below {path}",
            found="none",
            remedy="evaluate something, or name another folder",
        )
    return questions


def _show(flags: Flags, *, as_json: bool) -> None:
    if as_json:
        print_json(flags.search.model_dump(mode="json") | {"file": flags.uri, "sha256": flags.digest})
        return
    say(*searched(flags.search), flags.uri)
