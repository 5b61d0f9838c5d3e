"""The entry to the local backend: a client for a folder of jobs."""

from __future__ import annotations

from pathlib import Path

from resources.backends.local.client import LocalClient, local_client
from resources.errors import BadInput


def client_from_address(host: str, path: str) -> LocalClient:
    """Returns the client for the jobs in a folder of this machine, the usual one when it is empty.

    Args:
        host: empty, since it is this one.
        path: the folder; how the jobs of a client with a folder of its own find it.
    """
    if host:
        raise BadInput(
            expected="local, or local:///folder", found=f"local://{host}{path}", remedy="Correct ASSAY_JOBS."
        )
    return LocalClient(Path(path)) if path else local_client()
