"""Servers and clusters that are slow to start: the tests of a process share them until `end_shared`."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import TypeVar

Value = TypeVar("Value")

_running = ExitStack()
_starters: list[Callable[[], None]] = []


def shared(start: Callable[[], Iterator[Value]]) -> Callable[[], Value]:
    """Starts a resource on the first call and returns it on all others; `start` yields it, and cleans up afterwards."""

    @cache
    @wraps(start)
    def started() -> Value:
        return _running.enter_context(contextmanager(start)())

    _starters.append(started.cache_clear)
    return started


@contextmanager
def closed_before(value: Value, close: Callable[[], None]) -> Iterator[Value]:
    """Yields a user of shared resources, closed at the end of the block or of the resources, whichever comes first."""
    with ExitStack() as user:
        user.callback(close)
        _running.callback(user.close)
        yield value


@atexit.register
def end_shared() -> None:
    """Ends all of them; the next call starts a new resource."""
    for forget in _starters:
        forget()
    _running.close()
