"""Scores that outlive the process, so that an interrupted evaluation resumes; for `run_levanter.py`.

A line of output announces each new file in the working folder: the caller copies it to durable storage, and back.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FOLDER = "kept"
AT_LEAST_EVERY_SECONDS = 20.0

Scored = tuple[float, bool]
"""A log-probability, and True if the continuation is the greedy choice."""


class Journal:
    """Scores of packed rows, by a digest of everything that they depend on."""

    def __init__(self, folder: Path, subject: str) -> None:
        self._folder = folder
        self._subject = subject.encode()  # model, method and devices: part of every key
        self._rows: dict[str, list[Scored]] = {}
        self._new: dict[str, list[Scored]] = {}
        self._kept_at = time.monotonic()
        self.known = 0  # requests with scores reused from the folder
        for file in sorted(folder.glob("*.json")):
            try:
                rows = json.loads(file.read_bytes())
                self._rows |= {key: [(float(score), bool(greedy)) for score, greedy in rows[key]] for key in rows}
            except (ValueError, TypeError, LookupError):
                continue  # a damaged file

    def key(self, *parts: np.ndarray) -> str:
        digest = hashlib.blake2b(self._subject, digest_size=20)
        for part in parts:
            digest.update(f"{part.dtype.str} {part.shape} ".encode() + part.tobytes())
        return digest.hexdigest()

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get(self, key: str) -> Sequence[Scored]:
        """Returns the scores of a row's requests, in order; empty if it was not scored."""
        scores = self._rows.get(key, ())
        self.known += len(scores)
        return scores

    def add(self, key: str, scores: list[Scored]) -> None:
        self._new[key] = scores

    def keep(self, *, at_once: bool) -> None:
        """Writes new scores to a file, at once, or at least 20 s after the last file."""
        if not self._new or not (at_once or time.monotonic() - self._kept_at > AT_LEAST_EVERY_SECONDS):
            return
        self._folder.mkdir(exist_ok=True)
        name = f"{next(iter(self._new))}.json"
        aside = self._folder / f"{name}.new"
        aside.write_text(json.dumps(self._new))
        aside.replace(self._folder / name)
        print(f"kept {name}", flush=True)
        self._new, self._kept_at = {}, time.monotonic()
