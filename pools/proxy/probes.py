"""Probes replicas to which a connection failed until they answer again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pools.protocol import ProxyLimits
from pools.proxy.connections.upstream import Lost, TimedOut, Upstream
from pools.proxy.routing import RoutedReplica


class Probes:
    """Polls `/health` of each suspect replica until it answers 200; then calls `on_recovery`."""

    def __init__(self, upstream: Upstream, *, limits: ProxyLimits, on_recovery: Callable[[], None]) -> None:
        self._upstream = upstream
        self._limits = limits
        self._on_recovery = on_recovery
        self._tasks: dict[RoutedReplica, asyncio.Task[None]] = {}

    def watch(self, replica: RoutedReplica) -> None:
        if _is_worth_asking(replica) and replica not in self._tasks:
            self._tasks[replica] = asyncio.create_task(self._ask_until_it_answers(replica))

    def drop_settled(self) -> None:
        for replica, task in list(self._tasks.items()):
            if not replica.suspect or not _is_worth_asking(replica):
                task.cancel()
                del self._tasks[replica]

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_until_it_answers(self, replica: RoutedReplica) -> None:
        while not await self._answers(replica):
            await asyncio.sleep(self._limits.probe_interval_seconds)
        del self._tasks[replica]
        replica.suspect = False
        self._on_recovery()

    async def _answers(self, replica: RoutedReplica) -> bool:
        call = self._upstream.call(
            replica.url,
            patience_seconds=self._limits.probe_timeout_seconds,
            keys=replica.keys,
        )
        try:
            await call.ask(b"GET", b"/health")
            return call.status == 200
        except (Lost, TimedOut):
            return False
        finally:
            call.close()


def _is_worth_asking(replica: RoutedReplica) -> bool:
    return replica.announcement.state == "ready" and not replica.lost
