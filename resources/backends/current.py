"""Selection of a backend by its address, and the client for jobs of the current context."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from resources.addresses import refuse_user_information
from resources.errors import BadInput
from resources.jobs.jobs import Client
from resources.settings import iris_job, settings

_current_client: ContextVar[Client | None] = ContextVar("current_client", default=None)


class Backend(NamedTuple):
    """A way to run jobs."""

    entry: str
    """Module with `client_from_address(host: str, path: str) -> Client`, imported on first use of such an address."""
    forms: str
    """Examples of its addresses."""
    package: str | None = None
    """Package that it requires, and name of the extra that installs it."""
    options: frozenset[str] = frozenset()
    """Further arguments of its entry, given as `?option=value`."""


BACKENDS: dict[str, Backend] = {
    "local": Backend("resources.backends.local.client", "local"),
    "ray": Backend("resources.backends.ray.client", "ray://auto, ray://host:10001", package="ray"),
    "iris": Backend("resources.backends.iris.client", "iris://host:port", package="iris"),
    "kubernetes": Backend(
        "resources.backends.kubernetes.client",
        "kubernetes://context/namespace?queue=name",
        package="kubernetes",
        options=frozenset({"queue"}),
    ),
    "slurm": Backend(
        "resources.backends.slurm.client",
        "slurm://partition?account=name&time=12:00:00",
        options=frozenset({"account", "constraint", "qos", "reservation", "time"}),
    ),
}
"""Backends by the scheme of their addresses."""


def client_from_url(url: str) -> Client:
    """Returns the client for an address of the `BACKENDS`; the same object for equal addresses in a process."""
    refuse_user_information(url, place="the address of a backend")
    return _client_of(url.strip(), os.getpid())


def current_client() -> Client:
    """Returns the client set for this context, else that of `ASSAY_JOBS`, of an Iris job, of an initialized Ray, or the
    local client of this process. Backends set `ASSAY_JOBS` in their jobs; users may set it too.
    """
    if (client := _current_client.get()) is not None:
        return client
    if url := settings().jobs:
        return client_from_url(url)
    if url := iris_job():
        return client_from_url(url)
    ray: ModuleType | None = sys.modules.get("ray")  # not imported means not initialized
    if ray is not None and ray.is_initialized():
        return client_from_url("ray://auto")
    return client_from_url("local")


def set_current_client(client: Client) -> ExitStack:
    """Sets the client of this context, permanently or to the end of a `with` block."""
    ending = ExitStack()
    ending.callback(_current_client.reset, _current_client.set(client))
    return ending


@cache
def _client_of(url: str, process_id: int) -> Client:  # `process_id` gives a forked child its own client
    parts = urlsplit(url if ":" in url else f"{url}:")
    if (backend := BACKENDS.get(parts.scheme)) is None:
        forms = ", ".join(known.forms for known in BACKENDS.values())
        raise BadInput(expected=f"where jobs run: one of {forms}", found=repr(url), remedy="Correct ASSAY_JOBS.")
    if backend.package is not None and find_spec(backend.package) is None:
        raise BadInput(
            expected=f"the package {backend.package}, which the {parts.scheme} backend needs",
            found="it is not installed",
            remedy=f"Install the extra: pip install 'assay-evals[{backend.package}]'",
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if wrong := {name for name, value in options.items() if name not in backend.options or not value}:
        raise BadInput(
            expected=f"an address such as {backend.forms}",
            found=f"{url!r}, with {' and '.join(sorted(wrong))}",
            remedy=f"leave it out, or give one of {', '.join(backend.options)} a value"
            if backend.options
            else "leave out what follows the question mark",
        )
    return import_module(backend.entry).client_from_address(parts.netloc, parts.path, **options)
