"""Turns at asking Ray for places: of jobs that ask for the same, one at a time, in the order in which they came.

Ray looks at placement groups that wait once a second, and at a new one at once. So whoever's turn it is asks anew when
another job has given its places back: 200 short jobs on two busy cores then take 50 s in place of 190 s.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from resources.backends.ray.placement import Placement

_SETTLING_SECONDS = 0.2  # until all nodes have heard that something was given back
_FIRST_UNDISTURBED_SECONDS, _LAST_UNDISTURBED_SECONDS = 0.05, 2.0  # a busy Ray grants late, and is to be let


class Turns:
    """Of the jobs of one controller. Use from one loop."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._given_back = asyncio.Event()
        self._given_back_at = float("-inf")

    def given_back(self) -> None:
        """Takes note that a job has released its places, and wakes those that wait."""
        self._given_back_at = asyncio.get_running_loop().time()
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
            undisturbed_seconds = _FIRST_UNDISTURBED_SECONDS
            while True:
                asking = asyncio.ensure_future(ask())
                try:
                    await self._worth_asking_anew(asking, undisturbed_seconds)
                    asking.cancel()
                    await asyncio.wait({asking})
                except asyncio.CancelledError:
                    asking.cancel()
                    asking.add_done_callback(_release)
                    raise
                if not asking.cancelled():  # the answer, even one that came this moment
                    return asking.result()
                undisturbed_seconds = min(undisturbed_seconds * 1.5, _LAST_UNDISTURBED_SECONDS)

    async def _worth_asking_anew(self, asking: asyncio.Task[Placement], undisturbed_seconds: float) -> None:
        given_back = self._given_back
        heard = asyncio.get_running_loop().time() - self._given_back_at > _SETTLING_SECONDS
        await asyncio.wait({asking}, timeout=undisturbed_seconds)
        if heard and not asking.done():
            waiting = asyncio.ensure_future(given_back.wait())
            try:
                await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()


def _release(asking: asyncio.Task[Placement]) -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result().release()
