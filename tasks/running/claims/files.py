"""The files of claims: content, location, and which claim of a cell is current."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ConfigDict

from resources.config import Config
from resources.process_marks import ProcessMark
from resources.storage import storage
from tasks.records.details import Timestamp, read_model

LEASE_SECONDS = 120.0
"""Time that a claim is valid after its holder's last heartbeat."""
CLOCKS_DIFFER_SECONDS = 10.0
"""Tolerated difference between the clocks of two machines."""
_FOLDER = "claims"
_HOLDERS = "holders"


class _Written(Config):
    model_config = ConfigDict(extra="ignore")


class Subject(_Written):
    """A cell, described without reading the checkpoint: for lists of claims."""

    key: str
    """The cell: its step and the name of its folder."""
    checkpoint: str
    """Name of the checkpoint."""
    evaluation_hash: str
    """Hash of the planned evaluation."""
    listing: str | None = None
    """Listing digest of the checkpoint's files."""


class Claim(_Written):
    """A holder's claim of a cell."""

    subject: Subject
    """The cell."""
    number: int
    """The number of the claim that it succeeds, plus 1."""
    holder: str
    """Name of its holder."""
    flow_run: str | None = None
    """Prefect flow run that made it; remains known after the holder's file is deleted."""
    succeeds: str | None = None
    """Holder of the previous claim, which was found dead."""
    deaths: int = 0
    """Consecutive holders that died while evaluating the cell."""
    released: bool = False
    """True once it was given up, so that the cell can be claimed at once."""
    at: Timestamp
    """Time it was made, seconds since the epoch."""


class Holder(_Written):
    """A process that claims, with its last heartbeat."""

    name: str
    """Name of its file, random."""
    user: str
    """Account that it runs under."""
    process: ProcessMark
    """Machine and process, by which others on the same machine detect that it has ended."""
    flow_run: str | None = None
    """Its Prefect flow run, if any."""
    renewed: Timestamp
    """Last heartbeat, seconds since the epoch."""
    lease_seconds: float
    """Time that a heartbeat is valid."""

    def until(self) -> float:
        """Returns when its claims expire without another heartbeat, with tolerance for differing clocks."""
        return self.renewed + self.lease_seconds + CLOCKS_DIFFER_SECONDS


@dataclass(frozen=True)
class SeenClaim:
    """A claim and its holder as read; the holder is None if its file is gone. `heard` is when the store received the
    last heartbeat, by its own clock, or 0.0. If not `readable`, the file is no valid claim, and the time is the
    file's."""

    claim: Claim
    uri: str
    holder: Holder | None
    heard: float = 0.0
    readable: bool = True

    def until(self) -> float:
        """Returns when it expires without another heartbeat: by its holder's clock, or earlier by the store's."""
        if self.holder is None:
            return self.claim.at + LEASE_SECONDS + CLOCKS_DIFFER_SECONDS
        latest = self.heard + self.holder.lease_seconds + CLOCKS_DIFFER_SECONDS
        return min(self.holder.until(), latest) if self.heard else self.holder.until()

    def live(self, now: float, *, store_now: float | None = None) -> bool:
        """Returns True if its holder still counts as running; `store_now` is used for heartbeats in the future."""
        at_store = now if store_now is None else store_now
        if not self.readable:
            return self.claim.at <= at_store + CLOCKS_DIFFER_SECONDS and at_store < self.until()
        if self.claim.released or self.holder is None or self.holder.process.has_ended():
            return False
        if self.holder.renewed <= now + CLOCKS_DIFFER_SECONDS:
            return now < self.holder.until()
        if 0.0 < self.heard <= at_store + CLOCKS_DIFFER_SECONDS:
            return at_store < self.until()
        return self.holder.process.is_here()

    def died(self, now: float) -> bool:
        return not self.claim.released and not self.live(now)


def claims_folder(evaluation_path: str, run: str) -> str:
    """Returns the folder with the claims of a run's cells."""
    return storage.join(evaluation_path, run, _FOLDER)


