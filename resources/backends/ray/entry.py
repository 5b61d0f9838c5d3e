"""The entry to the Ray backend: a client for a cluster."""

from __future__ import annotations

from resources.backends.ray.client import RayClient


def client_from_address(host: str, path: str) -> RayClient:
    """Returns the client for the Ray that this process belongs to or that runs here, or for a Ray Client server.

    Args:
        host: `auto` or empty for the former; else host and port of the server.
        path: not used.
    """
    client = RayClient("auto" if host in ("", "auto") else f"ray://{host}")
    client.connect()
    return client
