"""`assay contamination`: questions that occur in training texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from flows.cli.options.pools import Positive, refuse_with
from flows.cli.records import Folder
from flows.console.console import Json, note, print_json, say
from resources.errors import BadInput, exclusive
from resources.storage.bounded_folder import size_text
from tasks.contamination.imported import import_flags
from tasks.contamination.scan import ScanProgress, ScanSettings, scan
from tasks.contamination.texts import TextSource, training_texts
from tasks.records.questions.asked import AskedQuestion, every_question
from tasks.records.questions.flags import ImportedTool
from tasks.records.record import find_records
from tasks.reports.contamination import searched


def contamination(
    path: Folder = "evaluations",
    /,
    *,
    texts: tuple[str, ...] = (),
    train_config: str | None = None,
    field: str = "text",
    n: int = 13,
    shortest: int = 8,
    threshold: float = 0.5,
    processes: Annotated[int | None, Positive] = None,
    findings: tuple[str, ...] = (),
    tool: Annotated[ImportedTool, Parameter("--from")] = "list",
    benchmark: str | None = None,
    covers: tuple[str, ...] = (),
    name: str | None = None,
    as_json: Json = False,
) -> None:
    """Search training texts for the questions of all records, or import what another tool found.

    Args:
        texts: Training texts, .jsonl, .parquet or .txt: a file, pattern or folder; repeatable.
        train_config: Configuration of train_lm or train-and-evaluate: its training data is scanned.
        field: Field of a document with its text.
        n: Words of an n-gram.
        shortest: Words that a question needs to be looked for.
        threshold: Share of a question's n-grams that flags it.
        processes: Processes; the number of cores when left out.
        findings: Output of another tool: a file, pattern or folder; repeatable.
        tool: With --findings: decon (allenai/decon), marin (its datakit), or list.
        benchmark: With --findings: benchmark or pattern that the findings are about.
        covers: With --findings: benchmark that was looked for whole: the rest of it is clean; repeatable.
        name: Name of the flags, scan or imported when left out; those of the same name are replaced.
    """
    scanned = bool(texts) or train_config is not None
    if findings and scanned:
        raise exclusive("--findings", "--texts" if texts else "--train-config")
    if findings:
        about: dict[str, Any] = {"tool": tool, "benchmark": benchmark, "covers": covers}
        flags = import_flags(path, name or "imported", findings, _questions(path), **about)
    else:
        importing = [option for option, value in {"--benchmark": benchmark, "--covers": covers}.items() if value]
        refuse_with("--texts", importing, "it is about --findings")
        settings = ScanSettings(n=n, shortest=shortest, threshold=threshold)
        sources, not_read = _sources(texts, train_config, field)
        settings.check()
        options: dict[str, Any] = {"not_read": not_read, "processes": processes, "on_progress": _show_progress}
        flags = scan(path, name or "scan", sources, _questions(path), settings=settings, **options)
    if as_json:
        print_json(flags.search.model_dump(mode="json") | {"file": flags.uri, "sha256": flags.digest})
    else:
        say(*searched(flags.search), flags.uri)


def _sources(texts: Sequence[str], train_config: str | None, field: str) -> tuple[list[TextSource], list[str]]:
    named, not_read = training_texts(train_config) if train_config is not None else ([], [])
    sources = [*(TextSource(location, field) for location in texts), *named]
    if not sources:
        raise BadInput(
            expected="--texts or --train-config with training texts, or --findings with findings of another tool",
            found="; ".join(not_read) or "none",
            remedy="name files, such as --texts 'data/*.jsonl.gz'",
        )
    return sources, not_read


def _show_progress(progress: ScanProgress) -> None:
    size = f"{size_text(progress.bytes)} of {size_text(progress.of_bytes)}"
    note(f"{progress.parts:,} of {progress.of:,} parts, {size}")


def _questions(path: str) -> list[AskedQuestion]:
    questions = every_question(find_records(path))
    if not questions:
        raise BadInput(
            expected=f"records with samples below {path}",
            found="none",
            remedy="evaluate something, or name another folder",
        )
    return questions
