"""Flags per question, in files beside the records: which questions a search has found in training texts, or not.

`<evaluation_path>/contamination/<name>.jsonl.gz`, gzipped lines of JSON: first what was searched, by what and when,
then a line for each question that was looked for. A question without a line was not looked for, which is not clean.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, Field

from resources.errors import BadInput, StorageError
from resources.storage import storage
from tasks.contamination.questions import AskedQuestion
from tasks.records.details import Part
from tasks.records.samples import encodable, sample_lines

FOLDER = "contamination"
"""Folder below an evaluation path with the files of flags."""
_END = ".jsonl.gz"
_SHOWN_WORDS = 50
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_NAMED_BY_CONTENT = re.compile(r"(?:\d+-)?[0-9a-f]{12,}(?:-\d+)?")
"""Ids that hold a digest of the question, of lm-eval and AlpacaEval; those of HELM are places in its data."""

Tool = Literal["assay", "decon", "marin", "list"]
Status = Literal["clean", "flagged", "not scanned"]


class Evidence(Part):
    """The place in a training text where the longest part of a question was found."""

    place: Annotated[str, AfterValidator(encodable)]
    """File, and line or document in it, as the search tells it."""
    text: Annotated[str, AfterValidator(encodable)]
    """The words that were found, lower case; the first fifty."""


def evidence_of(place: str, text: str) -> Evidence:
    """Evidence with the first words of what was found."""
    return Evidence(place=place, text=" ".join(text.split()[:_SHOWN_WORDS]))


class QuestionFlag(Part):
    """The finding about one question."""

    benchmark: str
    """Name its metrics are published under."""
    id: str
    """Name of the question in samples."""
    text: str
    """Digest of its own words, by which it is known under other names and behind other examples."""
    flagged: bool
    """True if the search found it."""
    score: float | None = None
    """Share of its n-grams that were found, or the tool's own score; from 0 to 1."""
    longest: int | None = None
    """Words of its longest part that was found in one text."""
    answer: bool | None = None
    """True if its answer follows there; empty where that is unknown."""
    evidence: Evidence | None = None
    """One place where it was found."""


class Search(Part):
    """Provenance of flags: what was searched for what, by what, when."""

    schema_version: Literal[1] = 1
    """Version of this layout."""
    name: str
    """Name of the file, without its ending."""
    tool: Tool
    """assay if training texts were scanned here, else the tool whose output was imported."""
    version: str
    """Version of Assay that wrote the flags."""
    created: AwareDatetime
    """Time it was written, UTC."""
    texts: tuple[str, ...]
    """Training texts that were searched, or the files that were imported."""
    text_files: int | None = None
    """Files of training texts; empty where the tool does not say."""
    text_bytes: int | None = None
    """Bytes of these files as they lie there."""
    documents: int | None = None
    """Texts in them."""
    words: int | None = None
    """Words in them."""
    n: int | None = None
    """Words of an n-gram."""
    shortest: int | None = None
    """Words that a question needs to be looked for."""
    threshold: float | None = None
    """Share of a question's n-grams from which on it is flagged."""
    too_short: int = 0
    """Questions that were not looked for since they have too few words."""
    unknown: int = 0
    """Imported findings about questions that no record asked."""
    not_read: tuple[str, ...] = ()
    """Parts of the training's data that could not be searched, and why."""
    unreadable: int = 0
    """Lines of training texts that are no JSON, or have no text."""
    questions: int = Field(ge=0)
    """Questions that were looked for."""
    flagged: int = Field(ge=0)
    """Questions that were found."""


@dataclass(frozen=True)
class Flags:
    """A file of flags: what was searched, what was found, and the file with its SHA-256."""

    search: Search
    questions: Mapping[tuple[str, str, str], QuestionFlag]
    """Findings by benchmark, name and digest of a question."""
    uri: str
    digest: str

    @cached_property
    def by_name(self) -> dict[tuple[str, str], QuestionFlag]:
        """Findings by benchmark and name; of several, asked in other words, one that is flagged."""
        found: dict[tuple[str, str], QuestionFlag] = {}
        for question in self.questions.values():
            if question.flagged or (question.benchmark, question.id) not in found:
                found[question.benchmark, question.id] = question
        return found

    @cached_property
    def by_text(self) -> dict[str, QuestionFlag]:
        """Findings by the digest of a question's words; of several about the same words, one that is flagged."""
        found: dict[str, QuestionFlag] = {}
        for question in self.questions.values():
            if question.text and (question.flagged or question.text not in found):
                found[question.text] = question
        return found

    def about(self, question: AskedQuestion) -> QuestionFlag | None:
        """The finding about a question of a record; None if it was not looked for.

        A name that says nothing about the content fits only the words that it had when it was looked for.
        """
        own = self.questions.get((question.benchmark, question.id, question.digest))
        if own is not None:
            return own
        named = self.by_name.get((question.benchmark, question.id))
        if named is not None and (not named.text or _NAMED_BY_CONTENT.fullmatch(question.id)):
            return named
        return self.by_text.get(question.digest)


def status_of(question: AskedQuestion, every: Sequence[Flags]) -> Status:
    """Status by several searches: flagged if any found the question, clean if any looked and none found it."""
    found = [flag for flags in every if (flag := flags.about(question)) is not None]
    return "flagged" if any(flag.flagged for flag in found) else "clean" if found else "not scanned"


def flags_uri(evaluation_path: str, name: str) -> str:
    """The file of a search."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            expected="a name of letters, digits, dots, hyphens and underscores",
            found=name,
            remedy="choose another --name",
        )
    return storage.join(evaluation_path, FOLDER, f"{name}{_END}")


def write_flags(evaluation_path: str, search: Search, questions: Iterable[QuestionFlag]) -> Flags:
    """Writes what a search found beside the records; an earlier file of this name is replaced."""
    uri = flags_uri(evaluation_path, search.name)
    every = _by_key(questions)
    lines = [search.model_dump_json(), *(question.model_dump_json(exclude_none=True) for question in every.values())]
    content = gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)
    storage.write_bytes(uri, content)
    return Flags(search, every, uri, hashlib.sha256(content).hexdigest())


def read_flags(evaluation_path: str) -> tuple[Flags, ...]:
    """Every file of flags beside some records, the oldest first; none is the usual case."""
    listed = storage.list_files(storage.join(evaluation_path, FOLDER))
    found = [_read(file.uri) for file in listed if file.uri.endswith(_END)]
    return tuple(sorted(found, key=lambda flags: flags.search.created))


def _read(uri: str) -> Flags:
    content = storage.read_bytes(uri)
    try:
        lines = sample_lines(content, uri=uri)
        search = Search.model_validate_json(next(lines, b""))
        found = _by_key(map(QuestionFlag.model_validate_json, lines))
    except (StorageError, ValueError) as error:
        raise StorageError(
            expected=f"flags of questions, one line of JSON each, in {uri}",
            found=error.found if isinstance(error, StorageError) else str(error).splitlines()[0],
            remedy="delete it and search again; a newer Assay may have written it",
        ) from error
    return Flags(search, found, uri, hashlib.sha256(content).hexdigest())


def _by_key(questions: Iterable[QuestionFlag]) -> dict[tuple[str, str, str], QuestionFlag]:
    return {(question.benchmark, question.id, question.text): question for question in questions}
