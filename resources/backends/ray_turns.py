"""Turns at asking Ray for places: of jobs that ask for the same, one at a time, in the order in which they came.

Ray looks at placement groups that wait once a second, and at a new one at once. So whoever's turn it is asks anew when
another job has given its places back: 200 short jobs on two cores then take 30 s in place of 190 s.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from resources.backends.ray_placement import Placement

_SETTLING_SECONDS = (0.05, 0.2, None)  # nodes hear a moment later that something was given back


class Turns:
    """Of the jobs of one keeper. Use from one loop."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._given_back = asyncio.Event()

    def given_back(self) -> None:
        """Some job has released its places."""
        self._given_back.set()
        self._given_back = asyncio.Event()

    async def placed(
        self,
        shape: str,
        ask: Callable[[], Coroutine[Any, Any, Placement]],
        *,
        on_waiting: Callable[[str], None],
    ) -> Placement:
        """The places of one job; cancelling it gives back what was reserved.

        Args:
            shape: what is asked for; equal for jobs that ask for the same.
            ask: asks Ray for it, for as long as it takes.
            on_waiting: told if others have to be served first.
        """
        turn = self._turns[shape]
        if turn.locked():
            on_waiting("waits behind jobs that ask for the same")
        async with turn:
            pauses = iter(_SETTLING_SECONDS)
            while True:
                given_back, pause = self._given_back, next(pauses, None)
                asking = asyncio.ensure_future(ask())
                waiting = asyncio.ensure_future(given_back.wait())
                try:
                    await asyncio.wait({asking, waiting}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                except asyncio.CancelledError:
                    with suppress(asyncio.CancelledError):
                        (await _taken_back(asking)).release()
                    raise
                finally:
                    waiting.cancel()
                with suppress(asyncio.CancelledError):
                    return await _taken_back(asking)
                if given_back.is_set():
                    pauses = iter(_SETTLING_SECONDS)


async def _taken_back(asking: asyncio.Task[Placement]) -> Placement:
    """The answer if there is one, even one that came this moment; else a CancelledError."""
    if not asking.done():
        asking.cancel()
    return await asking
