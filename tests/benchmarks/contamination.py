"""Searches made training texts for 14,042 questions: `assay contamination`, and a plain search with a set.

    make bench NAME=contamination
    python tests/benchmarks/contamination.py [--megabytes 400] [--plain-megabytes 40]

The texts contain every hundredth question. The plain search is a typical script: it splits words by a regular
expression and looks up every 13 consecutive words in a set. Both run in the same process and are measured in processor
time, which other load on the machine changes least; both must find the same questions. Assay's scan is also measured
with all processes at 2 sizes, for its memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side_by_side import BENCH, Comparison

from tasks.contamination.matching import QuestionIndex
from tasks.contamination.scan import ScanProgress, ScanSettings, scan, scan_part
from tasks.contamination.texts import TextSource, parts_of
from tasks.records.questions.asked import AskedQuestion, words_in

QUESTIONS = 14_042
"""The size of MMLU."""
_FOUND_EVERY = 100
_QUESTION_WORDS = 60
_VOCABULARY = 60_000
_POOL_WORDS = 4_000_000
_NOT_WORDS = re.compile(r"[^a-z0-9]+")


def make_texts(path: Path, *, megabytes: float, seed: int = 0) -> None:
    """Writes documents of 100 to 800 words with the word frequencies of a natural language, 1 per line."""
    source = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    vocabulary = ["".join(source.choices(letters, k=max(1, round(source.gauss(5.5, 2.5))))) for _ in range(_VOCABULARY)]
    pool = source.choices(vocabulary, weights=[1 / (rank + 1) for rank in range(_VOCABULARY)], k=_POOL_WORDS)
    written, number = 0, 0
    with path.open("w") as file:
        while written < megabytes * 1e6:
            first, words = source.randrange(_POOL_WORDS - 800), source.randrange(100, 800)
            text = f"“{number}” {' '.join(pool[first : first + words])}."
            written += file.write(json.dumps({"id": number, "text": text}, ensure_ascii=False) + "\n")
            number += 1


def documents(path: Path) -> Iterator[str]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)["text"]


def make_questions(path: Path, *, seed: int = 1) -> list[AskedQuestion]:
    """Returns questions of words of the texts: every hundredth is a part of an early text, the others are shuffled."""
    source = random.Random(seed)
    first_texts = [text.split() for text, _ in zip(documents(path), range(2_000), strict=False)]
    words = [word for text in first_texts for word in text]
    texts = []
    for number in range(QUESTIONS):
        text = source.choice([text for text in first_texts[:500] if len(text) > _QUESTION_WORDS])
        first = source.randrange(len(text) - _QUESTION_WORDS)
        is_contained = number % _FOUND_EVERY == 0
        texts.append(
            text[first : first + _QUESTION_WORDS] if is_contained else source.choices(words, k=_QUESTION_WORDS)
        )
    own = words_in([" ".join(text) for text in texts])
    return [AskedQuestion("made", str(number), text, "", f"{number:016x}") for number, text in enumerate(own)]


def plain_search(path: Path, questions: Sequence[AskedQuestion], *, n: int) -> set[int]:
    """Returns questions with at least half of their n-grams in the texts, by a set of tuples."""
    own = [question.text.split() for question in questions]
    numbers_by_gram: dict[tuple[str, ...], set[int]] = {}
    for number, words in enumerate(own):
        for at in range(len(words) - n + 1):
            numbers_by_gram.setdefault(tuple(words[at : at + n]), set()).add(number)
    seen: dict[int, set[tuple[str, ...]]] = {}
    for text in documents(path):
        words = _NOT_WORDS.sub(" ", text.lower()).split()
        for at in range(len(words) - n + 1):
            gram = tuple(words[at : at + n])
            if gram in numbers_by_gram:
                for number in numbers_by_gram[gram]:
                    seen.setdefault(number, set()).add(gram)
    grams = [{tuple(words[at : at + n]) for at in range(len(words) - n + 1)} for words in own]
    return {number for number, shared in seen.items() if len(shared) >= len(grams[number]) / 2}


def compared(path: Path, questions: Sequence[AskedQuestion]) -> tuple[float, float]:
    """Returns processor seconds of Assay's and of the plain search, in this process; their findings must be equal."""
    settings = ScanSettings()
    began = time.process_time()
    index = QuestionIndex(questions, n=settings.n, shortest=settings.shortest)
    findings = [scan_part(index, part).findings for part in parts_of([TextSource(str(path))])]
    ours = time.process_time() - began
    contaminated = {
        number
        for part in findings
        for number, finding in part.items()
        if finding.seen.bit_count() >= index.grams(number) / 2
    }
    began = time.process_time()
    plainly = plain_search(path, questions, n=settings.n)
    theirs = time.process_time() - began
    assert contaminated == plainly, f"{len(contaminated ^ plainly)} questions were found by only one of the searches"
    assert len(contaminated) >= QUESTIONS / _FOUND_EVERY, f"only {len(contaminated)} were found"
    return ours, theirs


class Spent(NamedTuple):
    """Wall seconds, processor seconds of all processes, and the largest memory of a process in MiB."""

    wall: float
    cpu: float
    mebibytes: float


def with_all_processes(path: Path, questions: Sequence[AskedQuestion], *, name: str) -> Spent:
    most = [0.0]

    def look(progress: ScanProgress) -> None:
        for child in multiprocessing.active_children():
            status = Path(f"/proc/{child.pid}/status").read_text()
            most[0] = max(most[0], int(status.partition("VmHWM:")[2].split()[0]) / 1024)

    before, began = os.times(), time.perf_counter()
    flags = scan(str(path.parent), name, [TextSource(str(path))], questions, settings=ScanSettings(), on_progress=look)
    wall, after = time.perf_counter() - began, os.times()
    assert flags.search.questions == len(questions)
    cpu = sum(after[:4]) - sum(before[:4])
    return Spent(wall, cpu, most[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--plain-megabytes", type=float, default=40)
    options = parser.parse_args()
    BENCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BENCH) as scratch:
        few = Path(scratch) / "few.jsonl"
        make_texts(few, megabytes=options.plain_megabytes)
        questions = make_questions(few)
        ours, theirs = compared(few, questions)
        facts: dict[str, float] = {"questions": QUESTIONS, "megabytes": options.plain_megabytes}
        for share in (0.25, 1.0):
            size = options.megabytes * share
            many = Path(scratch) / "many.jsonl"
            make_texts(many, megabytes=size, seed=2)
            spent = with_all_processes(many, questions, name=f"bench-{share:g}")
            print(
                f"{size:,.0f} MB with all processes: {spent.wall:.1f} s, {size / spent.wall:.0f} MB/s; "
                f"{size / spent.cpu:.0f} MB for a second of a processor; {spent.mebibytes:.0f} MiB at most in a process"
            )
            facts |= {f"megabytes_{share:g}": size, f"seconds_{share:g}": round(spent.wall, 1)}
            facts |= {f"cpu_seconds_{share:g}": round(spent.cpu, 1)}
            facts |= {f"process_mebibytes_{share:g}": round(spent.mebibytes)}
    size = options.plain_megabytes
    print(f"{size:,.0f} MB in a single process: ours {size / ours:.1f} MB/s, plain {size / theirs:.1f} MB/s")
    print(Comparison("contamination", "s of a processor", ours, theirs, better="less", facts=facts).as_json())


if __name__ == "__main__":
    main()
