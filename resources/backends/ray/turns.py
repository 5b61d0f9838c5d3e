"""Turns at requesting places from Ray: jobs with equal requests ask one at a time, in order of arrival.

Ray checks waiting placement groups once per second, but new groups at once. So the job with the turn repeats its
request when another job has released its places: 200 short jobs on two busy cores then take 50 s instead of 190 s.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from resources.backends.ray.placement import Placement

_SETTLING_SECONDS = 0.2  # until all nodes have registered a release
_FIRST_UNDISTURBED_SECONDS, _LAST_UNDISTURBED_SECONDS = 0.05, 2.0  # a busy Ray grants late, and needs time to do so


class Turns:
    """Turns of the jobs of a controller. Use from a single event loop."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._given_back = asyncio.Event()
        self._given_back_at = float("-inf")

    def given_back(self) -> None:
        """Records that a job has released its places, and wakes the waiting jobs."""
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
        """Waits for a turn, requests places and returns them. Cancelling releases the reservation.

        Args:
            shape: equal for jobs with equal requests.
            on_waiting: called with the reason if other jobs come first.
        """
        turn = self._turns[shape]
        if turn.locked():
            on_waiting("waits behind jobs that ask for the same")
        async with turn:
            undisturbed_seconds = _FIRST_UNDISTURBED_SECONDS
            while True:
                asking = asyncio.ensure_future(ask())
                try:
                    await self._wait_for_retry(asking, undisturbed_seconds)
                    asking.cancel()
                    await asyncio.wait({asking})
                except asyncio.CancelledError:
                    asking.cancel()
                    asking.add_done_callback(_release)
                    raise
                if not asking.cancelled():  # a result, even if it arrived during the cancellation
                    return asking.result()
                undisturbed_seconds = min(undisturbed_seconds * 1.5, _LAST_UNDISTURBED_SECONDS)

    async def _wait_for_retry(self, asking: asyncio.Task[Placement], undisturbed_seconds: float) -> None:
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
