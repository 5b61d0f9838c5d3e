"""Requests that were in flight when engines died of an error: after two deaths they are sent alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Protocol

from pools.protocol import Announcement

SUSPECT_DEATHS = 2
_MOST_KILLERS = 10_000


class Mortal(Protocol):
    """A replica with engines that may die."""

    announcement: Announcement

    @property
    def takes_requests(self) -> bool: ...


class Suspects:
    """Losses of open requests, and the requests that killed engines."""

    def __init__(self) -> None:
        self._losses: dict[object, tuple[str, list[tuple[Mortal, int]]]] = {}
        self._killers: dict[bytes, str] = {}
        self._condemned: Counter[str] = Counter()

    def lost(self, request: object, model: str, replica: Mortal, *, deaths_before: int) -> int:
        """Records a broken connection after `deaths_before` deaths of the replica's engines; returns the losses."""
        losses = self._losses.setdefault(request, (model, []))[1]
        losses.append((replica, deaths_before))
        return len(losses)

    def deaths(self, request: object) -> int:
        """Returns the number of engine deaths at which a request was in flight."""
        return sum(deaths_of(replica) > before for replica, before in self._losses.get(request, ("", []))[1])

    def is_settled(self, request: object) -> bool:
        """Returns True once each loss is known to be an engine's death or not."""
        losses = self._losses.get(request, ("", []))[1]
        return all(deaths_of(replica) > before or replica.takes_requests for replica, before in losses)

    def of(self, model: str) -> int:
        """Returns the number of requests for a model that were in flight at two deaths: open, or condemned already."""
        requests = [request for request, (asked, _) in self._losses.items() if asked == model]
        return self._condemned[model] + sum(self.deaths(request) >= SUSPECT_DEATHS for request in requests)

    def close(self, request: object) -> None:
        self._losses.pop(request, None)

    def condemn(self, digest: str | None, target: bytes, body: bytes, *, model: str, error: str) -> str:
        """Remembers a request that killed an engine when sent alone; returns the message for its client."""
        message = f"The engine dies of this request: it was in flight at three deaths, the last time alone ({error})."
        self._condemned[model] += 1
        if len(self._killers) < _MOST_KILLERS:
            self._killers[_key(digest, target, body)] = message
        return message

    def verdict(self, digest: str | None, target: bytes, body: bytes) -> str | None:
        """Returns the message for a request that was condemned before, else None."""
        return self._killers.get(_key(digest, target, body)) if self._killers else None


def deaths_of(replica: Mortal) -> int:
    """Returns the number of its engines that died of an error of their own."""
    return sum(replica.announcement.deaths.values())


def _key(digest: str | None, target: bytes, body: bytes) -> bytes:
    return hashlib.sha256(b"\0".join(((digest or "").encode(), target, body))).digest()
