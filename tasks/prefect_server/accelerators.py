"""A bound on the accelerators in use, over all runs of a Prefect server: a global concurrency limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import copy_context

import httpx
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from resources.config import ResourceConfig
from resources.errors import UnsatisfiableResources
from tasks.prefect_server.client import prefect_client
from tasks.prefect_server.embedded import embedded_address
from tasks.prefect_server.lazy import server_named
from tasks.prefect_server.progress import report_event

ACCELERATOR_LIMIT = "assay-accelerators"
"""Name of the limit; without the limit nothing is counted."""
_LEASE_SECONDS = 120.0
_LOOK_SECONDS = 1.0


@contextmanager
def accelerators_reserved(resources: ResourceConfig, *, limit_name: str = ACCELERATOR_LIMIT) -> Iterator[None]:
    """Reserves a slot of the limit for each chip of all replicas; waits until the slots are free.

    Slots of a killed process expire after two minutes. An unreachable server during the block ends nothing. Without a
    server there is no limit.
    """
    chips = resources.chip_count()
    slots = _slots(limit_name) if chips and (server_named() or embedded_address()) else None
    if slots is None:
        yield
        return
    if chips > slots:
        raise UnsatisfiableResources(
            expected=f"at most {slots} accelerators, which the limit {limit_name} of the Prefect server leaves",
            found=f"{chips} in {resources.replicas} replicas",
            remedy=f"ask for fewer, or: assay work-pools apply --accelerators {chips}",
        )
    report_event(f"reserving {chips} of {slots} accelerators")
    done = False
    try:
        with concurrency(limit_name, occupy=chips, lease_duration=_LEASE_SECONDS, raise_on_lease_renewal_failure=False):
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


def limit_accelerators(slots: int, *, limit_name: str = ACCELERATOR_LIMIT) -> None:
    """Creates or changes the limit; held slots stay held."""
    with prefect_client() as client:
        client.upsert_global_concurrency_limit_by_name(limit_name, slots)


def _slots(limit_name: str) -> int | None:
    with prefect_client() as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(limit_name)
        except ObjectNotFound:
            return None
    return limit.limit if limit.active else None
