"""Metrics of a pool's engines on a page in Prometheus' text format: unchanged, each labelled with its replica."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from pools.proxy.connections.upstream import Lost, TimedOut, Upstream
from pools.proxy.routing import RoutedReplica, RoutingTable

_PATIENCE_SECONDS = 5.0  # Prometheus' own time limit for a page is 10 s
_COMMENT = re.compile(rb"# (?:HELP|TYPE) ([A-Za-z_:][\w:]*) .*")
_SAMPLE = re.compile(rb"([A-Za-z_:][\w:]*)(?:\{([^\n]*)\})?( [-+.\dA-Za-z]*[\dfN](?: -?\d+)?)")


class EngineMetrics:
    """Metrics of the engines in a routing table, requested at each call."""

    def __init__(self, upstream: Upstream, *, table: RoutingTable) -> None:
        self._upstream = upstream
        self._table = table

    async def text(self) -> bytes:
        """Returns the metrics of every engine that answers, each sample with its `replica`."""
        asked = [replica for replica in self._table.replicas.values() if replica.url and not replica.gone]
        pages = await asyncio.gather(*map(self._page, asked))
        return merged((replica.name, page) for replica, page in zip(asked, pages, strict=True))

    async def _page(self, replica: RoutedReplica) -> bytes:
        call = self._upstream.call(replica.url, patience_seconds=_PATIENCE_SECONDS, keys=replica.keys)
        try:
            await call.ask(b"GET", b"/metrics")
            return call.body if call.status == 200 else b""
        except (Lost, TimedOut):
            return b""
        finally:
            call.close()


def merged(pages: Iterable[tuple[str, bytes]]) -> bytes:
    """Merges pages of replicas into a single page, with a single HELP and TYPE per family.

    Drops lines that are neither a comment on a family nor a sample.
    """
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
