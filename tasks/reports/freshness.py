"""Fingerprint in the last line of a report: the page is rewritten only if its content would change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from resources.errors import IrregularFile
from resources.storage import storage
from tasks.records.builds import Qualification
from tasks.records.record import Record
from tasks.records.seals import integrity
from tasks.reports.texts import links_of

_DRAWN_BY = ("matplotlib", "jinja2")
_MARK = b"\n<!-- made from "
_SOURCES = (".py", ".j2", ".yaml")


def fingerprint(
    records: Sequence[Record],
    *,
    title: str,
    records_at: str | None,
    page: str,
    qualifications: Sequence[Qualification],
    others: Sequence[str] = (),
) -> str:
    """Returns a digest of everything on a page, and of the code that renders it; arguments as in `render_report`.

    `others` are digests of contamination flags, acknowledgements and early verdicts.
    """
    digest = hashlib.sha256(_code())
    shown = [title]
    for record in records:
        links = links_of(record, records_at=records_at, page=page)
        shown += [record.model_dump_json(), integrity(record), repr(links)]
    shown += [*(qualification.model_dump_json() for qualification in qualifications), *others]
    for text in shown:
        digest.update(hashlib.sha256(text.encode(errors="surrogatepass")).digest())
    return digest.hexdigest()


def marked(page: str, made_from: str) -> bytes:
    """Appends the line that `is_fresh` checks: the fingerprint and the page's own digest."""
    text = page.encode()
    return text + _MARK + f"{made_from}, page {hashlib.sha256(text).hexdigest()} -->\n".encode()


def is_fresh(uri: str, made_from: str) -> bool:
    """Returns True if the page at `uri` has this fingerprint and is complete and unchanged."""
    try:
        held = storage.read_bytes(uri)
    except (FileNotFoundError, IrregularFile):
        return False
    page = held.rpartition(_MARK)[0]
    return held == marked(page.decode(errors="replace"), made_from)


@cache
def _code() -> bytes:
    tasks = Path(__file__).parents[1]
    digest = hashlib.sha256(" ".join(map(version, _DRAWN_BY)).encode())
    for file in sorted(file for file in tasks.rglob("*") if file.suffix in _SOURCES):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()
