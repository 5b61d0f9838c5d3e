"""Scans training texts for questions, in several processes; an interrupted scan resumes by parts."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context, parent_process

from pydantic import TypeAdapter

from resources.errors import BadInput
from resources.storage import storage
from tasks.contamination.matching import Overlap, QuestionIndex
from tasks.contamination.texts import ReadingCounts, TextPart, TextSource, parts_of, texts_in
from tasks.records.provenance import versions
from tasks.records.questions.asked import AskedQuestion
from tasks.records.questions.flags import FOLDER, Evidence, Flags, QuestionFlag, Search, write_flags
from tasks.records.record import now

_BATCH_CHARACTERS = 2**20
_PARTS = ".parts"


@dataclass(frozen=True)
class ScanSettings:
    """Parameters of a scan; by default as in Marin's datakit and for GPT-3."""

    n: int = 13
    """Words of an n-gram."""
    shortest: int = 8
    """Minimum words of a question to search for."""
    threshold: float = 0.5
    """Minimum share of a question's n-grams to flag it."""

    def check(self) -> None:
        """Raises BadInput if nothing could be found."""
        if not 1 <= self.shortest <= self.n or not 0 < self.threshold <= 1:
            raise BadInput(
                expected="1 ≤ --shortest ≤ --n, and a --threshold above 0 and up to 1",
                found=f"--shortest {self.shortest} --n {self.n} --threshold {self.threshold}",
                remedy="leave them out for 8, 13 and 0.5",
            )


@dataclass
class PartResult:
    """Result of a part of the texts: findings by question, and reading statistics."""

    findings: dict[int, Overlap] = field(default_factory=dict)
    reading: ReadingCounts = field(default_factory=ReadingCounts)
    words: int = 0

    def add(self, other: PartResult) -> None:
        for number, finding in other.findings.items():
            self.findings.setdefault(number, Overlap()).add(finding)
        self.words += other.words
        self.reading.documents += other.reading.documents
        self.reading.unreadable += other.reading.unreadable
        self.reading.without_text += other.reading.without_text


_KEPT_RESULT = TypeAdapter(PartResult)
"""The form in which results are kept until the whole scan is done."""


@dataclass(frozen=True)
class ScanProgress:
    """Progress of a scan: finished parts and all parts, with their bytes."""

    parts: int
    of: int
    bytes: int
    of_bytes: int


def scan(
    evaluation_path: str,
    name: str,
    sources: Sequence[TextSource],
    questions: Sequence[AskedQuestion],
    *,
    settings: ScanSettings,
    not_read: Sequence[str] = (),
    processes: int | None = None,
    on_progress: Callable[[ScanProgress], None] = lambda progress: None,
) -> Flags:
    """Searches training texts for questions, and writes the findings next to the records, as flags called `name`.
    `not_read`: parts of the training data that cannot be searched, for the report. `processes`: number of parallel
    readers; the number of cores by default. `on_progress`: called after each part."""
    settings.check()
    index = QuestionIndex(questions, n=settings.n, shortest=settings.shortest)
    parts = parts_of(sources)
    kept = storage.join(evaluation_path, FOLDER, f"{name}{_PARTS}")
    whole = PartResult()
    done, done_bytes, of_bytes = 0, 0, sum(part.bytes for part in parts)
    for part, result in _results(parts, index, kept=kept, processes=processes or len(os.sched_getaffinity(0))):
        whole.add(result)
        done, done_bytes = done + 1, done_bytes + part.bytes
        on_progress(ScanProgress(done, len(parts), done_bytes, of_bytes))
    question_flags = list(_flags(index, whole.findings, threshold=settings.threshold))
    files = {part.uri: part.size for part in parts}
    search = Search(
        name=name,
        tool="assay",
        version=versions()["assay"],
        created=now(),
        texts=tuple(dict.fromkeys(source.location for source in sources)),
        text_files=len(files),
        text_bytes=sum(files.values()),
        documents=whole.reading.documents,
        words=whole.words,
        **asdict(settings),
        too_short=len(questions) - len(question_flags),
        not_read=tuple(not_read),
        unreadable=whole.reading.unreadable + whole.reading.without_text,
        questions=len(question_flags),
        flagged=sum(flag.flagged for flag in question_flags),
    )
    flags = write_flags(evaluation_path, search, question_flags)
    for file in storage.list_files(kept):
        storage.delete(file.uri)
    return flags


def scan_part(index: QuestionIndex, part: TextPart) -> PartResult:
    """Searches a part of the texts for questions."""
    result = PartResult()
    batch: list[str] = []
    places: list[tuple[str, int, int]] = []
    size = 0
    for text in texts_in(part, result.reading):
        batch.append(text)
        places.append((part.uri, part.start, result.reading.documents))
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            result.words += index.search(batch, result.findings, places=places)
            batch, places, size = [], [], 0
    if batch:
        result.words += index.search(batch, result.findings, places=places)
    return result


def _results(
    parts: Sequence[TextPart], index: QuestionIndex, *, kept: str, processes: int
) -> Iterator[tuple[TextPart, PartResult]]:
    asked = hashlib.sha256(repr([question[2:4] for question in index.questions]).encode()).hexdigest()
    names = {part: storage.join(kept, f"{_key(part, asked, index)}.json") for part in parts}
    kept_files = {file.uri for file in storage.list_files(kept)}
    for part in parts:
        if names[part] in kept_files:
            yield part, _KEPT_RESULT.validate_json(storage.read_bytes(names[part]))
    left = [part for part in parts if names[part] not in kept_files]
    for part, result in _scanned(left, index, processes=processes):
        storage.write_bytes(names[part], _KEPT_RESULT.dump_json(result))
        yield part, result


def _scanned(
    parts: Sequence[TextPart], index: QuestionIndex, *, processes: int
) -> Iterator[tuple[TextPart, PartResult]]:
    if min(processes, len(parts)) < 2:
        yield from ((part, scan_part(index, part)) for part in parts)
        return
    workers = ProcessPoolExecutor(
        max_workers=min(processes, len(parts)),
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(index.questions, index.n, index.shortest),
    )
    try:
        futures = {workers.submit(_work, part): part for part in parts}
        for future in as_completed(futures):
            part = futures.pop(future)  # frees each result after it is read
            yield part, future.result()
    finally:
        workers.shutdown(wait=True, cancel_futures=True)


def _key(part: TextPart, asked: str, index: QuestionIndex) -> str:
    follows_from = repr((part, asked, index.n, index.shortest, versions()["assay"]))
    return hashlib.sha256(follows_from.encode()).hexdigest()[:32]


def _flags(index: QuestionIndex, findings: dict[int, Overlap], *, threshold: float) -> Iterator[QuestionFlag]:
    for number, question in enumerate(index.questions):
        grams = index.grams(number)
        if grams == 0:
            continue
        finding = findings.get(number, Overlap())
        score = finding.seen.bit_count() / grams
        file, start, document = finding.place
        place = f"{file}, document {document}" + (f" after byte {start:,}" if start else "")
        yield QuestionFlag(
            benchmark=question.benchmark,
            id=question.id,
            text=question.digest,
            flagged=score >= threshold,
            score=round(score, 4),
            longest=finding.longest,
            answer=finding.answer if question.answer and finding.longest else None,
            evidence=Evidence(place=place, text=finding.text) if finding.longest else None,
        )


_indexes: list[QuestionIndex] = []


def _begin(questions: Sequence[AskedQuestion], n: int, shortest: int) -> None:
    _indexes.append(QuestionIndex(questions, n=n, shortest=shortest))
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _work(part: TextPart) -> PartResult:
    return scan_part(_indexes[0], part)
