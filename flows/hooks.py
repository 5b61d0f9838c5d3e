"""Flows with hooks for cancelled and crashed runs; Prefect calls the hooks by name, often in another process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from logging import Logger, LoggerAdapter
from typing import Any, ParamSpec, TypeVar

from prefect import Flow, flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.logging.loggers import flow_run_logger

from pools.weights.kept import keeping
from resources.backends.current import current_client
from resources.errors import AssayError
from tasks.policies.actions import end_claims, end_jobs, stop_unfinished
from tasks.policies.policy import Policy
from tasks.prefect_server.client import end_reported
from tasks.prefect_server.flow_runs import end_task_runs, error_noted, note_ending
from tasks.running.planning import report_unprotected
from tasks.spec.loading import load_config
from tasks.spec.names import how_many

P = ParamSpec("P")
R = TypeVar("R")


def pipeline(name: str, run_name: str) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """Makes a function a flow that leaves no claim and no job when it is cancelled or crashes.

    The files of the checkpoints that it plans are kept until they are evaluated, or until its end. Its errors are noted
    for clients that wait for it, and its end waits for an unreachable server.
    """

    def made(fn: Callable[P, R]) -> Flow[P, R]:
        @wraps(fn)
        def reported(*args: P.args, **kwargs: P.kwargs) -> R:
            with error_noted(), end_reported(), keeping(report_unprotected):
                return fn(*args, **kwargs)

        # Prefect would look for the names of its annotations in this module.
        reported.__signature__ = signature(fn, eval_str=True)  # pyright: ignore[reportAttributeAccessIssue]
        return flow(
            name=name,
            flow_run_name=run_name,
            persist_result=False,
            on_cancellation=[leave_nothing],
            on_crashed=[leave_nothing],
        )(reported)

    return made


def leave_nothing(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """Ends the claims, jobs and task runs of a flow run at once, and records its end in its progress artifact.

    Without it claims and jobs end with their leases, and task runs of a killed process stay shown as running. Cells
    that a policy's flow run had started when a person cancelled it wait for `assay retry`. Errors are logged to the
    flow run; claims and jobs then end with their leases.
    """
    log = flow_run_logger(flow_run, flow)
    parameters = dict(flow_run.parameters)
    note_ending(flow_run.id, "crashed" if state.is_crashed() else "cancelled")
    try:
        if isinstance(parameters.get("policy"), str):
            parameters["policy"] = load_config(parameters["policy"], Policy)
        now = flow_run.state  # at the server
        is_cancelled = state.is_cancelled() or (now is not None and (now.is_cancelling() or now.is_cancelled()))
        if "policy" in parameters and is_cancelled:
            _stop_cells(Policy.model_validate(parameters["policy"]), flow_run, log)
        claims = end_claims(parameters, flow_run=str(flow_run.id))
        jobs = end_jobs(current_client(), flow_run=str(flow_run.id))
    except AssayError as error:
        log.warning("Claims and jobs of this run end with their leases: %s", error)
    else:
        left = f"{how_many(claims, 'claim')} and {how_many(jobs, 'job')}"
        log.info("After state %s: %s of this run were left, and ended.", state.name, left)
    end_task_runs(flow_run.id)


def _stop_cells(policy: Policy, flow_run: FlowRun, log: Logger | LoggerAdapter[Any]) -> None:
    try:
        stopped = stop_unfinished(policy, flow_run_id=str(flow_run.id), name=flow_run.name)
    except AssayError as error:
        log.warning("The next run begins the unfinished cells of this run again: %s", error)
    else:
        log.info("%s of this run, cancelled before their outcome, wait for assay retry.", how_many(stopped, "cell"))
