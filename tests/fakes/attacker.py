"""A harness that tries to escape its isolation.

    python attacker.py OUTPUT HOST PORT OTHER_PORT OWNER_PID SECRET PATH …

Writes into `attempts.json` how far each attempt got. Needs the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def attempt(action: Callable[[], object]) -> object:
    """Returns the result of the action, or None if it was prevented."""
    try:
        return action()
    except (OSError, MemoryError, ValueError):
        return None


def asked(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return connection.makefile().readline()


def variables_of_all_processes() -> str:
    return "".join(
        str(attempt((folder / "environ").read_text)) for folder in Path("/proc").iterdir() if folder.name.isdigit()
    )


def larger_than(bound: int) -> int:
    with Path("large").open("wb") as file:
        return file.truncate(bound + 1)


def rights() -> list[bool]:
    """Returns [True] with capabilities, else False and if it can mount and unshare."""
    status = Path("/proc/self/status").read_text()
    if any(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("CapEff", "CapPrm", "CapBnd"))):
        return [True]  # never tried with capabilities: it would change the machine that runs the test
    libc = ctypes.CDLL(None)
    mounted = libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0
    return [False, mounted, libc.unshare(0x10000000 | 0x20000) == 0]


def main(output: str, host: str, port: str, other_port: str, owner: str, secret: str, *paths: str) -> None:
    memory, file_size = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE))
    subprocess.Popen(["sleep", f"6000{owner}"], start_new_session=True)
    outcomes = {
        "endpoint": attempt(lambda: asked(host, int(port))),
        "other port": attempt(lambda: asked("127.0.0.1", int(other_port))),
        "network": attempt(lambda: socket.create_connection(("192.0.2.1", 80), timeout=10).fileno()),
        "variables": sorted(os.environ),
        "secret in variables": secret in variables_of_all_processes(),
        "files": {path: attempt(Path(path).read_text) for path in paths},
        "signal": attempt(lambda: (os.kill(int(owner), 0), "sent")[1]),
        "rights": rights(),
        "memory": attempt(lambda: len(mmap.mmap(-1, memory))) if memory > 0 else "unbounded",
        "file": attempt(lambda: larger_than(file_size)) if file_size > 0 else "unbounded",
    }
    for path in paths:
        attempt(lambda path=path: Path(path).write_text("overwritten"))
    Path(output, "attempts.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
