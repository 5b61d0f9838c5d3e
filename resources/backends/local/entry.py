"""Entry point of the local backend."""

from __future__ import annotations

from pathlib import Path

from resources.backends.local.client import LocalClient, local_client
from resources.errors import BadInput


def client_from_address(host: str, path: str) -> LocalClient:
    """Returns the client for the jobs in the folder `path` of this machine (empty: the default folder)."""
    if host:
        raise BadInput(
            expected="local, or local:///folder", found=f"local://{host}{path}", remedy="Correct ASSAY_JOBS."
        )
    return LocalClient(Path(path)) if path else local_client()
