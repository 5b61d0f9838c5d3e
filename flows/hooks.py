"""What happens after a flow run was cancelled or crashed; Prefect calls it by these names, often in another process."""

from __future__ import annotations

from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.logging.loggers import flow_run_logger

from flows.loading import load_config
from resources.errors import AssayError
from resources.jobs import current_client
from tasks.leftovers import end_claims, end_jobs
from tasks.policies import Policy


def leave_nothing(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Ends the claims and jobs of a flow run at once, which would else end with their leases.

    Its failure changes nothing but how long that takes, and is told in the log of the flow run.
    """
    log = flow_run_logger(flow_run, flow)
    parameters = dict(flow_run.parameters)
    try:
        if isinstance(parameters.get("policy"), str):
            parameters["policy"] = load_config(parameters["policy"], Policy)
        claims = end_claims(parameters, flow_run=str(flow_run.id))
        jobs = end_jobs(current_client(), flow_run=str(flow_run.id))
    except AssayError as error:
        log.warning("Claims and jobs of this run end with their leases: %s", error)
    else:
        log.info("After state %s: %d claims and %d jobs of this run were left, and ended.", state.name, claims, jobs)
