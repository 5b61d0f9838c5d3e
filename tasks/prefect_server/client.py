"""Clients of the Prefect server, with readable errors, and handling of an unreachable server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.concurrency.sync import concurrency
from prefect.events import Event
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY, PREFECT_API_URL
from pydantic import SecretStr

from resources.addresses import refuse_user_information
from resources.config import ResourceConfig
from resources.errors import AssayError, BadInput, UnsatisfiableResources
from tasks.errors import PrefectUnavailable
from tasks.prefect_server.embedded import embedded_address
from tasks.prefect_server.lazy import server_named
from tasks.prefect_server.progress import report_event

T = TypeVar("T")
_PAGE = 200  # largest page of the server
_AWAY_SECONDS = 300.0
"""Time that the end of a flow run waits for the server, in seconds. Prefect itself retries for 60 s."""
_SHOWN_WITHIN_SECONDS = 30.0
"""Time that artifacts wait for the server, in seconds; cells of other groups may wait meanwhile."""
_SERVER_POLL_SECONDS = 2.0
_SERVER_ANSWER_SECONDS = 5.0


def server_address() -> str | None:
    """Returns the address of the Prefect server; None for the embedded server of a single run. Raises BadInput for user
    information in it, which belongs in PREFECT_API_AUTH_STRING."""
    address = PREFECT_API_URL.value()
    if address is not None and address == embedded_address():
        return None
    refuse_user_information(address, place="PREFECT_API_URL")
    return address


def server_variables() -> dict[str, str]:
    """Returns the Prefect server's address and credentials as variables for remote processes; may be empty."""
    if server_address() is None:
        return {}
    values = {setting.name: setting.value() for setting in (PREFECT_API_URL, PREFECT_API_KEY, PREFECT_API_AUTH_STRING)}
    shown = {name: v.get_secret_value() if isinstance(v, SecretStr) else v for name, v in values.items()}
    return {name: value for name, value in shown.items() if value}


def require_server() -> None:
    """Requires a Prefect server outside of this process. Raises BadInput if none is configured: the embedded server of
    a run would lose its data."""
    if not server_address():
        raise BadInput(
            expected="a Prefect server that stays: its address in PREFECT_API_URL, or in Prefect's profile",
            found="no PREFECT_API_URL is set",
            remedy="prefect server start, then: prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api",
        )


@contextmanager
def prefect_client() -> Iterator[SyncPrefectClient]:
    """Yields a client of this process's Prefect server."""
    with readable_prefect_errors(), get_client(sync_client=True) as client:
        yield client


def read_or_none(read: Callable[..., T], *arguments: Any) -> T | None:
    """Returns what a method of the client reads; None if the server does not have it."""
    try:
        return read(*arguments)
    except ObjectNotFound:
        return None


def every_page(read: Callable[..., list[T]], **query: Any) -> list[T]:
    """Returns all results of a query, page by page; `read` is a method of the client."""
    results: list[T] = []
    while len(page := read(**query, limit=_PAGE, offset=len(results))) == _PAGE:
        results += page
    return results + page


def send_events(events: Sequence[Event]) -> None:
    """Sends events, and returns when the server has them. Each event needs a unique id: with a duplicate id a server on
    SQLite loses other events."""
    if events:
        with prefect_client() as client:
            client.request("POST", "/events", json=[event.model_dump(mode="json") for event in events])


@contextmanager
def end_reported() -> Iterator[None]:
    """Makes the end of the block wait for an unreachable server, so that the final state of the flow is stored. By then
    records are written, and pools and claims are closed. Interrupted runs do not wait."""
    try:
        yield
    except AssayError:
        server_answers(within_seconds=_AWAY_SECONDS)
        raise
    server_answers(within_seconds=_AWAY_SECONDS)


def show(title: str, create: Callable[[], object]) -> None:
    """Creates an artifact in Prefect's UI if the server answers soon; failures are logged."""
    if server_answers(within_seconds=_SHOWN_WITHIN_SECONDS):
        try:
            create()
        except httpx.HTTPError as error:
            report_event(f"{title} cannot be shown in Prefect's UI: {error}")
    else:
        report_event(f"{title} cannot be shown in Prefect's UI: its server does not answer")