def read_claims(folder: str, keys: Iterable[str] | None = None) -> list[SeenClaim]:
    """Returns the current claims of some cells, or of all; 1 listing, and a read per claim."""
    return standing_claims(folder, *listed_claims(folder), keys)


def standing_claims(
    folder: str, by_key: Mapping[str, Sequence[ClaimFile]], heard: Mapping[str, float], keys: Iterable[str] | None
) -> list[SeenClaim]:
    """Returns the current claims in a listing, of some cells or of all, with their holders; a read per claim."""
    holders: dict[str, Holder | None] = {}
    claims = []
    for key in by_key if keys is None else (key for key in keys if key in by_key):
        file = by_key[key][-1]
        claim = read_model(file.uri, Claim)
        if claim is None:
            claims.append(_unreadable(key, file))
            continue
        # The name of a copied or renamed file counts; otherwise no claim could ever succeed it.
        subject = claim.subject.model_copy(update={"key": key})
        claim = claim.model_copy(update={"subject": subject, "number": file.number})
        if claim.holder not in holders:
            holders[claim.holder] = read_model(holder_uri(folder, claim.holder), Holder)
        claims.append(SeenClaim(claim, file.uri, holders[claim.holder], heard.get(claim.holder, 0.0)))
    return claims


def _unreadable(key: str, file: ClaimFile) -> SeenClaim:
    exists = storage.exists(file.uri)  # else it was just removed, or is a dangling link
    subject = Subject(key=key, checkpoint="", evaluation_hash="")
    claim = Claim(subject=subject, number=file.number, holder="nobody", released=not exists, at=file.modified)
    return SeenClaim(claim, file.uri, None, readable=not exists)


def end_claim(seen: SeenClaim) -> bool:
    """Ends a claim, which its holder detects at its next heartbeat; returns False if it was succeeded meanwhile."""
    claim = seen.claim
    ended = Claim(
        subject=claim.subject,
        number=claim.number + 1,
        holder="nobody",
        succeeds=claim.holder,
        released=True,
        at=time.time(),
    )
    folder = storage.parent(seen.uri)
    return storage.create_bytes(claim_uri(folder, ended, exclusive=True), ended.model_dump_json().encode())


@dataclass(frozen=True, order=True)
class ClaimFile:
    """A claim's file by its name; the last in order is the current claim."""

    number: int
    loses_to: tuple[int, ...]
    uri: str
    modified: float


def listed_claims(folder: str) -> tuple[dict[str, list[ClaimFile]], dict[str, float]]:
    """Returns the files of claims by cell, the current claim last, and last heartbeats by holder in store time."""
    files: dict[str, list[ClaimFile]] = defaultdict(list)
    heard: dict[str, float] = {}
    holders = storage.join(folder, _HOLDERS)
    for file in storage.list_files(folder):
        name = storage.basename(file.uri)
        if storage.parent(file.uri) == holders:
            heard[name.removesuffix(".json")] = file.modified
        if storage.parent(file.uri) != folder.rstrip("/") or not name.endswith(".json"):
            continue
        parts = name.removesuffix(".json").rsplit(".", 2)
        holder = parts.pop() if len(parts) == 3 and not parts[2].isdecimal() else ""
        key, _, number = ".".join(parts).rpartition(".")
        if number.isdecimal():
            # If two claims have the same number, possible only without exclusive creation, the first name wins.
            files[key].append(ClaimFile(int(number), tuple(-ord(letter) for letter in holder), file.uri, file.modified))
    return {key: sorted(listed) for key, listed in files.items()}, heard


def claim_uri(folder: str, claim: Claim, *, exclusive: bool) -> str:
    """Returns the file of a claim; its name includes the holder where the store has no exclusive creation."""
    holder = "" if exclusive else f".{claim.holder}"
    return storage.join(folder, f"{claim.subject.key}.{claim.number}{holder}.json")


def holder_uri(folder: str, name: str) -> str:
    """Returns the file of a holder's heartbeats."""
    return storage.join(folder, _HOLDERS, f"{name}.json")
