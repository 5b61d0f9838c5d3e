"""Records of checkpoints that had another name by the former rule: recognized by their digests, and copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fakes.cells import of_cell
from fakes.models import write_checkpoint, write_safetensors
from fakes.records import make_record, make_samples, publish, sealed
from tasks.checkpoints.discovery import find_checkpoints
from tasks.records.index import indexed_records
from tasks.records.record import FoundRecord, read_record
from tasks.records.search import former_name_of, records_of_checkpoints
from tasks.records.verification import verified
from tasks.running.cells import Cell, plan_cells
from tasks.spec.evaluation import EvaluationConfig


@pytest.mark.parametrize(
    ("path", "former"),
    [
        ("/r/my-run/hf/step-100", ("my-run", 100)),
        ("/r/my-run/step-100/hf", ("my-run", 100)),
        ("/r/my-run/checkpoint-100", ("my-run", 100)),
        ("/r/my-run/global_step_10/actor/huggingface", ("huggingface", 0)),
        ("/r/my-run/checkpoint-best", ("checkpoint-best", 0)),
        ("/r/my-run/step1000-hf", ("step1000-hf", 0)),
        ("/r/my-run/huggingface/ba100", ("ba100", 0)),
        ("s3://bucket/my run/hf", ("my-run", 0)),
    ],
)
def test_former_name_of_a_path_is_that_of_records_up_to_now(path: str, former: tuple[str, int]):
    assert former_name_of(path) == former


def planned(path: Path, output: Path, **fields: str) -> list[Cell]:
    config = {"model_path": str(path), "evaluation_path": str(output), "evals": [{"name": "demo_facts"}], **fields}
    return plan_cells.fn([EvaluationConfig.model_validate(config)], find_checkpoints(str(path)))


def recorded_as(cell: Cell, output: Path, *, run: str, step: int = 0, name: str | None = None) -> str:
    """Publishes a success of a cell, with samples, as an earlier version named its checkpoint; returns its folder."""
    named = {"run": run, "name": name or run, "step": step, "label": None}
    record = make_record(
        **{**of_cell(cell), "checkpoint": cell.reference.model_copy(update=named), "benchmarks": ("demo_facts",)}
    )
    return publish(output, record.model_copy(update={"samples": 4}), make_samples([1.0, 0.0, 1.0, 0.0]))


@pytest.mark.parametrize(
    ("folder", "former", "place"),
    [
        ("checkpoint-best", "checkpoint-best", "my-run/label-best"),
        ("global_step_10/actor/huggingface", "huggingface", "my-run/step-10"),
        ("step1000-hf", "my-run", "my-run/step-1000"),
    ],
)
def test_record_under_a_former_name_is_copied_to_the_place_of_its_checkpoint(
    tmp_path: Path, folder: str, former: str, place: str
):
    run, output = tmp_path / "my-run", tmp_path / "out"
    write_checkpoint(run / folder)
    write_checkpoint(run / "checkpoint-20", seed=2)
    cells = {cell.reference.short_place: cell for cell in planned(run, output)}
    other, cell = cells.pop("20"), next(iter(cells.values()))
    assert cell.record is None and f"/{place}/" in cell.uri
    old = recorded_as(cell, output, run=former)
    before = Path(old, "record.json").read_bytes()

    again = {each.reference.name: each for each in planned(run, output)}
    copied = again[cell.reference.name].record
    assert copied is not None and copied.checkpoint == cell.reference
    assert not again[other.reference.name].done and read_record(cell.uri) == copied
    assert Path(old, "record.json").read_bytes() == before, "names in records stay"
    assert verified(FoundRecord(cell.uri, copied)).findings == ()
    assert cell.reference.name in indexed_records(str(output / "my-run")).done
    [[item]] = records_of_checkpoints([cell.reference.name], evaluation_path=str(output))
    assert item.cell_uri == cell.uri


@pytest.mark.parametrize("spoiled", ["digest", "changed", "failed", "samples", "name"])
def test_record_that_is_not_of_this_checkpoint_or_was_changed_is_not_copied(tmp_path: Path, spoiled: str):
    run, output = tmp_path / "my-run", tmp_path / "out"
    write_checkpoint(run / "checkpoint-best")
    write_checkpoint(run / "checkpoint-20", seed=2)
    [_, cell] = planned(run, output)
    old = recorded_as(cell, output, run="checkpoint-best")
    record = read_record(old)
    assert record is not None
    match spoiled:
        case "digest":
            write_safetensors(run / "checkpoint-best" / "model.safetensors", seed=3)
        case "changed":
            Path(old, "record.json").write_text(Path(old, "record.json").read_text().replace("0.5", "0.9"))
        case "failed":
            failed = sealed(record.model_copy(update={"status": "failed", "metrics": ()}))
            Path(old, "record.json").write_text(failed.model_dump_json())
        case "samples":
            shutil.rmtree(Path(old, record.attempt))
    again = planned(run, output, **({"model_name": "mine"} if spoiled == "name" else {}))
    assert [each.record for each in again] == [None, None]
