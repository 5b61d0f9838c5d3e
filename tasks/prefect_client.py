"""A client of the Prefect server for code that is not asynchronous, with errors in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL

from resources.errors import PrefectUnavailable


@contextmanager
def prefect_client() -> Iterator[SyncPrefectClient]:
    """A client of the Prefect server that this process was pointed at.

    Raises:
        PrefectUnavailable: it does not answer, or not as it should.
    """
    try:
        with get_client(sync_client=True) as client:
            yield client
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        raise PrefectUnavailable(
            expected=f"the Prefect server at {PREFECT_API_URL.value()} to do what it is asked",
            found=str(error) or type(error).__name__,
            remedy="start it (prefect server start), or correct PREFECT_API_URL",
        ) from error
