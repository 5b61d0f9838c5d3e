"""Waiting for other processes, with an end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Value = TypeVar("Value")


def eventually(condition: Callable[[], Value], *, seconds: float = 20.0) -> Value:
    """What `condition` returns once that is true; an assertion fails if it is not in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true within {seconds:g} s"
        time.sleep(0.02)
    return value


def eventual_pid(path: Path) -> int:
    """The process id that another process writes into `path`."""
    return int(eventually(lambda: path.is_file() and path.read_text().strip()) or 0)


def is_alive(pid: int) -> bool:
    """Whether the process exists, reaped zombies aside."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
