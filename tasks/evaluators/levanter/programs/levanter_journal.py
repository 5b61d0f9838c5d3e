"""Scores that outlive the process, so that an evaluation that was interrupted goes on; for `run_levanter.py`.

They lie in files of the working folder. Each time that there is a new one a line says so, and whoever runs the program
copies it to where it is safe, and back before the program is started again.
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
"""A log-probability, and whether the continuation is the greedy choice."""


class Journal:
    """Scores of rows, by a digest of all that they depend on.

    `known` is the number of requests whose scores were found in the folder and used.
    """

    def __init__(self, folder: Path, subject: str) -> None:
        """Reads what is there; files that are damaged are left out.

        Args:
            folder: place of the files.
            subject: what computes, and how: of the same weights, scores of another subject are others.
        """
        self._folder = folder
        self._subject = subject.encode()
        self._rows: dict[str, list[Scored]] = {}
        self._new: dict[str, list[Scored]] = {}
        self._kept_at = time.monotonic()
        self.known = 0
        for file in sorted(folder.glob("*.json")):
            try:
                rows = json.loads(file.read_bytes())
                self._rows |= {key: [(float(score), bool(greedy)) for score, greedy in rows[key]] for key in rows}
            except (ValueError, TypeError, LookupError):
                continue

    def key(self, *parts: np.ndarray) -> str:
        """The name of a row that consists of these arrays."""
        digest = hashlib.blake2b(self._subject, digest_size=20)
        for part in parts:
            digest.update(f"{part.dtype.str} {part.shape} ".encode() + part.tobytes())
        return digest.hexdigest()

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def get(self, key: str) -> Sequence[Scored]:
        """Scores of a row's requests, in order; none where it was not scored."""
        scores = self._rows.get(key, ())
        self.known += len(scores)
        return scores

    def add(self, key: str, scores: list[Scored]) -> None:
        """Takes the scores of a row's requests, to be kept with the next file."""
        self._new[key] = scores

    def keep(self, *, at_once: bool) -> None:
        """Writes what is new, if it is to be safe at once, or was not for a while."""
        if not self._new or not (at_once or time.monotonic() - self._kept_at > AT_LEAST_EVERY_SECONDS):
            return
        self._folder.mkdir(exist_ok=True)
        name = f"{next(iter(self._new))}.json"
        aside = self._folder / f"{name}.new"
        aside.write_text(json.dumps(self._new))
        aside.replace(self._folder / name)
        print(f"kept {name}", flush=True)
        self._new, self._kept_at = {}, time.monotonic()
