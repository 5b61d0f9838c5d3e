"""The address of this machine for other machines, and folders for sockets between its own processes."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from pathlib import Path

_ANYWHERE = ("10.255.255.255", 9)  # nothing is sent: connecting makes the kernel choose an interface

_LONGEST_SOCKET_PATH = 90  # the kernel allows 108 bytes, or 104, and a fork server briefly appends its process id


def folder_for_a_socket() -> Path:
    """Creates a folder that only this user can enter, with a name short enough for a socket's path."""
    folder = Path(tempfile.mkdtemp(prefix="assay-"))
    if len(os.fsencode(folder / "socket")) <= _LONGEST_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="assay-", dir="/tmp"))


def own_address(towards: tuple[str, int] = _ANYWHERE) -> str:
    """Returns the address of this machine towards a host and port; loopback without a network."""
    family = socket.AF_INET6 if ":" in towards[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(towards)
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Returns True if only processes of the same machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
