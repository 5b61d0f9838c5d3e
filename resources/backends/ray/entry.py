"""Entry point of the Ray backend."""

from __future__ import annotations

from resources.backends.ray.client import RayClient


def client_from_address(host: str, path: str) -> RayClient:
    """Returns the client for the Ray of this process or machine (`auto` or no host), or for a Ray Client server."""
    client = RayClient("auto" if host in ("", "auto") else f"ray://{host}")
    client.connect()
    return client
