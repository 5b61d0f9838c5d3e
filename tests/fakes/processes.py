"""Python programs that run beside a test, and end with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def running_program(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of this interpreter, killed at the end of the block."""
    process = subprocess.Popen([sys.executable, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
