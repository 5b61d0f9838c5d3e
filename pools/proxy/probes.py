"""Requests of the proxy itself to engines: probes after a failed connection, and their metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pools.protocol import ProxyLimits
from pools.proxy.connections.upstream import Lost, TimedOut, Upstream
from pools.proxy.replicas import RoutedReplica

_METRICS_SECONDS = 5.0  # Prometheus' own time limit for a page is 10 s
_COMMENT = re.compile(rb"# (?:HELP|TYPE) ([A-Za-z_:][\w:]*) .*")
_SAMPLE = re.compile(rb"([A-Za-z_:][\w:]*)(?:\{([^\n]*)\})?( [-+.\dA-Za-z]*[\dfN](?: -?\d+)?)")


@dataclass(frozen=True)
class Probes:
    """Polls `/health` of each suspect replica until it answers 200; then calls `on_recovery`."""

    upstream: Upstream
    limits: ProxyLimits
    on_recovery: Callable[[], None]
    _tasks: dict[RoutedReplica, asyncio.Task[None]] = field(default_factory=dict)

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
        seconds = self.limits.probe_timeout_seconds
        while await _fetched(self.upstream, replica, b"/health", seconds=seconds) is None:
            await asyncio.sleep(self.limits.probe_interval_seconds)
        del self._tasks[replica]
        replica.suspect = False
        self.on_recovery()


def _is_worth_asking(replica: RoutedReplica) -> bool:
    return replica.announcement.state == "ready" and not replica.lost


async def _fetched(upstream: Upstream, replica: RoutedReplica, path: bytes, *, seconds: float) -> bytes | None:
    call = upstream.call(replica.url, patience_seconds=seconds, keys=replica.keys)
    try:
        await call.ask(b"GET", path)
        return call.body if call.status == 200 else None
    except (Lost, TimedOut):
        return None
    finally:
        call.close()


async def engine_metrics(upstream: Upstream, replicas: Iterable[RoutedReplica]) -> bytes:
    """Returns a page in Prometheus' text format: metrics of every engine that answers, labelled with their replica."""
    asked = [replica for replica in replicas if replica.url and not replica.gone]
    pages = [_fetched(upstream, replica, b"/metrics", seconds=_METRICS_SECONDS) for replica in asked]
    return _merged(
        (replica.name, page or b"") for replica, page in zip(asked, await asyncio.gather(*pages), strict=True)
    )


def _merged(pages: Iterable[tuple[str, bytes]]) -> bytes:
    # a single HELP and TYPE per family; only comments on families and samples
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
    for replica, page in pages:
        own = f'replica="{replica}"'.encode()
        _, samples = families.setdefault(b"", ([], []))
        described = set(families)
        for line in page.splitlines():
            if (comment := _COMMENT.fullmatch(line)) is not None:
                comments, samples = families.setdefault(comment[1], ([], []))
                if comment[1] not in described:
                    comments.append(line)
            elif (sample := _SAMPLE.fullmatch(line)) is not None:
                labels = b",".join(filter(None, (own, sample[2])))
                samples.append(b"%b{%b}%b" % (sample[1], labels, sample[3]))
    return b"".join(b"%b\n" % line for parts in families.values() for part in parts for line in part)
