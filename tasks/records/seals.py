"""Seals of records: digests that reveal changes, and a signature if the team has a key."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Literal, Protocol

from resources.settings import settings
from tasks.records.details import Digests


class Sealed(Protocol):
    """A record, as far as its seal is concerned."""

    @property
    def schema_version(self) -> int: ...
    @property
    def digests(self) -> Digests: ...
    def model_dump_json(self, *, exclude: set[str], exclude_defaults: bool) -> str: ...


def seal(record: Sealed) -> Digests:
    """Returns the record's digests with a digest of its content and, if this machine has the key, a signature."""
    content = _content(record)
    digest = hashlib.sha256(content).hexdigest()
    return record.digests.model_copy(update={"record": digest, "signature": _signature(content)})


def broken_seal(record: Sealed) -> str | None:
    """Returns the evidence that a record was changed, formatted; None if there is none.

    If this machine has a key, a missing signature is evidence too.
    """
    content, kept = _content(record), record.digests
    signature = _signature(content)
    if kept.record is None:
        return "record.json has no digest, which records are written with"
    if kept.record != hashlib.sha256(content).hexdigest():
        return "record.json was changed after it was written: its digest is that of another content"
    if signature is None or (kept.signature and hmac.compare_digest(signature, kept.signature)):
        return None
    return "record.json " + (
        "was signed with another key, or changed" if kept.signature else "is not signed, and ASSAY_RECORDS_KEY is set"
    )


def integrity(record: Sealed) -> Literal["intact", "changed"]:
    """Returns the integrity of a record by its own digests."""
    return "changed" if broken_seal(record) else "intact"


def _content(record: Sealed) -> bytes:
    written = json.loads(record.model_dump_json(exclude={"sinks", "digests"}, exclude_defaults=True))
    written |= {"schema_version": record.schema_version, "samples_digest": record.digests.samples}
    return json.dumps(written, sort_keys=True, separators=(",", ":")).encode()


def _signature(content: bytes) -> str | None:
    key = settings().records_key
    return hmac.new(key.get_secret_value().encode(), content, hashlib.sha256).hexdigest() if key else None