def server_answers(
    *, within_seconds: float, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> bool:
    """Returns True if the server answers in time, with at least a single poll; logs once before it waits."""
    if server_address() is None:
        return True  # the embedded server, which does not come back
    # Not entered: that would request the server's version, and fail.
    client = get_client(sync_client=True, httpx_settings={"timeout": _SERVER_ANSWER_SECONDS})
    deadline = clock() + within_seconds
    reported = False
    while (reason := client.api_healthcheck()) is not None:
        if clock() >= deadline:
            return False
        if not reported:
            reported = True
            report_event(
                f"waiting for the Prefect server, {within_seconds:g} s at most: {str(reason) or type(reason).__name__}"
            )
        sleep(_SERVER_POLL_SECONDS)
    return True


@contextmanager
def readable_prefect_errors() -> Iterator[None]:
    """Converts exceptions of Prefect's server calls to PrefectUnavailable."""
    try:
        yield
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        raise _unavailable(error) from error
    except RuntimeError as error:  # Prefect's first request is for the server's version
        if not str(error).startswith("Failed to reach API"):
            raise
        raise _unavailable(error.__cause__ or error) from error


def _unavailable(error: BaseException) -> PrefectUnavailable:
    address = server_address()
    return PrefectUnavailable(
        expected=f"the Prefect server at {address} to do what it is asked" if address else "Prefect's embedded server",
        found=str(error) or type(error).__name__,
        remedy="start it (prefect server start), or correct PREFECT_API_URL" if address else "run the command again",
    )


ACCELERATOR_LIMIT = "assay-accelerators"
"""Name of the limit; without the limit nothing is counted."""
_LEASE_SECONDS = 120.0
_LOOK_SECONDS = 1.0


@contextmanager
def accelerators_reserved(resources: ResourceConfig) -> Iterator[None]:
    """Reserves a slot of the limit for each chip of all replicas; waits until the slots are free. Slots of a killed
    process expire after two minutes. An unreachable server during the block ends nothing. Without a server there is no
    limit."""
    chips = resources.chip_count()
    slots = _slots() if chips and (server_named() or embedded_address()) else None
    if slots is None:
        yield
        return
    if chips > slots:
        raise UnsatisfiableResources(
            expected=f"at most {slots} accelerators, which the limit {ACCELERATOR_LIMIT} of the Prefect server leaves",
            found=f"{chips} in {resources.replicas} replicas",
            remedy=f"ask for fewer, or: assay work-pools apply --accelerators {chips}",
        )
    report_event(f"reserving {chips} of {slots} accelerators")
    done = False
    try:
        with concurrency(
            ACCELERATOR_LIMIT, occupy=chips, lease_duration=_LEASE_SECONDS, raise_on_lease_renewal_failure=False
        ):
            yield
            done = True
    except (httpx.HTTPError, RuntimeError) as error:
        if not done:
            raise
        report_event(f"the accelerators could not be given back, and come back with their lease: {error}")


@contextmanager
def accelerators_reserved_until(ended: Callable[[], bool], resources: ResourceConfig) -> Iterator[None]:
    """Reserves as `accelerators_reserved`, until `ended`, called once a second in another thread, returns True."""
    if not resources.chip_count():
        yield
        return
    held, closing = Future[None](), threading.Event()

    def hold() -> None:
        try:
            with accelerators_reserved(resources):
                held.set_result(None)
                while not closing.wait(_LOOK_SECONDS) and not ended():
                    pass
        except Exception as error:
            if held.done():
                raise
            held.set_exception(error)

    holder = threading.Thread(target=copy_context().run, args=(hold,), name="accelerators", daemon=True)
    holder.start()
    try:
        held.result()
        yield
    finally:
        closing.set()
        if held.done():  # otherwise it still waits for slots, and will release them at once
            holder.join()


def limit_accelerators(slots: int) -> None:
    """Creates or changes the limit; held slots stay held."""
    with prefect_client() as client:
        client.upsert_global_concurrency_limit_by_name(ACCELERATOR_LIMIT, slots)


def _slots() -> int | None:
    with prefect_client() as client:
        limit = read_or_none(client.read_global_concurrency_limit_by_name, ACCELERATOR_LIMIT)
    return limit.limit if limit and limit.active else None
