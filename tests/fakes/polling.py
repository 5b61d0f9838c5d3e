"""Waiting for other processes, with an end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


_PAUSE_SECONDS = 0.05, 1.0


def eventually(condition: Callable[[], Value], *, seconds: float = 20.0) -> Value:
    """The value of `condition` once that is true; an assertion fails if it is not in time.

    Pauses twelve times as long as a look took, so that a costly look leaves the cores to those that are waited for.
    """
    shortest, longest = _PAUSE_SECONDS
    deadline = time.monotonic() + seconds
    while True:
        looked = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        assert now < deadline, f"not true within {seconds:g} s"
        time.sleep(min(max(shortest, 12 * (now - looked)), longest))


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
