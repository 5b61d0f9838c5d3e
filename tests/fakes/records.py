"""Records as an evaluation publishes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

from pools.weights.merges import Merge
from resources.errors import RecordStatus
from resources.storage import storage
from tasks.records.builds import Build, Qualification, QualifiedBenchmark, QualifiedMetric, Verdict
from tasks.records.details import CheckpointReference, Digests, MergedInput, MergeReference, cell_place
from tasks.records.provenance import versions
from tasks.records.record import Counts, Metric, Record, SinkState, seal, write_record
from tasks.records.samples import SAMPLES_NAME, Sample, write_samples
from tasks.spec.labels import slug_of

FIRST = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

REASONS: dict[RecordStatus, str | None] = {
    "succeeded": None,
    "withheld": (
        "Expected: 120 answers to 120 questions\nFound:    118 answers\nTo do:    run it again; its answers are kept"
    ),
    "failed": (
        "Expected: lm-eval to end with exit code 0\nFound:    exit code 1\nTo do:    read harness.log of the record"
    ),
    "gone": "Expected: the checkpoint in checkpoints\nFound:    its folder was removed\nTo do:    leave it out",
    "infra_failed": (
        "Expected: the engine to answer within 1800 s\nFound:    it was killed (out of memory)\n"
        "To do:    ask for more memory in resource_config.ram"
    ),
}


def merged_record(inputs: Sequence[int], *, run: str = "run-a", place: str = "checkpoints", **others: Any) -> Record:
    made = make_record(step=inputs[-1], run=run, place=place, **others)
    made_of = [make_record(step=step, run=run, place=place).checkpoint for step in inputs]
    merge = MergeReference(
        kind="mean",
        inputs=tuple(
            MergedInput(uri=each.uri, run=run, step=each.step, digest=each.digest, weight=1 / len(inputs))
            for each in made_of
        ),
    )
    changes = {
        "uri": str(Merge.of_folders("mean", [each.uri for each in made_of])),
        "name": f"{run}-{inputs[0]}-to-{inputs[-1]}-mean{len(inputs)}",
        "digest": sha256(" ".join(each.digest for each in made_of).encode()).hexdigest(),
        "merge": merge,
    }
    checkpoint = made.checkpoint.model_copy(update=changes)
    return renamed(made.model_copy(update={"checkpoint": checkpoint}))


def make_metric(
    benchmark: str = "demo_facts",
    value: float = 0.5,
    *,
    name: str = "acc",
    stderr: float | None = 0.04,
    n: int = 120,
    higher_is_better: bool | None = True,
) -> Metric:
    return Metric(benchmark=benchmark, name=name, value=value, stderr=stderr, n=n, higher_is_better=higher_is_better)


def labelled(label: str, value: float = 0.5, *, run: str = "run-a", **others: Any) -> Record:
    """Returns the record of a checkpoint that has a label in place of a step."""
    record = make_record(step=0, run=run, metrics=(make_metric(value=value),), **others)
    changes = {"name": f"{run}-{slug_of(label)}", "label": label, "digest": sha256(label.encode()).hexdigest()}
    uri = f"checkpoints/{run}/{label.replace(' ', '_')}"
    return renamed(
        record.model_copy(update={"checkpoint": record.checkpoint.model_copy(update=changes | {"uri": uri})})
    )


def make_record(
    *,
    step: int = 100,
    status: RecordStatus = "succeeded",
    metrics: tuple[Metric, ...] | None = None,
    run: str = "run-a",
    place: str = "checkpoints",
    benchmarks: tuple[str, ...] | None = None,
    reason: str | None = None,
    **others: Any,
) -> Record:
    """Returns a checkpoint's record; benchmarks follow the metrics, its time the step, its state both."""
    if metrics is None:
        metrics = (make_metric(),)
    if benchmarks is None:
        benchmarks = tuple(dict.fromkeys(metric.benchmark for metric in metrics)) or ("demo_facts",)
    questions = 120 * len(benchmarks)
    answered = {"succeeded": questions, "withheld": questions - 2}.get(status, 0)
    fields: dict[str, Any] = {
        "status": status,
        "reason": reason or REASONS[status],
        "infra_failures": 1 if status == "infra_failed" else None,
        "checkpoint": CheckpointReference(
            uri=f"{place}/{run}/hf/step-{step}",
            run=run,
            name=f"{run}-{step}",
            step=step,
            digest=f"{step:016x}" * 4 if place == "checkpoints" else sha256(f"{place} {step}".encode()).hexdigest(),
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
        "versions": {**versions(), "vllm": "0.22.0", "lm_eval": "0.4.9"},
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
    fields |= others
    fields.setdefault("cell", "+".join(benchmarks))
    return renamed(Record(**fields))


def renamed(record: Record) -> Record:
    """Returns the record, sealed, with the suffix of its cell's name that follows from its checkpoint and settings."""
    shown = re.sub("-[0-9a-f]{8,10}$", "", record.cell)
    place = cell_place(record.checkpoint, record.evaluator, evaluation_hash=record.evaluation_hash, shown=shown)
    return sealed(record.model_copy(update={"cell": storage.basename(place)}))


def sealed(record: Record) -> Record:
    return record.model_copy(update={"digests": seal(record)})


def cell_of(evaluation_path: Path | str, record: Record) -> str:
    place = (record.checkpoint.run, record.checkpoint.folder, record.evaluator, record.cell)
    return storage.join(str(evaluation_path), *place)


def publish(evaluation_path: Path, record: Record, samples: Sequence[Sample] | None = None) -> str:
    """Writes a record and its samples to the path of an evaluation; returns the folder of its cell."""
    cell_uri = cell_of(evaluation_path, record)
    if samples is not None:
        file = Path(cell_uri) / record.attempt / SAMPLES_NAME
        file.parent.mkdir(parents=True)
        write_samples(file, samples)
        record = record.model_copy(update={"digests": Digests(samples=sha256(file.read_bytes()).hexdigest())})
    write_record(cell_uri, record)
    return cell_uri


def make_samples(scores: Sequence[float], *, benchmark: str = "demo_facts", metric: str = "acc") -> list[Sample]:
    """Returns a sample for each score; prompts are the same in every list."""
    return [
        Sample(benchmark=benchmark, id=str(number), prompt=f"Question {number}?", output="a", target="a",
               scores={metric: float(score)})
        for number, score in enumerate(scores)
    ]  # fmt: skip


def of_every_evaluator(*, run: str = "run-a", steps: Sequence[int] = (100, 200, 300, 400)) -> list[Record]:
    """Returns a record of each checkpoint by each evaluator, with all fields that a report shows."""
    sinks = {
        "wandb:team/evaluations": SinkState(status="published", where="https://wandb.test/team/run-a", at=FIRST),
        "object_store:gs://bucket/evaluations": SinkState(
            status="failed",
            reason="Expected: to write gs://bucket/evaluations\nFound:    403: storage.objects.create is missing\n"
            "To do:    grant it to the account",
            at=FIRST,
        ),
    }
    records = []
    for step in steps:
        learnt = step / max(steps)
        common: dict[str, Any] = {"step": step, "run": run, "sinks": sinks if step == steps[-1] else {}}
        records.append(
            make_record(
                metrics=(make_metric("demo_facts", 0.2 + 0.6 * learnt), make_metric("shared", 0.1 + 0.2 * learnt)),
                **common,
            )
        )
        records.append(
            make_record(
                evaluator="helm",
                metrics=(
                    make_metric("demo_mcqa", 0.25 + 0.5 * learnt, name="exact_match", n=60),
                    make_metric("shared", 0.3 + 0.4 * learnt, name="exact_match", n=60),
                ),
                evaluation_hash="aa00bb11cc22dd33",
                counts=Counts(requested=120, answered=120, scored=120, skipped=2, truncated=5),
                links={"HELM's site": "attempt-1/site/index.html"},
                **common,
            )
        )
        judge = {"base_url": None, "pool_name": None, "model": None, "annotator": "demo_judge"}
        outside = {**judge, "base_url": "http://127.0.0.1:8123/v1", "model": "judge-70b"}
        records.append(
            make_record(
                evaluator="alpaca_eval",
                metrics=(make_metric("demo_instructions", 12 + 40 * learnt, name="win_rate", stderr=6.1, n=23),),
                evaluation={"evaluator": {"name": "alpaca_eval", "judge": outside if step == steps[-1] else judge}},
                evaluation_hash="ffee0011" if step == steps[-1] else "99887766",
                counts=Counts(requested=23, answered=23, scored=23, judge_errors=1),
                **common,
            )
        )
        records.append(
            make_record(
                evaluator="levanter_lm_evaluation_harness",
                status="failed" if step == steps[1] else "succeeded",
                metrics=(make_metric("shared", 0.11 + 0.2 * learnt),),
                evaluation_hash="1234",
                served={"by": "the evaluator itself"},
                requests={},
                **common,
            )
        )
    return records


def make_qualification(
    before: Build,
    after: Build,
    *,
    verdict: Verdict = "within noise",
    benchmark: str = "demo_facts",
    bound: float | None = None,
) -> Qualification:
    """Returns a qualification of a change of versions for an lm-eval benchmark; `bound` bounds its accuracy."""
    metric = QualifiedMetric(
        name="acc", before=0.5, after=0.5, low=-(bound or 0.0), high=(bound or 0.0) / 2, verdict=verdict
    )
    qualified = QualifiedBenchmark(
        evaluator="lm_evaluation_harness",
        benchmark=benchmark,
        before=before,
        after=after,
        verdict=verdict,
        questions=120,
        metrics=() if bound is None else (metric,),
    )
    return Qualification(
        checkpoint=make_record().checkpoint,
        compared=("old", "new"),
        margin=0.01,
        benchmarks=(qualified,),
        created=FIRST,
    )
