"""A cell's folder as an evaluation leaves it: the record, and an attempt with samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes.records import make_metric, make_record
from tasks.records.details import CheckpointReference, cell_place
from tasks.records.record import Record, write_record
from tasks.records.samples import SAMPLES_NAME, Sample, write_samples
from tasks.running.cells import Cell
from tasks.spec.benchmarks import evaluation_hash
from tasks.spec.evaluation import EvaluationConfig

METRICS = (make_metric("demo_facts", 0.5), make_metric("demo_backwards", 0.25, name="exact_match", stderr=None))


def make_cell(evaluation_path: Path, *, step: int = 100, questions: int = 3, **fields: Any) -> tuple[Record, Path]:
    record = fields.pop("record", None) or make_record(step=step, **{"metrics": METRICS, **fields})
    cell = evaluation_path / record.checkpoint.run / record.checkpoint.folder / record.evaluator / record.cell
    attempt = cell / record.attempt
    (attempt / "work").mkdir(parents=True)
    (attempt / "work" / "job.json").write_text('{"tasks": ["demo_facts"]}')
    (attempt / "harness.log").write_text(f"harness of step {step}\n")
    samples = [
        Sample(
            benchmark=benchmark,
            id=str(number),
            prompt=f"Question {number}?",
            output=f"answer {number}",
            target="answer 0",
            scores={"acc": 1.0 if number == 0 else 0.0},
        )
        for benchmark in record.benchmarks
        for number in range(questions)
    ]
    write_samples(attempt / SAMPLES_NAME, samples)
    write_record(str(cell), record)
    return record, cell


def cell_uri(config: EvaluationConfig, reference: CheckpointReference, hash_: str | None = None) -> str:
    """Returns the folder of a cell as planning computes it."""
    hash_ = hash_ or evaluation_hash(config)
    return f"{config.evaluation_path}/{cell_place(reference, config.evaluator.name, evaluation_hash=hash_, shown='c')}"


def of_cell(cell: Cell) -> dict[str, Any]:
    return {
        "checkpoint": cell.reference,
        "cell": Path(cell.uri).name,
        "evaluator": cell.config.evaluator.name,
        "evaluation_hash": cell.evaluation_hash,
    }
