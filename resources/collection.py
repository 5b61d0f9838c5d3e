"""Fewer searches for cycles of garbage by Python, while very many values are made that are all kept."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_VALUES = 100_000  # between two searches, in place of 700; what cycles hold meanwhile is bounded by it
_lock = threading.Lock()
_inside = 0
_before = gc.get_threshold()


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Searches seldom in the block, or in the function it decorates: a quarter of a large plan's time.

    What no name holds any more is freed as ever. Threads may be inside at once, and blocks in blocks.
    """
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = gc.get_threshold()
            gc.set_threshold(max(_before[0], _NEW_VALUES) if _before[0] else 0, *_before[1:])
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_before)
