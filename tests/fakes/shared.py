"""Servers and clusters that are slow to start: the tests of a process share them, until `end_shared`."""

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
    """Has the first call start a thing, and all others return it; `start` yields it, and ends it afterwards."""

    @cache
    @wraps(start)
    def started() -> Value:
        return _running.enter_context(contextmanager(start)())

    _starters.append(started.cache_clear)
    return started


@atexit.register
def end_shared() -> None:
    """Ends all of them; who asks for one again gets a new one."""
    for forget in _starters:
        forget()
    _running.close()
