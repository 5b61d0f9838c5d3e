"""The index of records: its content equals the records, and only changed records are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.records import make_record, of_every_evaluator, publish
from resources.errors import RecordStatus
from tasks.records.index import indexed_records, row_of
from tasks.records.record import Record, read_record
from tasks.records.usage import IndexedRecord

INDEX = ("summary.json", "records.json")


def lose_index(run: Path) -> None:
    for name in INDEX:
        (run / "index" / name).unlink(missing_ok=True)


def place(tmp_path: Path, record: Record) -> Path:
    cell = publish(tmp_path, record)
    return Path(cell) / "record.json"


def test_rows_say_what_the_records_say(tmp_path: Path):
    statuses: tuple[RecordStatus, ...] = ("succeeded", "failed", "withheld", "infra_failed")
    records = [*of_every_evaluator(), *(make_record(step=500 + n, status=status) for n, status in enumerate(statuses))]
    expected = {}
    for record in records:
        path = place(tmp_path, record)
        cell = path.parent.relative_to(tmp_path / "run-a").as_posix()
        expected[cell] = row_of(cell, record)
    for _ in range(2):  # read from the records, then from the index
        run_records = indexed_records(str(tmp_path / "run-a"))
        assert {row.cell: row for row in run_records.others} == {
            cell: row for cell, row in expected.items() if row.status != "succeeded"
        }
        assert {
            (name, hash_) for name, states in run_records.done.items() for state in states for hash_ in state.hashes
        } == {(row.checkpoint, row.evaluation_hash) for row in expected.values() if row.status == "succeeded"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-20],
        lambda content: json.dumps([json.loads(content)]),
        lambda content: json.dumps({**json.loads(content), "status": "splendid"}),
        lambda content: json.dumps({**json.loads(content), "of_a_later_version": 1}),
        lambda content: json.dumps({**json.loads(content), "schema_version": 5}),
        lambda content: json.dumps({name: value for name, value in json.loads(content).items() if name != "metrics"}),
        lambda content: json.dumps({**json.loads(content), "created": "yesterday"}),
        lambda content: json.dumps({**json.loads(content), "created": "2026-01-02T03:04:05"}),
        lambda content: json.dumps({**json.loads(content), "seconds": {"evaluate": float("inf")}}),
        lambda content: json.dumps({**json.loads(content), "status": "infra_failed", "infra_failures": 10**30}),
    ],
)
def test_file_that_is_no_record_is_none_for_the_index_too(tmp_path: Path, spoil: Callable[[str], str]):
    path = place(tmp_path, make_record())
    path.write_text(spoil(path.read_text()))
    assert read_record(str(path.parent)) is None
    run_records = indexed_records(str(tmp_path / "run-a"))
    assert run_records.done == {} and run_records.others == []


@pytest.mark.parametrize("name", INDEX)
def test_folder_in_place_of_the_index_is_none(tmp_path: Path, name: str):
    place(tmp_path, make_record())
    (tmp_path / "run-a" / "index" / name).mkdir(parents=True)
    assert list(indexed_records(str(tmp_path / "run-a")).done) == ["run-a-100"]


def test_record_with_a_number_that_json_has_not_is_read_all_the_same(tmp_path: Path):
    path = place(tmp_path, make_record())
    content: dict[str, Any] = json.loads(path.read_text())
    content["metrics"][0]["stderr"] = float("nan")
    path.write_text(json.dumps(content))
    assert read_record(str(path.parent)) is not None
    assert list(indexed_records(str(tmp_path / "run-a")).done) == ["run-a-100"]


def test_index_without_its_rows_is_right_while_nothing_changes_and_after(tmp_path: Path):
    run = tmp_path / "run-a"
    paths = [place(tmp_path, make_record(step=step)) for step in (100, 200, 300)]
    assert set(indexed_records(str(run)).done) == {"run-a-100", "run-a-200", "run-a-300"}
    (run / "index" / "records.json").unlink()
    assert set(indexed_records(str(run)).done) == {"run-a-100", "run-a-200", "run-a-300"}
    paths[0].unlink()
    content = json.loads(paths[1].read_text())
    shutil.rmtree(paths[1].parent)
    place(tmp_path, make_record(step=200, evaluation_hash="another"))
    run_records = indexed_records(str(run))
    assert {name: state.hashes for name, [state] in run_records.done.items()} == {
        "run-a-200": {"another"},
        "run-a-300": {content["evaluation_hash"]},
    }
    lose_index(run)
    assert indexed_records(str(run)) == run_records


@pytest.mark.parametrize("name", INDEX)
@pytest.mark.parametrize("content", [{}, {"format": 4}, {"format": 4, "rows": [[]], "stamps": [], "compared": "no"}])
def test_damaged_index_is_made_again(tmp_path: Path, name: str, content: dict[str, Any]):
    place(tmp_path, make_record())
    run = tmp_path / "run-a"
    run_records = indexed_records(str(run))
    lose_index(run)
    (run / "index" / name).write_text(json.dumps(content))
    assert indexed_records(str(run)) == run_records
    assert indexed_records(str(run)) == run_records


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("cell", {"a": 1}),
        ("checkpoint", {"a": 1}),
        ("evaluation_hash", ["h"]),
        ("status", "splendid"),
        ("created", "x"),
        ("created", 1e300),
        ("seconds", None),
        ("usage", ["short"]),
        ("usage", [["p"], [1.0], *[None] * 10]),
    ],
)
@pytest.mark.parametrize("file", ["records.json", "summary.json", "9999999999-aa.json"])
def test_rows_of_other_types_are_made_again_or_ignored(tmp_path: Path, file: str, column: str, value: Any):
    path, run = place(tmp_path, make_record(status="failed")), tmp_path / "run-a"
    place(tmp_path, make_record(step=200))
    took = [0.0, 10.0 if file.startswith("9") else 0.0]  # after a comparison of ten seconds, news is read
    run_records = indexed_records(str(run), now=lambda: took.pop(0))
    row = list(row_of(path.parent.relative_to(run).as_posix(), read_record(str(path.parent)) or make_record()))
    row[IndexedRecord._fields.index(column)] = value
    index = run / "index" / file
    content = json.loads(index.read_text()) if index.exists() else {}
    changed = {
        "records.json": {**content, "rows": [row, *content.get("rows", [])[1:]]},
        "summary.json": {**content, "others": [row]},
    }
    index.write_text(json.dumps(changed.get(file, row)))
    if file == "records.json":
        (run / "index" / "summary.json").unlink()
    assert indexed_records(str(run), now=lambda: 20.0) == run_records


@pytest.mark.parametrize(
    ("compared", "took", "asked", "believed"),
    [(1e9, 10.0, 100.0, True), (1e9, 10.0, 300.0, False), (2e9, 10.0, -1e9, False), (1e9, 1e6, 400.0, False)],
)
def test_index_is_believed_for_a_while_under_any_clock(
    tmp_path: Path, compared: float, took: float, asked: float, believed: bool
):
    path = place(tmp_path, make_record())
    clock = iter([compared, compared + took])
    indexed_records(str(path.parents[3]), now=lambda: next(clock))
    path.unlink()
    run_records = indexed_records(str(path.parents[3]), now=lambda: compared + asked)
    assert bool(run_records.done) == believed
