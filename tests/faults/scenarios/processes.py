"""Finds the processes of a pool on this machine through /proc."""

from __future__ import annotations

import ipaddress
import os
import signal
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from pools.settings import ENGINE_KEY_VARIABLE

_PROC = Path("/proc")
_LISTENING = "0A"


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def children(pid: int) -> list[int]:
    return _children()[pid]


def descendants(pid: int) -> list[int]:
    """Returns all running processes that a process has started, directly or not."""
    children_of = _children()
    pids: list[int] = []
    left = [pid]
    while left:
        below = children_of[left.pop()]
        pids += below
        left += below
    return pids


def _children() -> defaultdict[int, list[int]]:
    children_of: defaultdict[int, list[int]] = defaultdict(list)
    for folder in _PROC.glob("[0-9]*"):
        children_of[parent(int(folder.name))].append(int(folder.name))
    return children_of


def parent(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def ancestors(pid: int) -> list[int]:
    """Returns the parent of a process, its parent, and so on."""
    pids: list[int] = []
    while pid > 1 and (pid := parent(pid)):
        pids.append(pid)
    return pids


def command_line(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def state_of(pid: int) -> str:
    """Returns Linux' letter for the state of a process, `Z` for a zombie; empty if it has ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def job_of(pid: int) -> str:
    """Returns the local job of a process by its environment at its start; empty if none."""
    return variable_of(pid, "ASSAY_JOB_ID")


def engine_key(port: int) -> str:
    """Returns the key of the engine started for a port; empty if there is none."""
    pids = (int(folder.name) for folder in _PROC.glob("[0-9]*"))
    started = (pid for pid in pids if str(port) in command_line(pid))
    return next((key for pid in started if (key := variable_of(pid, ENGINE_KEY_VARIABLE))), "")


def variable_of(pid: int, name: str) -> str:
    """Returns a variable of a process at its start; empty if there is none."""
    try:
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    prefix = f"{name}=".encode()
    return next((variable[len(prefix) :].decode() for variable in variables if variable.startswith(prefix)), "")


def largest(pids: Iterable[int]) -> int | None:
    sizes: dict[int, int] = {}
    for pid in pids:
        try:
            sizes[pid] = int((_PROC / str(pid) / "statm").read_text().split()[1])
        except OSError:
            continue
    return max(sizes, key=lambda pid: sizes[pid], default=None)


def listens_on(pid: int) -> list[tuple[str, int]]:
    """Returns addresses and ports at which a process accepts TCP connections."""
    sockets = _listening_sockets()
    return [sockets[inode] for inode in _socket_inodes(pid) if inode in sockets]


def listener(port: int, among: Iterable[int]) -> int | None:
    """Returns the process among those given that accepts connections at a port, None if none does.

    If its children have inherited the socket, returns their parent, hence the oldest process.
    """
    inodes = {inode for inode, (_, bound) in _listening_sockets().items() if bound == port}
    return min((pid for pid in among if inodes & set(_socket_inodes(pid))), default=None)


def _socket_inodes(pid: int) -> list[str]:
    inodes = []
    try:
        for entry in (_PROC / str(pid) / "fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                inodes.append(target[len("socket:[") : -1])
    except OSError:
        return inodes
    return inodes


def _listening_sockets() -> dict[str, tuple[str, int]]:
    # address and port by inode
    sockets: dict[str, tuple[str, int]] = {}
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (_PROC / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING:
                address, _, port = fields[1].partition(":")
                sockets[fields[9]] = (_readable(address), int(port, 16))
    return sockets


def _readable(address: str) -> str:
    # Linux writes an address as words of 4 bytes, the last byte first
    words = bytes.fromhex(address)
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    readable = ipaddress.ip_address(packed)
    return str(getattr(readable, "ipv4_mapped", None) or readable)
