"""Evaluates a job with the flow for a run, or for a suite."""

from __future__ import annotations

from flows.series import evaluate_checkpoints
from flows.suites import evaluate_suite
from tasks.eval_jobs.here import PreparedJob
from tasks.records.record import Record
from tasks.spec.suites import SuiteRequest


def evaluate_job(prepared: PreparedJob) -> list[Record]:
    """Evaluates the model of a job.

    Raises:
        AssayError: a wanted cell has no succeeded record at the end.
    """
    evaluation = prepared.evaluation
    if isinstance(evaluation, SuiteRequest):
        return evaluate_suite(str(prepared.suite), evaluation)
    return evaluate_checkpoints(evaluation)
