"""Client for jobs of the current context."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType

from resources.backends.choice import client_of_process
from resources.jobs.jobs import Client

_current_client: ContextVar[Client | None] = ContextVar("current_client", default=None)


def current_client() -> Client:
    """Returns the client set for this context, else that of `ASSAY_JOBS`, of an Iris job, of an initialized Ray, or the
    local client of this process. Backends set `ASSAY_JOBS` in their jobs; users may set it too.
    """
    if (client := _current_client.get()) is not None:
        return client
    return client_of_process()


class set_current_client(AbstractContextManager[Client]):  # called like a function
    """Sets the client of this context, permanently or to the end of a `with` block."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._token: Token[Client | None] = _current_client.set(client)

    def __enter__(self) -> Client:
        return self._client

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _current_client.reset(self._token)
