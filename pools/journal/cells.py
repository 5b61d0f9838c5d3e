"""Occurrences: the index of a sampled request among identical requests of the same attempt at a cell."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CellScope:
    """An attempt at evaluating a cell; sampled answers are replayed to later attempts at the same cell."""

    cell: str
    attempt: str


class Attempt:
    """The taken occurrences of each request in an attempt; `taken` were answered already, before a restart."""

    def __init__(self, scope: CellScope, taken: Iterable[tuple[bytes, int]] = ()) -> None:
        self.scope = scope
        self.open = True
        self._next: dict[bytes, int] = {}
        self._free: dict[bytes, list[int]] = {}
        before: defaultdict[bytes, set[int]] = defaultdict(set)
        for key, occurrence in taken:
            before[key].add(occurrence)
        for key, occurrences in before.items():
            self._next[key] = max(occurrences) + 1
            if gaps := sorted(set(range(self._next[key])) - occurrences):
                self._free[key] = gaps

    def take(self, key: bytes) -> int:
        """Returns the lowest free occurrence of a request."""
        if key in self._free:
            free = self._free[key]
            lowest = heapq.heappop(free)
            if not free:
                del self._free[key]
            return lowest
        occurrence = self._next.get(key, 0)
        self._next[key] = occurrence + 1
        return occurrence

    def give_back(self, key: bytes, occurrence: int) -> None:
        heapq.heappush(self._free.setdefault(key, []), occurrence)
