"""Identities of processes, to detect whether a process is still running, as far as this machine can tell."""

from __future__ import annotations

import getpass
import os
import socket
from functools import cache
from pathlib import Path

from pydantic import ConfigDict

from resources.config import Config


class ProcessMark(Config):
    """A process, identified permanently by machine and boot, process id, and start time."""

    model_config = ConfigDict(extra="ignore")

    machine: str
    """Host name, boot and, on Linux, the process-id namespace: in a container the same ids are other processes."""
    pid: int
    """Process id on that machine."""
    started: str | None
    """Start time in kernel ticks; empty where the system has none."""

    @classmethod
    def of_this_process(cls) -> ProcessMark:
        return cls(machine=_machine(), pid=os.getpid(), started=_started(os.getpid()))

    def is_here(self) -> bool:
        """Returns True if it is certainly running, on this machine."""
        return self.machine == _machine() and self.started is not None and _started(self.pid) == self.started

    def has_ended(self) -> bool:
        """Returns True if it has certainly ended; False where only time can tell, as on another machine."""
        if self.machine != _machine() or self.started is None:
            return False
        return _started(self.pid) != self.started


@cache
def boot_id() -> str:
    """Returns an identity of this machine since its last start, where the system has any; else its host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.is_file() else socket.gethostname()


@cache
def _machine() -> str:
    namespace = Path("/proc/self/ns/pid")
    parts = [socket.gethostname(), boot_id()]
    return " ".join([*parts, str(namespace.readlink()) if namespace.is_symlink() else ""]).strip()


def _started(pid: int) -> str | None:
    try:
        # The name in brackets is arbitrary text; the state follows it, and the start time is the 22nd field.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def acting_user() -> str:
    """Returns the name of the account that this process runs under."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an account without a name, as in many containers
        return "unknown"
