"""Finding out whether a replica that a connection failed to answers again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from pools.proxy.routing import Replica
from pools.proxy.state import ProxyLimits


class Probes:
    """One task per suspect replica that asks its `/health` until it answers 200.

    Args:
        session: to ask with.
        limits: how often and how long to ask.
        on_recovery: called when a replica answers, after it stopped being a suspect.
    """

    def __init__(self, session: aiohttp.ClientSession, *, limits: ProxyLimits, on_recovery: Callable[[], None]) -> None:
        self._session = session
        self._limits = limits
        self._on_recovery = on_recovery
        self._timeout = aiohttp.ClientTimeout(total=limits.probe_timeout_seconds)
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    def watch(self, replica: Replica) -> None:
        """Starts to ask a suspect, unless that is being done."""
        if replica.state == "ready" and replica not in self._tasks:
            self._tasks[replica] = asyncio.create_task(self._ask_until_it_answers(replica))

    def drop_settled(self) -> None:
        """Stops asking replicas that the pool has vouched for, or taken away."""
        for replica, task in list(self._tasks.items()):
            if not replica.suspect or replica.state != "ready":
                task.cancel()
                del self._tasks[replica]

    async def close(self) -> None:
        """Stops asking altogether."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_until_it_answers(self, replica: Replica) -> None:
        while not await self._answers(replica):
            await asyncio.sleep(self._limits.probe_interval_seconds)
        del self._tasks[replica]
        replica.suspect = False
        self._on_recovery()

    async def _answers(self, replica: Replica) -> bool:
        try:
            async with self._session.get(f"{replica.url}/health", timeout=self._timeout) as reply:
                return reply.status == 200
        except (aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            return False
