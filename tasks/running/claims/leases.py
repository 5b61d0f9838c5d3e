"""Claims as files next to the records: of several runs that need a cell, only the claim's holder evaluates it.

    <evaluation_path>/<run>/claims/<cell>.<number>.json      created exclusively; its maker marks it released
    <evaluation_path>/<run>/claims/holders/<holder>.json     heartbeat, rewritten by its holder only

A claim is valid while its holder sends heartbeats. Once it is released or its holder is dead, it can be succeeded by a
claim with the next number; the former holder then publishes nothing. Released claims are kept for an hour: if numbers
were reused, a process with an old listing could remove another's claim. Without exclusive creation in the store, claims
are named after their holders, and after a delay the first in order stays: best effort, reported as such.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from resources.errors import AssayError
from resources.process_marks import ProcessMark, acting_user
from resources.storage import storage
from resources.storage.conditional_writes import creates_exclusively
from tasks.errors import ClaimLost
from tasks.records.details import read_model
from tasks.running.claims.files import (
    LEASE_SECONDS,
    Claim,
    ClaimFile,
    Holder,
    SeenClaim,
    Subject,
    claim_uri,
    holder_uri,
    listed_claims,
    standing_claims,
)

_BEATS_PER_LEASE = 5
_SETTLE_SECONDS = 2.0
_RELEASED_KEPT_SECONDS = 3600.0


@dataclass(frozen=True)
class Acquired:
    """The acquired keys, and the live claims of other holders; a cell that was just claimed elsewhere is in neither."""

    ours: frozenset[str]
    others: Sequence[SeenClaim]


class Claims:
    """A holder's claims, renewed in the background in a `with` block and released at its end; without `in_background`,
    call `renew`. `now` returns seconds since the epoch."""

    def __init__(
        self,
        folder: str,
        *,
        flow_run: str | None = None,
        lease_seconds: float = LEASE_SECONDS,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        process: ProcessMark | None = None,
        in_background: bool = True,
    ) -> None:
        self._folder = folder
        self._now, self._sleep = now, sleep
        self._me = Holder(
            name=f"holder-{secrets.token_hex(8)}",
            user=acting_user(),
            process=process or ProcessMark.of_this_process(),
            flow_run=flow_run,
            renewed=now(),
            lease_seconds=lease_seconds,
        )
        self._held: dict[str, tuple[Claim, str]] = {}
        self._lost: set[str] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claims", daemon=True) if in_background else None
        self.exclusive = True
        """True if the store guarantees a single holder per cell."""

    def __enter__(self) -> Claims:
        self.renew()
        self.exclusive = creates_exclusively(self._folder)
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        for key in list(self._held):
            self.release(key)
        with suppress(AssayError):  # expires with the lease
            storage.delete(holder_uri(self._folder, self._me.name))

    def acquire(self, subjects: Sequence[Subject]) -> Acquired:
        """Claims as many cells as possible, with 2 listings and a write per cell. The caller must read the record of
        each acquired cell again: another run may have finished it in between."""
        listed, heard = listed_claims(self._folder)
        keys = [subject.key for subject in subjects]
        before = {seen.claim.subject.key: seen for seen in standing_claims(self._folder, listed, heard, keys)}
        self._tidy(listed)
        standing = [seen for seen in before.values() if self._is_live(seen, heard)]
        others = [seen for seen in standing if seen.claim.holder != self._me.name]
        live = {seen.claim.subject.key for seen in standing}
        # Already acquired: created in an earlier call that failed with the store's error.
        made = {s.claim.subject.key: (s.claim, s.uri) for s in standing if s.claim.holder == self._me.name}
        for subject in subjects:
            if subject.key not in live:
                claim = self._next(subject, before.get(subject.key))
                uri = claim_uri(self._folder, claim, exclusive=self.exclusive)
                if self._create(uri, claim):
                    made[subject.key] = (claim, uri)
        if made and not self.exclusive:
            self._sleep(_SETTLE_SECONDS)
        after, heard = listed_claims(self._folder) if made else ({}, {})
        ours = set()
        for key, (claim, uri) in made.items():
            if self._is_current(uri, after.get(key, []), heard):
                with self._lock:
                    self._held[key] = (claim, uri)
                    self._lost.discard(key)
                ours.add(key)
            else:
                self._give_up(claim, uri)
        return Acquired(frozenset(ours), others)

    def raise_if_lost(self, key: str) -> None:
        """Raises ClaimLost if the claim is known to be lost; does not access the store."""
        with self._lock:
            lost = key in self._lost or key not in self._held
        if lost or self._now() > self._me.renewed + self._me.lease_seconds:
            raise _lost(key, self._folder)

    def prove(self, key: str) -> None:
        """Raises ClaimLost unless the store confirms the claim."""
        self.raise_if_lost(key)
        claim, uri = self._held[key]
        if read_model(uri, Claim) != claim or self._succeeded(uri, listed_claims(self._folder)[0].get(key, [])):
            with self._lock:
                self._lost.add(key)
        self.raise_if_lost(key)

    def release(self, key: str) -> None:
        """Releases a cell; if the store fails, the claim expires with its lease."""
        with self._lock:
            claim, uri = self._held.pop(key, (None, ""))
        if claim is not None:
            with suppress(AssayError):
                self._give_up(claim, uri)

    def _give_up(self, claim: Claim, uri: str) -> None:
        released = claim.model_copy(update={"released": True})
        storage.write_bytes(uri, released.model_dump_json().encode())

    def renew(self) -> None:
        """Sends a heartbeat, and detects lost cells."""
        me = self._me.model_copy(update={"renewed": self._now()})
        storage.write_bytes(holder_uri(self._folder, me.name), me.model_dump_json().encode())
        self._me = me
        standing = listed_claims(self._folder)[0] if self._held else {}
        with self._lock:
            for key, (_, uri) in self._held.items():
                if self._succeeded(uri, standing.get(key, [])):
                    self._lost.add(key)

    def _beat(self) -> None:
        while not self._ended.wait(self._me.lease_seconds / _BEATS_PER_LEASE):
            with suppress(AssayError):  # retried; `raise_if_lost` detects an expired lease
                self.renew()

    def _next(self, subject: Subject, standing: SeenClaim | None) -> Claim:
        me = self._me
        if standing is None:
            return Claim(subject=subject, number=1, holder=me.name, flow_run=me.flow_run, at=self._now())
        before = standing.claim
        return Claim(
            subject=subject,
            number=before.number + 1,
            holder=me.name,
            flow_run=me.flow_run,
            succeeds=before.holder,
            deaths=0 if before.released or not standing.readable else before.deaths + 1,
            at=self._now(),
        )

    def _tidy(self, listed: Mapping[str, Sequence[ClaimFile]]) -> None:
        for files in listed.values():
            old = bool(files[-1].modified) and files[-1].modified < self._now() - _RELEASED_KEPT_SECONDS
            if old and (claim := read_model(files[-1].uri, Claim)) is not None and claim.released:
                for file in files:
                    storage.delete(file.uri)

    def _create(self, uri: str, claim: Claim) -> bool:
        content = claim.model_dump_json().encode()
        if not self.exclusive:
            storage.write_bytes(uri, content)
            return True
        # If the response to a write is lost, the client retries and finds its own file.
        return storage.create_bytes(uri, content) or read_model(uri, Claim) == claim

    def _succeeded(self, uri: str, files: Sequence[ClaimFile]) -> bool:
        position = next((number for number, file in enumerate(files) if file.uri == uri), None)
        if position is None:
            return True
        if any(file.number == files[position].number for file in files[position + 1 :]):
            return True  # of two claims with the same number, the last in order stays
        later = [read_model(file.uri, Claim) for file in files[position + 1 :]]
        return any(claim is not None and claim.succeeds == self._me.name for claim in later)

    def _is_live(self, seen: SeenClaim, heard: Mapping[str, float]) -> bool:
        own = heard.get(self._me.name)
        store_now = self._now() + own - self._me.renewed if own else None
        return seen.live(self._now(), store_now=store_now)

    def _is_current(self, uri: str, files: Sequence[ClaimFile], heard: Mapping[str, float]) -> bool:
        if not files or files[-1].uri != uri:
            return False
        read = [(file, read_model(file.uri, Claim)) for file in files]
        earlier = [(file, claim) for file, claim in read if file.number < files[-1].number]
        for file, claim in earlier:
            if claim is None or claim.released:
                continue
            if any(
                other is not None and other.succeeds == claim.holder and at.number > file.number for at, other in read
            ):
                continue  # its holder detects that too
            holder = read_model(holder_uri(self._folder, claim.holder), Holder)
            if self._is_live(SeenClaim(claim, file.uri, holder, heard.get(claim.holder, 0.0)), heard):
                return False
        for file, _ in earlier:
            storage.delete(file.uri)
        return True


def _lost(key: str, folder: str) -> ClaimLost:
    return ClaimLost(
        expected=f"a valid claim of {key}",
        found=f"its claim in {folder} was ended, succeeded or not renewed in time",
        remedy="`assay status --gaps` shows its holder; answers so far are in the journal",
    )
