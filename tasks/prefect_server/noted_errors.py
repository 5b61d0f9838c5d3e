"""The error that a flow run failed with, kept with the flow run as values: its state has no more than a message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment, flow_run
from prefect.types import KeyValueLabels

from resources.errors import AssayError, PrefectUnavailable, error_of
from tasks.prefect_server.client import prefect_client

_LABEL = "assay.error."


@contextmanager
def error_noted() -> Iterator[None]:
    """Keeps an error of ours that ends the block as labels of the flow run, if it is one of a deployment.

    It is there before the flow run is over, so who waits for that finds it. A server that is away costs the labels.
    """
    try:
        yield
    except AssayError as error:
        if deployment.id and flow_run.id:
            labels: KeyValueLabels = {f"{_LABEL}{name}": value for name, value in error.as_values().items()}
            with suppress(PrefectUnavailable, ObjectNotFound), prefect_client() as client:
                client.update_flow_run_labels(UUID(flow_run.id), labels)
        raise


def noted_error(run: FlowRun) -> AssayError | None:
    """Return the error that was kept with a flow run, if there is one."""
    labels = {name.removeprefix(_LABEL): value for name, value in run.labels.items() if name.startswith(_LABEL)}
    return error_of(labels) if labels else None
