"""Waits for other processes, which only the limit of the test ends: a busy machine may take long."""

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

    Pauses twelve times as long as a look took, so that a costly look leaves the cores to those that are waited for.
    """
    shortest, longest = _PAUSE_SECONDS
    while True:
        looked = time.monotonic()
        if value := condition():
            return value
        time.sleep(min(max(shortest, 12 * (time.monotonic() - looked)), longest))


async def until(condition: Callable[[], Any]) -> None:
    """Returns as soon as a condition holds; only the limit of the test ends the wait."""
    while not condition():
        await asyncio.sleep(0.01)


def eventual_pid(path: Path) -> int:
    """The process id that another process writes into `path`."""
    return int(eventually(lambda: path.is_file() and path.read_text().strip()) or 0)


def is_alive(pid: int) -> bool:
    """True if the process exists, reaped zombies aside."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
