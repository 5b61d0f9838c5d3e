"""The demo's flow: all checkpoints by every harness of its suite, and the mean of the last checkpoints by the first."""

from __future__ import annotations

from flows.evaluation import evaluate
from flows.hooks import pipeline
from tasks.records.record import Record
from tasks.running.planning import Request, plan
from tasks.spec.evaluation import EvaluationConfig


@pipeline("evaluate-demo", run_name="evaluate {merged.run_name} · demo")
def evaluate_demo(configs: tuple[EvaluationConfig, ...], merged: EvaluationConfig) -> list[Record]:
    """Runs every evaluation of a run's checkpoints, and an evaluation of a merged checkpoint, on a shared pool.

    Args:
        configs: The evaluations of the checkpoints.
        merged: The evaluation of the merged checkpoint, with its name as model_path.
    """
    return evaluate(plan(Request(configs, merged=merged)))
