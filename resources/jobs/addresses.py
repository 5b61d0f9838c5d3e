"""Under which address other machines reach this one."""

from __future__ import annotations

import ipaddress
import socket

_ANYWHERE = ("10.255.255.255", 9)  # nothing is sent: it makes the kernel choose an interface


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
