"""Flags per question: which questions a search has found in training texts.

Stored in `<evaluation_path>/contamination/<name>.jsonl.gz`: a line of JSON about the search, then a line per question
that was searched for. A question without a line was not searched for, which does not mean clean.
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
from tasks.records.details import Part
from tasks.records.questions.asked import AskedQuestion
from tasks.records.samples import encodable, sample_lines

FOLDER = "contamination"
"""Folder below an evaluation path with the files of flags."""
_END = ".jsonl.gz"
_SHOWN_WORDS = 50
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
# Ids of lm-eval and AlpacaEval hold a digest of the question; HELM's are positions in its data.
_NAMED_BY_CONTENT = re.compile(r"(?:\d+-)?[0-9a-f]{12,}(?:-\d+)?")

ImportedTool = Literal["decon", "marin", "list"]
Tool = Literal["assay", ImportedTool]
Status = Literal["clean", "flagged", "not scanned"]


class Evidence(Part):
    """The location in a training text of the longest matching part of a question."""

    place: Annotated[str, AfterValidator(encodable)]
    """File, and line or document in it, as reported by the search."""
    text: Annotated[str, AfterValidator(encodable)]
    """The first 50 matching words, lower case."""


def evidence_of(place: str, text: str) -> Evidence:
    """Returns evidence with the first words of the match."""
    return Evidence(place=place, text=" ".join(text.split()[:_SHOWN_WORDS]))


class QuestionFlag(Part):
    """The finding about a question."""

    benchmark: str
    """Name that its metrics are published under."""
    id: str
    """Name of the question in samples."""
    text: str
    """Digest of its own words, which identifies it under other names and after other examples."""
    flagged: bool
    """True if the search found it."""
    score: float | None = None
    """Share of its n-grams that were found, or the tool's own score; from 0 to 1."""
    longest: int | None = None
    """Words of its longest part found in a single text."""
    answer: bool | None = None
    """True if its answer follows in that text; empty if unknown."""
    evidence: Evidence | None = None
    """A location where it was found."""


class Search(Part):
    """Provenance of flags: parameters and inputs of the search."""

    schema_version: Literal[1] = 1
    """Version of this layout."""
    name: str
    """Name of the file, without its ending."""
    tool: Tool
    """assay if training texts were scanned by Assay, else the tool that wrote the imported output."""
    version: str
    """Version of Assay that wrote the flags."""
    created: AwareDatetime
    """Time it was written, UTC."""
    texts: tuple[str, ...]
    """Searched training texts, or imported files."""
    text_files: int | None = None
    """Number of training text files; empty if the tool does not report it."""
    text_bytes: int | None = None
    """Stored size of these files in bytes."""
    documents: int | None = None
    """Texts in them."""
    words: int | None = None
    """Words in them."""
    n: int | None = None
    """Words of an n-gram."""
    shortest: int | None = None
    """Minimum words of a question to search for."""
    threshold: float | None = None
    """Minimum share of a question's n-grams to flag it."""
    too_short: int = 0
    """Questions that were skipped because they have too few words."""
    unknown: int = 0
    """Imported findings about questions that are in no record."""
    not_read: tuple[str, ...] = ()
    """Parts of the training data that could not be searched, and why."""
    unreadable: int = 0
    """Lines of training texts that are no JSON, or have no text."""
    questions: int = Field(ge=0)
    """Questions that were searched for."""
    flagged: int = Field(ge=0)
    """Questions that were found."""


@dataclass(frozen=True)
class Flags:
    """A file of flags: the search, its findings, and the file with its SHA-256."""

    search: Search
    questions: Mapping[tuple[str, str, str], QuestionFlag]
    """Findings by benchmark, name and digest of a question."""
    uri: str
    digest: str

    @cached_property
    def by_name(self) -> dict[tuple[str, str], QuestionFlag]:
        """Findings by benchmark and name; of several with different words, preferably a flagged finding."""
        flags: dict[tuple[str, str], QuestionFlag] = {}
        for question in self.questions.values():
            if question.flagged or (question.benchmark, question.id) not in flags:
                flags[question.benchmark, question.id] = question
        return flags

    @cached_property
    def by_text(self) -> dict[str, QuestionFlag]:
        """Findings by the digest of a question's words; of several with equal words, preferably a flagged finding."""
        flags: dict[str, QuestionFlag] = {}
        for question in self.questions.values():
            if question.text and (question.flagged or question.text not in flags):
                flags[question.text] = question
        return flags

    def about(self, question: AskedQuestion) -> QuestionFlag | None:
        """Returns the finding about a question of a record; None if it was not searched for. A name that does not
        depend on the content matches only the words that it had in the search."""
        own = self.questions.get((question.benchmark, question.id, question.digest))
        if own is not None:
            return own
        named = self.by_name.get((question.benchmark, question.id))
        if named is not None and (not named.text or _NAMED_BY_CONTENT.fullmatch(question.id)):
            return named
        return self.by_text.get(question.digest)


def status_of(question: AskedQuestion, every: Sequence[Flags]) -> Status:
    """Returns a question's status over several searches: flagged if any found it, clean if it was only searched for."""
    findings = [flag for flags in every if (flag := flags.about(question)) is not None]
    return "flagged" if any(flag.flagged for flag in findings) else "clean" if findings else "not scanned"


def flags_uri(evaluation_path: str, name: str) -> str:
    """Returns the file of a search."""
    if not _NAME.fullmatch(name):
        raise BadInput(
            expected="a name of letters, digits, dots, hyphens and underscores",
            found=name,
            remedy="choose another --name",
        )
    return storage.join(evaluation_path, FOLDER, f"{name}{_END}")


def write_flags(evaluation_path: str, search: Search, questions: Iterable[QuestionFlag]) -> Flags:
    """Writes the findings of a search next to the records; replaces an earlier file of this name."""
    uri = flags_uri(evaluation_path, search.name)
    every = _by_key(questions)
    lines = [search.model_dump_json(), *(question.model_dump_json(exclude_none=True) for question in every.values())]
    content = gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)
    storage.write_bytes(uri, content)
    return Flags(search, every, uri, hashlib.sha256(content).hexdigest())


def read_flags(evaluation_path: str) -> tuple[Flags, ...]:
    """Returns every file of flags next to the records, oldest first; usually there is none."""
    listed = storage.list_files(storage.join(evaluation_path, FOLDER))
    every = [_read(file.uri) for file in listed if file.uri.endswith(_END)]
    return tuple(sorted(every, key=lambda flags: flags.search.created))


def _read(uri: str) -> Flags:
    content = storage.read_bytes(uri)
    try:
        lines = sample_lines(content, uri=uri)
        search = Search.model_validate_json(next(lines, b""))
        questions = _by_key(map(QuestionFlag.model_validate_json, lines))
    except (StorageError, ValueError) as error:
        raise StorageError(
            expected=f"flags of questions, a line of JSON each, in {uri}",
            found=error.found if isinstance(error, StorageError) else str(error).splitlines()[0],
            remedy="delete it and search again; a newer Assay may have written it",
        ) from error
    return Flags(search, questions, uri, hashlib.sha256(content).hexdigest())


def _by_key(questions: Iterable[QuestionFlag]) -> dict[tuple[str, str, str], QuestionFlag]:
    return {(question.benchmark, question.id, question.text): question for question in questions}
