"""Which backend a setting names, and which one this process belongs to."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

from resources.errors import BadInput
from resources.jobs.jobs import Client
from resources.settings import iris_job, settings

FORMS = "local, ray://auto, ray://host:10001, iris://host:port or kubernetes://context/namespace"
"""How a backend is named."""

_ENTRIES = {"ray": "ray.client", "iris": "iris.connection", "kubernetes": "kubernetes.entry"}
"""The module in each folder that has `client_from_address`; the package that it needs has the backend's name."""


def client_from_url(url: str) -> Client:
    """The client that a setting names; the same object for the same setting in one process.

    Args:
        url: one of `FORMS`.

    Raises:
        BadInput: it names no backend, or the backend's package is not installed.
        BackendUnavailable: nothing answers there.
    """
    return _client_of(url.strip(), os.getpid())


def client_of_process() -> Client:
    """The client that `ASSAY_JOBS` names; else that of an Iris job, of an initialized Ray, or of this machine."""
    if url := settings().jobs:
        return client_from_url(url)
    if url := iris_job():
        return client_from_url(url)
    ray: ModuleType | None = sys.modules.get("ray")  # nobody can have initialized what nobody imported
    if ray is not None and ray.is_initialized():
        return client_from_url("ray://auto")
    return client_from_url("local")


@cache
def _client_of(url: str, process_id: int) -> Client:  # a forked child gets its own
    parts = urlsplit(url if ":" in url else f"{url}:")
    match parts.scheme:
        case "local" if not parts.netloc and not parts.path:
            from resources.backends.local.client import local_client

            return local_client()
        case "local" if not parts.netloc:  # how the jobs of a client with a folder of its own find it
            from resources.backends.local.client import LocalClient

            return LocalClient(Path(parts.path))
        case "ray":
            return _backend("ray").client_from_address(parts.netloc or "auto")
        case "iris" if parts.netloc:
            return _backend("iris").client_from_address(parts.netloc)
        case "kubernetes":
            return _backend("kubernetes").client_from_address(parts.netloc, parts.path.strip("/"))
        case _:
            raise BadInput(expected=f"where jobs run: {FORMS}", found=repr(url), remedy="Correct ASSAY_JOBS.")


def _backend(name: str) -> ModuleType:
    if find_spec(name) is None:
        raise BadInput(
            expected=f"the package {name}, which the {name} backend needs",
            found="it is not installed",
            remedy=f"Install the extra: pip install 'assay-evals[{name}]'",
        )
    return import_module(f"resources.backends.{_ENTRIES[name]}")
