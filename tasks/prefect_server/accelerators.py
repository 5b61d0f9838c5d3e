"""A bound on the accelerators in use at a time, over all runs of a Prefect server: a global concurrency limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from resources.config import ResourceConfig
from resources.errors import UnsatisfiableResources
from tasks.prefect_server.client import prefect_client
from tasks.prefect_server.progress import report_event

ACCELERATOR_LIMIT = "assay-accelerators"
"""Name of the limit; without one nothing is counted."""
_LEASE_SECONDS = 120.0


@contextmanager
def accelerators_reserved(resources: ResourceConfig, *, limit_name: str = ACCELERATOR_LIMIT) -> Iterator[None]:
    """Holds as many slots of the limit as all replicas have chips, and waits until they are free.

    Whoever dies with slots in their hands loses them after two minutes. A server that is away meanwhile ends nothing.

    Raises:
        UnsatisfiableResources: there will never be so many slots.
        PrefectUnavailable: the server does not answer.
    """
    chips = resources.chip_count()
    slots = _slots(limit_name) if chips else None
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


def limit_accelerators(slots: int, *, limit_name: str = ACCELERATOR_LIMIT) -> None:
    """Makes the limit, or changes it; what is held meanwhile stays held.

    Raises:
        PrefectUnavailable: the server does not answer.
    """
    with prefect_client() as client:
        client.upsert_global_concurrency_limit_by_name(limit_name, slots)


def _slots(limit_name: str) -> int | None:
    with prefect_client() as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(limit_name)
        except ObjectNotFound:
            return None
    return limit.limit if limit.active else None
