"""Python programs that run during a test and end with it."""

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
"""A program with a main thread that ends before another: Linux shows a zombie that has not ended."""


@contextmanager
def running_program(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program with this interpreter; kills it at the end of the block."""
    process = subprocess.Popen([sys.executable, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    """Sends SIGTERM, and kills the process after 20 s."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def commands() -> list[bytes]:
    command_lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command_lines.append(path.read_bytes())
        except OSError:
            continue
    return command_lines
