"""Seals of records: digests by which a changed record shows, and a signature where a team has a key for it."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import TYPE_CHECKING, Literal

from resources.settings import settings
from tasks.records.details import Part

if TYPE_CHECKING:
    from tasks.records.record import Record

Integrity = Literal["intact", "changed", "unknown"]
_SEALED_SINCE = 3  # version of the layout


class Digests(Part):
    """Digests of a record and of its samples, as they were when it was written."""

    samples: str | None = None
    """SHA-256 of `samples.jsonl.gz`; empty if there is no such file."""
    record: str | None = None
    """SHA-256 of all else but `sinks`, and of `samples` here: JSON with sorted keys, less fields at their defaults."""
    signature: str | None = None
    """HMAC-SHA256 of the same with the key in `ASSAY_RECORDS_KEY`; empty where there was none."""


def sealed(record: Record) -> Record:
    """Returns a record with digest and, where this machine has the key, signature of what it says now."""
    content = _content(record)
    digest = hashlib.sha256(content).hexdigest()
    digests = record.digests.model_copy(update={"record": digest, "signature": _signature(content)})
    return record.model_copy(update={"digests": digests})


def broken_seal(record: Record) -> str | None:
    """The sign that a record is not what was written, in words; None where there is none.

    With a key on this machine, a record without a signature has such a sign, older ones included.
    """
    content, kept = _content(record), record.digests
    signature = _signature(content)
    if kept.record is None and record.schema_version >= _SEALED_SINCE:
        return "record.json has no digest, which records of its version are written with"
    if kept.record is not None and kept.record != hashlib.sha256(content).hexdigest():
        return "record.json was changed after it was written: its digest is that of another content"
    if signature is None or (kept.signature and hmac.compare_digest(signature, kept.signature)):
        return None
    return "record.json " + (
        "was signed with another key, or changed" if kept.signature else "is not signed, and ASSAY_RECORDS_KEY is set"
    )


def integrity(record: Record) -> Integrity:
    """Tells by the record alone if it is what was written; unknown for one from before there were digests."""
    if broken_seal(record):
        return "changed"
    return "intact" if record.digests.record else "unknown"


def _content(record: Record) -> bytes:
    written = json.loads(record.model_dump_json(exclude={"sinks", "digests"}, exclude_defaults=True))
    written |= {"schema_version": record.schema_version, "samples_digest": record.digests.samples}
    return json.dumps(written, sort_keys=True, separators=(",", ":")).encode()


def _signature(content: bytes) -> str | None:
    key = settings().records_key
    return hmac.new(key.get_secret_value().encode(), content, hashlib.sha256).hexdigest() if key else None
