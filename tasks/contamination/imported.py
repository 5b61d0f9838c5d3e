"""Flags of other tools: allenai/decon's reports, the attributes of Marin's datakit, plain lists."""

from __future__ import annotations

import csv
import io
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from resources.errors import BadInput
from resources.storage import storage
from resources.storage.parquet_batches import bounded_batches
from tasks.records.provenance import versions
from tasks.records.questions.asked import AskedQuestion, words_in
from tasks.records.questions.flags import Flags, QuestionFlag, Search, Tool, evidence_of, write_flags
from tasks.records.record import now

_YES = frozenset({"1", "true", "yes", "flagged", "contaminated", "dirty"})
_NO = frozenset({"0", "false", "no", "clean"})
_COLUMNS = {
    "id": ("id", "question", "question_id"),
    "benchmark": ("benchmark", "task"),
    "flag": ("flag", "flagged", "contaminated"),
    "score": ("score", "overlap"),
    "evidence": ("evidence", "text"),
}
_N = 13  # words of an n-gram of datakit
_SHARE = 0.5  # of n-grams from which datakit calls a paragraph contaminated; used for questions in Assay
_SHORT = 3  # minimum words of a paragraph, which is a single n-gram if it has fewer than 13
_ROWS = 4096


_Finding = tuple[Sequence[AskedQuestion], dict[str, Any]]
"""Questions, and the fields of their flags."""


class QuestionLookup:
    """The questions of records, searchable by benchmark, name, position in their data, and words."""

    def __init__(self, questions: Sequence[AskedQuestion]) -> None:
        self.questions = questions
        self._by_benchmark: dict[str, list[AskedQuestion]] = defaultdict(list)
        for question in questions:
            self._by_benchmark[question.benchmark].append(question)
        self._joined: dict[str | None, tuple[str, list[int], list[AskedQuestion]]] = {}

    def of(self, benchmark: str | None) -> list[AskedQuestion]:
        """Returns the questions of a benchmark, of its parts (`mmlu` has `mmlu_anatomy`), or of a pattern; or all."""
        if benchmark is None:
            return list(self.questions)
        return [
            question
            for name, asked in self._by_benchmark.items()
            if name == benchmark or name.startswith((f"{benchmark}_", f"{benchmark}:")) or fnmatchcase(name, benchmark)
            for question in asked
        ]

    def named(self, name: str, *, benchmark: str | None) -> list[AskedQuestion]:
        """Returns the questions with a name, or with a position in their data, with which lm-eval's names begin."""
        return [
            question
            for question in self.of(benchmark)
            if question.id == name or (name.isdecimal() and question.id.startswith(f"{name}-"))
        ]

    def holding(self, text: str, *, benchmark: str | None) -> list[AskedQuestion]:
        """Returns the questions that contain the words of `text` consecutively."""
        if benchmark not in self._joined:
            among = self.of(benchmark)
            starts = list(accumulate((len(question.text) + 3 for question in among), initial=0))
            self._joined[benchmark] = "".join(f" {question.text} \n" for question in among), starts, among
        joined, starts, among = self._joined[benchmark]
        questions: dict[int, AskedQuestion] = {}
        at = joined.find(f" {text} ") if text else -1
        while at >= 0:
            number = bisect_right(starts, at) - 1
            questions[number] = among[number]
            at = joined.find(f" {text} ", starts[number + 1])
        return list(questions.values())


def import_flags(
    evaluation_path: str,
    name: str,
    files: Sequence[str],
    questions: Sequence[AskedQuestion],
    *,
    tool: Tool,
    benchmark: str | None = None,
    covers: Sequence[str] = (),
) -> Flags:
    """Writes the findings of another tool next to the records.

    Args:
        files: the tool's output: files, patterns or folders.
        questions: every question in the records.
        benchmark: the benchmark of a plain list.
        covers: benchmarks or patterns of which the tool reports matches only: their other questions are clean. All
            other questions without a finding were not searched for.
    """
    asked = QuestionLookup(questions)
    flags: dict[tuple[str, str, str], QuestionFlag] = {}
    for question in (question for each in covers for question in asked.of(each)):
        flags[question.benchmark, question.id, question.digest] = _flag(question, {"flagged": False})
    unknown = 0
    for among, fields in {"decon": _decon, "marin": _marin, "list": _list}[tool](files, asked, benchmark):
        unknown += not among
        for flag in (_flag(question, fields) for question in among):
            key = flag.benchmark, flag.id, flag.text
            standing = flags.get(key, flag)
            if (flag.flagged, flag.score or 0.0) >= (standing.flagged, standing.score or 0.0):
                flags[key] = flag
    search = Search(
        name=name,
        tool=tool,
        version=versions()["assay"],
        created=now(),
        texts=tuple(files),
        unknown=unknown,
        questions=len(flags),
        flagged=sum(flag.flagged for flag in flags.values()),
    )
    return write_flags(evaluation_path, search, flags.values())


