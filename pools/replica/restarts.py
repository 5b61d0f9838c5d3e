"""Restarts of what dies: so many in ten minutes, however long it has been there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW_SECONDS = 600.0


class Restarts:
    """The latest deaths of an agent or an engine.

    Args:
        most: deaths in ten minutes that are followed by a restart.
        clock: seconds that never go back.
    """

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._deaths: deque[float] = deque()

    def allow(self) -> bool:
        """Notes a death; whether a restart may follow."""
        now = self._clock()
        self._deaths.append(now)
        while self._deaths[0] <= now - _WINDOW_SECONDS:
            self._deaths.popleft()
        return len(self._deaths) <= self._most

    @property
    def last(self) -> str:
        """The last death among those of ten minutes, in words."""
        return f"for the {len(self._deaths)}. time in ten minutes"
