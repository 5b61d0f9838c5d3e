"""Entry point of the Iris backend."""

from __future__ import annotations

from resources.backends.iris.client import IrisClient
from resources.backends.iris.connection import IrisController
from resources.errors import BadInput


def client_from_address(host: str, path: str) -> IrisClient:
    """Returns the client of the cluster with the controller `host` (`host:port`); ignores `path`."""
    if not host:
        raise BadInput(expected="iris://host:port", found=f"iris:{path}", remedy="Correct ASSAY_JOBS.")
    return IrisClient(IrisController(host))
