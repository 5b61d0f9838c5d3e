"""Under which address other machines reach this one, and where its own processes find each other's sockets."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from pathlib import Path

_ANYWHERE = ("10.255.255.255", 9)  # nothing is sent: it makes the kernel choose an interface

_LONGEST_SOCKET_PATH = 90  # the kernel takes 108 bytes, or 104, and a fork server adds its process id for a moment


def folder_for_a_socket() -> Path:
    """A new folder that only this user can enter, with a name short enough for the path of a socket in it."""
    folder = Path(tempfile.mkdtemp(prefix="assay-"))
    if len(os.fsencode(folder / "socket")) <= _LONGEST_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="assay-", dir="/tmp"))


def own_address(towards: tuple[str, int] = _ANYWHERE) -> str:
    """The address of this machine on its way to another; loopback where it has no network.

    Args:
        towards: host and port of the other one.
    """
    family = socket.AF_INET6 if ":" in towards[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(towards)
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Returns True if only processes of the same machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
