"""Reads the findings of Marin's datakit: its `decon.py` marks training documents by hashes of their n-grams.

A document lists its hashes that occur in evaluation texts (`matched_hashes`); `eval_hash_index.parquet` lists the
hashes that were searched for. Its names of evaluation records differ from question names in Assay, so the questions'
n-grams are hashed in datakit's way: words between white space, unchanged, within paragraphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from resources.errors import BadInput
from resources.storage import storage
from resources.storage.parquet_batches import bounded_batches
from tasks.records.questions.asked import AskedQuestion

N = 13
"""Words of an n-gram."""
SHARE = 0.5
"""Minimum share of n-grams at which datakit calls a paragraph contaminated; used for questions in Assay."""
_SHORT = 3  # minimum words of a paragraph
_ROWS = 4096


def found_by_hashes(
    files: Sequence[str], questions: Sequence[AskedQuestion]
) -> Iterator[tuple[AskedQuestion, float, str]]:
    """Yields each searched question with the share of its n-grams in contaminated documents, and such a document.
    `files` are datakit's Parquet files, attributes and the index of hashes; other files are ignored."""
    hashes = [features(question.raw) for question in questions]
    all_hashes = set().union(*hashes)
    looked_for: set[int] = set()
    matched: dict[int, str] = {}
    kinds = set()
    for uri in files:
        for columns, rows in _batches(uri):
            kinds.add("index" if "hash" in columns else "attributes")
            if "hash" in columns:
                looked_for.update(all_hashes.intersection(rows["hash"]))
                continue
            for identity, contaminated, document_hashes in zip(
                rows["id"], rows["contaminated"], rows["matched_hashes"], strict=True
            ):
                if contaminated:
                    for number in all_hashes.intersection(document_hashes or ()):
                        matched.setdefault(number, f"{uri}, document {identity}")
    if kinds != {"index", "attributes"}:
        raise BadInput(
            expected="attributes of Marin's datakit (id, contaminated, matched_hashes) and its eval_hash_index.parquet",
            found=f"only {kinds.pop()}" if kinds else "neither",
            remedy="name outputs/main of the step and _bloom of the step that built the filter",
        )
    for question, own in zip(questions, hashes, strict=True):
        if known := own & looked_for:
            hits = sorted(known & matched.keys())
            yield question, len(hits) / len(known), matched[hits[0]] if hits else ""


def features(text: str) -> set[int]:
    """Returns the hashes of a text's n-grams; paragraphs of at least 3 words, but less than an n-gram, count whole."""
    hashes = set()
    for paragraph in text.split("\n\n"):
        words = paragraph.split()
        grams = [words[at : at + N] for at in range(len(words) - N + 1)] or [words] * (len(words) >= _SHORT)
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
