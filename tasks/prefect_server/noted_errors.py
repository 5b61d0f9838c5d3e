"""The error of a failed flow run, stored with the flow run as values: its state has only a message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment, flow_run
from prefect.types import KeyValueLabels

from resources.errors import AssayError, error_of
from tasks.errors import PrefectUnavailable
from tasks.prefect_server.client import prefect_client

_LABEL = "assay.error."


@contextmanager
def error_noted() -> Iterator[None]:
    """Stores an AssayError from the block as labels of the flow run, if the run belongs to a deployment.

    Labels are set before the flow run ends, for clients that wait for it; omitted if the server is unreachable.
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
    """Returns the stored error of a flow run, if any."""
    labels = {name.removeprefix(_LABEL): value for name, value in run.labels.items() if name.startswith(_LABEL)}
    return error_of(labels) if labels else None
