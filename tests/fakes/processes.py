"""Python programs that run beside a test, and end with it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WITHOUT_MAIN_THREAD = """
import ctypes, os, sys, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
open(sys.argv[1], "w").write(str(os.getpid()))
ctypes.CDLL(None).pthread_exit(None)
"""
"""A program whose main thread ends while another one goes on: Linux shows a zombie, which has not ended."""


@contextmanager
def running_program(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of this interpreter, killed at the end of the block."""
    process = subprocess.Popen([sys.executable, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks a process to end, and kills it where it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def commands() -> list[bytes]:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found