def _flag(question: AskedQuestion, fields: dict[str, Any]) -> QuestionFlag:
    return QuestionFlag(benchmark=question.benchmark, id=question.id, text=question.digest, **fields)


def _files(locations: Sequence[str], *, ending: str) -> list[str]:
    uris = []
    for location in locations:
        files = storage.matching_files(location)
        if storage.is_folder(location):
            files = [uri for uri in files if uri.endswith(ending)]
        if not files:
            raise BadInput(expected=f"files to import at {location}", found="none", remedy="check the path")
        uris += files
    return uris


def _wrong(place: str, *, expected: str, found: object) -> BadInput:
    return BadInput(expected=f"{expected} in {place}", found=str(found)[:200], remedy="correct it, and import again")


def _lines(uri: str) -> Iterator[tuple[str, str]]:
    with storage.opened(uri) as file:
        for number, line in enumerate(file, start=1):
            place = f"{uri}, line {number}"
            try:
                text = line.decode().strip()
            except UnicodeDecodeError as error:
                raise _wrong(place, expected="text in UTF-8", found=error) from error
            if text:
                yield place, text


def _objects(uri: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, line in _lines(uri):
        try:
            content = json.loads(line)
        except ValueError as error:
            raise _wrong(place, expected="a line of JSON", found=error) from error
        if not isinstance(content, dict):
            raise _wrong(place, expected="an object", found=line)
        yield place, content


def _score(value: object, place: str) -> float | None:
    if value is None or value == "":
        return None
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= 1.0:
        raise _wrong(place, expected="a score from 0 to 1", found=value)
    return number


def _decon(files: Sequence[str], asked: QuestionLookup, benchmark: str | None) -> Iterator[_Finding]:
    known: dict[tuple[str, str], list[AskedQuestion]] = {}
    for uri in _files(files, ending=".jsonl"):
        for place, line in _objects(uri):
            key, training = line.get("eval_key") or line.get("eval_dataset"), line.get("training_file")
            if not isinstance(key, str) or not isinstance(training, str):
                raise _wrong(place, expected="eval_key and training_file of a report of decon", found=list(line))
            text, number = line.get("eval_question_text"), line.get("eval_instance_index", line.get("eval_line"))
            question = str(text if text is not None else number)
            if (key, question) not in known:
                scope = benchmark or key
                known[key, question] = (
                    asked.holding(words_in([question])[0], benchmark=scope)
                    if text is not None
                    else asked.named(question, benchmark=scope)
                )
            answer = line.get("answer_overlap_ratio")
            overlap = str(line.get("training_overlap_text") or text or "")
            yield (
                known[key, question],
                {
                    "flagged": True,
                    "score": _score(line.get("contamination_score"), place),
                    "answer": None if answer is None else float(answer) == 1.0,
                    "evidence": evidence_of(f"{training}, line {line.get('training_line')}", overlap),
                },
            )


def _list(files: Sequence[str], asked: QuestionLookup, benchmark: str | None) -> Iterator[_Finding]:
    for uri in _files(files, ending=""):
        name = uri.lower()
        is_json = name.endswith((".jsonl", ".json"))
        rows = _objects(uri) if is_json else _csv_rows(uri, plain=name.endswith(".txt"))
        for place, row in ((place, _by_column(row)) for place, row in rows):
            if row.get("id") in (None, ""):
                raise _wrong(place, expected="the id of a question", found=dict(row))
            flag = str(row.get("flag", "")).strip().lower()
            if flag not in _YES | _NO | {""}:
                raise _wrong(place, expected="a flag: true or false", found=row["flag"])
            text, named = row.get("evidence"), asked.named(str(row["id"]), benchmark=row.get("benchmark") or benchmark)
            if len(several := sorted({question.benchmark for question in named})) > 1 and not row.get("benchmark"):
                raise _wrong(place, expected="a question of a single benchmark (--benchmark)", found=", ".join(several))
            yield (
                named,
                {
                    "flagged": flag not in _NO,
                    "score": _score(row.get("score"), place),
                    "evidence": evidence_of(place, str(text)) if text else None,
                },
            )


def _csv_rows(uri: str, *, plain: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    columns: Sequence[str] = ("id",) if plain else ("id", "flag", "score")
    for number, (place, line) in enumerate(_lines(uri)):
        cells = [line] if plain else [cell.strip() for cell in next(csv.reader(io.StringIO(line)))]
        if number == 0 and not plain and {cell.lower() for cell in cells} & set(_COLUMNS["id"]):
            columns = [cell.lower() for cell in cells]
            continue
        if len(cells) > len(columns):
            raise _wrong(place, expected=f"at most {len(columns)} columns ({', '.join(columns)})", found=line)
        yield place, dict(zip(columns, cells, strict=False))


def _by_column(row: Mapping[str, Any]) -> dict[str, Any]:
    lower = {str(name).lower(): value for name, value in row.items()}
    return {
        column: next(lower[name] for name in names if name in lower)
        for column, names in _COLUMNS.items()
        if any(name in lower for name in names)
    }


# Marin's datakit: its `decon.py` marks training documents by hashes of their n-grams. A document lists its hashes that
# occur in evaluation texts (`matched_hashes`); `eval_hash_index.parquet` lists the hashes that were searched for. Its
# names of evaluation records differ from question names in Assay, so the questions' n-grams are hashed in its way:
# words between white space, unchanged, within paragraphs.
def _marin(files: Sequence[str], asked: QuestionLookup, benchmark: str | None) -> Iterator[_Finding]:
    hashes = [(question, _features(question.raw)) for question in asked.of(benchmark)]
    all_hashes = set().union(*(own for _, own in hashes))
    looked_for: set[int] = set()
    matched: dict[int, str] = {}
    kinds = set()
    for uri in _files(files, ending=".parquet"):
        for columns, rows in _batches(uri):
            kinds.add("index" if "hash" in columns else "attributes")
            if "hash" in columns:
                looked_for.update(all_hashes.intersection(rows["hash"]))
                continue
            for identity, contaminated, document_hashes in zip(*(rows[column] for column in columns), strict=True):
                if contaminated:
                    for number in all_hashes.intersection(document_hashes or ()):
                        matched.setdefault(number, f"{uri}, document {identity}")
    if kinds != {"index", "attributes"}:
        raise BadInput(
            expected="attributes of Marin's datakit (id, contaminated, matched_hashes) and its eval_hash_index.parquet",
            found=f"only {kinds.pop()}" if kinds else "neither",
            remedy="name outputs/main of the step and _bloom of the step that built the filter",
        )
    for question, own in hashes:
        if known := own & looked_for:
            hits = sorted(known & matched.keys())
            share = len(hits) / len(known)
            evidence = evidence_of(matched[hits[0]], question.text) if hits else None
            yield [question], {"flagged": share >= _SHARE, "score": round(share, 4), "evidence": evidence}


def _features(text: str) -> set[int]:
    hashes = set()
    for paragraph in text.split("\n\n"):
        words = paragraph.split()
        grams = [words[at : at + _N] for at in range(len(words) - _N + 1)] or [words] * (len(words) >= _SHORT)
        hashes |= {_hash(" ".join(gram)) for gram in grams if any(map(str.isalpha, "".join(gram)))}
    return hashes


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big")


def _batches(uri: str) -> Iterator[tuple[tuple[str, ...], dict[str, list[Any]]]]:
    from pyarrow import ArrowInvalid, parquet

    with storage.opened(uri) as file:
        try:
            table = parquet.ParquetFile(file)
            names = set(table.schema_arrow.names)
            for columns in (("hash", "eval_id"), ("id", "contaminated", "matched_hashes")):
                for group in range(table.num_row_groups) if names >= set(columns) else ():
                    for batch in bounded_batches(table, file, rows=_ROWS, columns=columns, group=group):
                        yield columns, batch.to_pydict()
        except ArrowInvalid as error:
            raise BadInput(expected=f"Parquet in {uri}", found=str(error), remedy="name files of datakit") from error
