"""Records as an evaluation would have published them, for tests of what comes after."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from resources.errors import RecordStatus
from tasks.records import CheckpointReference, Counts, Metric, Record

FIRST = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

REASONS: dict[RecordStatus, str | None] = {
    "succeeded": None,
    "withheld": (
        "Expected: 120 answers to 120 questions\nFound:    118 answers\nTo do:    run it again; answered ones are kept"
    ),
    "failed": (
        "Expected: lm-eval to end with exit code 0\nFound:    exit code 1\nTo do:    read harness.log beside the record"
    ),
    "infra_failed": (
        "Expected: the engine to answer within 1800 s\nFound:    it was killed (out of memory)\n"
        "To do:    ask for more memory in resource_config.ram"
    ),
}


def make_metric(
    benchmark: str = "demo_facts",
    value: float = 0.5,
    *,
    name: str = "acc",
    stderr: float | None = 0.04,
    n: int = 120,
    higher_is_better: bool = True,
) -> Metric:
    """One number."""
    return Metric(benchmark=benchmark, name=name, value=value, stderr=stderr, n=n, higher_is_better=higher_is_better)


def make_record(
    *,
    step: int = 100,
    status: RecordStatus = "succeeded",
    metrics: tuple[Metric, ...] | None = None,
    run: str = "run-a",
    benchmarks: tuple[str, ...] | None = None,
    reason: str | None = None,
    **others: Any,
) -> Record:
    """A record of one checkpoint; its benchmarks follow its metrics, its time of writing its step."""
    if metrics is None:
        metrics = (make_metric(),)
    if benchmarks is None:
        benchmarks = tuple(dict.fromkeys(metric.benchmark for metric in metrics)) or ("demo_facts",)
    questions = 120 * len(benchmarks)
    answered = {"succeeded": questions, "withheld": questions - 2}.get(status, 0)
    fields: dict[str, Any] = {
        "status": status,
        "reason": reason or REASONS[status],
        "cell": f"{'+'.join(benchmarks)}-0123abcd",
        "checkpoint": CheckpointReference(
            uri=f"checkpoints/{run}/hf/step-{step}",
            run=run,
            name=f"{run}-{step}",
            step=step,
            digest=f"{step:016x}" * 4,
            weights_digest=f"{step + 1:016x}" * 4,
        ),
        "evaluator": "lm_evaluation_harness",
        "benchmarks": benchmarks,
        "metrics": metrics if status == "succeeded" else (),
        "counts": Counts(requested=questions, answered=answered, scored=answered) if answered else None,
        "evaluation": {
            "evaluator": "lm_evaluation_harness",
            "evals": [{"name": benchmark, "num_fewshot": None, "task_alias": None} for benchmark in benchmarks],
            "max_eval_instances": None,
            "model_path": f"checkpoints/{run}",
            "pool_config": {
                "model": {
                    "name": run,
                    "engine_kwargs": {"max_model_len": 512, "enforce_eager": True},
                    "generation_params": None,
                    "apply_chat_template": False,
                }
            },
        },
        "evaluation_hash": "5f0c2a7be1d94c36",
        "git_commit": "4b825dc642cb6eb9a060e54bf8d69288fbee4904",
        "git_dirty": True,
        "versions": {"assay-evals": "0.1.0", "python": "3.11.7", "vllm": "0.22.0", "lm_eval": "0.4.9"},
        "hardware": {"device": "cpu", "replicas": 1, "machine": "Linux x86_64, 2 cores"},
        "served": {
            "by": "pool",
            "how": "reload" if step else "cold_start",
            "seconds": 0.31 if step else 24.8,
            "reason": None,
            "engine": {
                "name": "vllm",
                "version": "0.22.0",
                "device": "cpu",
                "arguments": {"max_model_len": 512, "enforce_eager": True},
            },
        },
        "seconds": {"load": 0.31 if step else 24.8, "evaluate": 9.5, "publish": 0.04},
        "chip_seconds": 0.0,
        "requests": {"answered": 4 * questions, "errors": 0, "retried": 1},
        "attempt": "attempt-1",
        "created": FIRST + timedelta(seconds=step),
    }
    return Record(**(fields | others))
