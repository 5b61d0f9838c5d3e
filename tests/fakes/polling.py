"""Waits for other processes without a time-out of their own: a busy machine may take long, and the test has a limit."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")


_PAUSE_SECONDS = 0.05, 1.0


def eventually(condition: Callable[[], Value]) -> Value:
    """Returns the value of `condition` once that is true.

    Pauses 12 times as long as a poll took, so that a costly poll leaves the cores to the awaited processes.
    """
    shortest, longest = _PAUSE_SECONDS
    while True:
        looked = time.monotonic()
        if value := condition():
            return value
        time.sleep(min(max(shortest, 12 * (time.monotonic() - looked)), longest))


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def eventual_pid(path: Path) -> int:
    return int(eventually(lambda: path.is_file() and path.read_text().strip()) or 0)


def is_alive(pid: int) -> bool:
    """Returns True if the process exists; zombies count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
