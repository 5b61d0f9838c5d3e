"""Clients of the Prefect server, with errors in words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
from prefect.client.orchestration import PrefectClient, SyncPrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from resources.errors import PrefectUnavailable


@contextmanager
def prefect_client() -> Iterator[SyncPrefectClient]:
    """A client of the Prefect server that this process was pointed at.

    Raises:
        PrefectUnavailable: it does not answer, or not as it should.
    """
    with _in_words(), get_client(sync_client=True) as client:
        yield client


@asynccontextmanager
async def async_prefect_client() -> AsyncIterator[PrefectClient]:
    """The same for code that is asynchronous.

    Raises:
        PrefectUnavailable: it does not answer, or not as it should.
    """
    with _in_words():
        async with get_client() as client:
            yield client


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        raise PrefectUnavailable(
            expected=f"the Prefect server at {PREFECT_API_URL.value()} to do what it is asked",
            found=str(error) or type(error).__name__,
            remedy="start it (prefect server start), or correct PREFECT_API_URL",
        ) from error
