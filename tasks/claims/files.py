"""The files that claims are made of: what stands in them, where they lie, and which one stands for a cell."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from resources.config import Config
from resources.errors import IrregularFile
from resources.storage import storage
from tasks.claims.process_marks import ProcessMark

LEASE_SECONDS = 120.0
"""Time that a claim holds after the last sign of life of its holder."""
CLOCKS_DIFFER_SECONDS = 10.0
"""Difference between the clocks of two machines that is taken for none."""
_FOLDER = "claims"
_HOLDERS = "holders"
Timestamp = Annotated[float, Field(ge=0, lt=253402300800)]
"""Time in seconds since the epoch, before the year 10000."""
_Kind = TypeVar("_Kind", bound=Config)


class _Written(Config):
    """The content of a file; fields of a newer version are ignored."""

    model_config = ConfigDict(extra="ignore")


class Subject(_Written):
    """A cell in words that need no look at the checkpoint: for lists of claims."""

    key: str
    """The cell: its step and the name of its folder."""
    checkpoint: str
    """Name of the checkpoint."""
    evaluation_hash: str
    """Of the evaluation that was planned."""
    listing: str | None = None
    """The checkpoint's state, as a listing tells it."""


class Claim(_Written):
    """One holder's claim of one cell."""

    subject: Subject
    """The cell."""
    number: int
    """One more than the claim that it succeeds."""
    holder: str
    """Name of its holder."""
    flow_run: str | None = None
    """Flow run at the Prefect server that it was made by: known when the file of its holder is gone too."""
    succeeds: str | None = None
    """Holder of the claim with the number before, which was found dead."""
    deaths: int = 0
    """Holders in a row that died with the cell in their hands."""
    released: bool = False
    """True once it was given up, so that the next one may have the cell at once."""
    at: Timestamp
    """Time it was made, seconds since the epoch."""


class Holder(_Written):
    """A process that claims, and when it was last heard of."""

    name: str
    """Name of its file, made up at the start."""
    user: str
    """Account that it runs under."""
    process: ProcessMark
    """Machine and process, by which others on the same machine see that it has ended."""
    flow_run: str | None = None
    """Its flow run at the Prefect server, where it is one."""
    renewed: Timestamp
    """Last sign of life, seconds since the epoch."""
    lease_seconds: float
    """Time that this holds."""

    def until(self) -> float:
        """Time at which its claims end if nothing more is heard, on a clock that may differ from its own."""
        return self.renewed + self.lease_seconds + CLOCKS_DIFFER_SECONDS


@dataclass(frozen=True)
class SeenClaim:
    """A claim and its holder, as found; the holder is None where its file is gone.

    `heard` is when the store had the holder's last sign of life, by the store's time; 0.0 where it does not say. One
    that is not `readable` stands for a file that is no claim; its time is that of the file.
    """

    claim: Claim
    uri: str
    holder: Holder | None
    heard: float = 0.0
    readable: bool = True

    def until(self) -> float:
        """Time at which it ends if nothing more is heard: by its holder's clock, but not later than by the store's."""
        if self.holder is None:
            return self.claim.at + LEASE_SECONDS + CLOCKS_DIFFER_SECONDS
        latest = self.heard + self.holder.lease_seconds + CLOCKS_DIFFER_SECONDS
        return min(self.holder.until(), latest) if self.heard else self.holder.until()

    def live(self, now: float, *, store_now: float | None = None) -> bool:
        """Tells if its holder still counts as being at work.

        Args:
            now: time, by this machine's clock.
            store_now: time by the store's clock, where it is known. It decides where a sign of life is of the future.
        """
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
        """Tells if its holder is gone and has not given it up."""
        return not self.claim.released and not self.live(now)


def claims_folder(evaluation_path: str, run: str) -> str:
    """The folder with the claims of a run's cells."""
    return storage.join(evaluation_path, run, _FOLDER)


def read_claims(folder: str, keys: Iterable[str] | None = None) -> list[SeenClaim]:
    """The standing claim of each cell that has one, of some cells or of all; one listing, and a read for each."""
    return standing_claims(folder, *listed_claims(folder), keys)


def standing_claims(
    folder: str, by_key: Mapping[str, Sequence[ClaimFile]], heard: Mapping[str, float], keys: Iterable[str] | None
) -> list[SeenClaim]:
    """The last claim of each cell of a listing, of some cells or of all, with its holder; a read for each."""
    holders: dict[str, Holder | None] = {}
    found = []
    for key in by_key if keys is None else (key for key in keys if key in by_key):
        file = by_key[key][-1]
        claim = read_file(file.uri, Claim)
        if claim is None:
            found.append(_unreadable(key, file))
            continue
        # A copied or renamed file stands for what its name says, else none could ever succeed it.
        subject = claim.subject.model_copy(update={"key": key})
        claim = claim.model_copy(update={"subject": subject, "number": file.number})
        if claim.holder not in holders:
            holders[claim.holder] = read_file(holder_uri(folder, claim.holder), Holder)
        found.append(SeenClaim(claim, file.uri, holders[claim.holder], heard.get(claim.holder, 0.0)))
    return found


def _unreadable(key: str, file: ClaimFile) -> SeenClaim:
    there = storage.exists(file.uri)  # else it was removed just now, or is a link that leads nowhere
    subject = Subject(key=key, checkpoint="", evaluation_hash="")
    claim = Claim(subject=subject, number=file.number, holder="nobody", released=not there, at=file.modified)
    return SeenClaim(claim, file.uri, None, readable=not there)


def end_claim(seen: SeenClaim) -> bool:
    """Takes a cell away from whoever has it, who notices with its next sign of life, and publishes nothing.

    Returns:
        False if its holder changed meanwhile.
    """
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
    """A claim's file by its name: the last in order is the one that stands."""

    number: int
    loses_to: tuple[int, ...]
    uri: str
    modified: float


def claims_by_key(folder: str) -> dict[str, list[ClaimFile]]:
    """Files of claims by cell, the one that stands last."""
    return listed_claims(folder)[0]


def listed_claims(folder: str) -> tuple[dict[str, list[ClaimFile]], dict[str, float]]:
    """Files of claims by cell, the one that stands last; and when the store heard of each holder, by its own time."""
    found: dict[str, list[ClaimFile]] = defaultdict(list)
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
            # Of two with one number, which only a store without exclusive writes lets stand, the first name wins.
            found[key].append(ClaimFile(int(number), tuple(-ord(letter) for letter in holder), file.uri, file.modified))
    return {key: sorted(files) for key, files in found.items()}, heard


def read_file(uri: str, kind: type[_Kind]) -> _Kind | None:
    """Reads a file; None where it is gone, or cannot be understood."""
    try:
        return kind.model_validate_json(storage.read_bytes(uri))
    except (FileNotFoundError, IrregularFile, ValidationError):
        return None


def claim_uri(folder: str, claim: Claim, *, exclusive: bool) -> str:
    """The file of a claim; its name says whose it is where the store cannot keep two from making it."""
    holder = "" if exclusive else f".{claim.holder}"
    return storage.join(folder, f"{claim.subject.key}.{claim.number}{holder}.json")


def holder_uri(folder: str, name: str) -> str:
    """The file in which a holder shows signs of life."""
    return storage.join(folder, _HOLDERS, f"{name}.json")
