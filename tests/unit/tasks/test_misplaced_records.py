"""Records in the folder of another cell, or with names that lead out of it: they are ignored."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fakes.cells import of_cell
from fakes.cli import invoke
from fakes.models import write_run
from fakes.records import cell_of, make_metric, make_record, make_samples, publish
from resources.errors import AssayError, StorageError
from tasks.checkpoints.discovery import find_checkpoints
from tasks.prefect_server.progress import Notice, Update, listening
from tasks.records.index import indexed_records, note_record
from tasks.records.record import find_records, read_record, write_record
from tasks.records.samples import SAMPLES_NAME, parsed_samples
from tasks.records.verdicts import read_early
from tasks.reports.texts import judge_of
from tasks.running.cells import plan_cells
from tasks.sinks.forms.settings import answers_of
from tasks.spec.evaluation import EvaluationConfig

OUT = "../../../../../home"


def scored(folder: Path, step: int, right: int, **fields: Any) -> Path:
    """Publishes a record with `right` of 20 questions correct; returns its folder."""
    metric = make_metric(value=right / 20, n=20).model_copy(update={"recomputed": True})
    samples = make_samples([1.0] * right + [0.0] * (20 - right))
    return Path(publish(folder, make_record(step=step, metrics=(metric,), **fields), samples))


def assay(*arguments: object) -> tuple[int, str]:
    done = invoke(list(map(str, arguments)))
    assert done.exception is None or isinstance(done.exception, SystemExit | AssayError), done.exception
    return getattr(done.exception, "exit_code", done.exit_code), f"{done.output}{done.exception or ''}"


def gate(folder: Path, *arguments: object) -> tuple[int, str]:
    file = folder.parent / "gate.json"
    rule = {"benchmark": "demo_facts", "metric": "acc", "at_least": 0.9}
    file.write_text(json.dumps({"name": "g", "rules": [rule]}))
    return assay("gate", file, "--records", folder, *arguments)


def edited(cell: Path, /, **fields: Any) -> None:
    content = json.loads((cell / "record.json").read_text())
    for name, value in fields.items():
        *inner, last = name.split("__")
        place = content
        for key in inner:
            place = place[int(key) if key.isdigit() else key]
        place[last] = value
    (cell / "record.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", [OUT, "..", ".", "", "a\\b", "a\x1b[2J", "a" * 256])
@pytest.mark.parametrize("field", ["attempt", "cell", "evaluator", "checkpoint__run", "checkpoint__name", "links"])
def test_record_with_a_name_that_leads_elsewhere_is_not_read(tmp_path: Path, field: str, name: str):
    cell = scored(tmp_path, 100, 10)
    edited(cell, **{field: {"site": f"attempt-1/{name}"} if field == "links" else name})
    rejected: dict[str, str] = {}
    assert (read_record(str(cell)), find_records(str(tmp_path), rejected=rejected)) == (None, [])
    assert field.replace("__", ".") in rejected[str(cell)] and "name of a single file" in rejected[str(cell)]


@pytest.mark.parametrize(
    ("sink", "fields"),
    [
        ({"kind": "object_store", "url": "store"}, {"attempt": OUT}),
        ({"kind": "hugging_face", "path": "store"}, {"checkpoint__run": "../.."}),
    ],
    ids=["attempt", "run"],
)
def test_publish_sends_nothing_from_outside_of_a_cell(tmp_path: Path, sink: dict[str, str], fields: dict[str, str]):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "key").write_text("PRIVATE")
    good, cell = scored(tmp_path / "e", 100, 10), scored(tmp_path / "e", 200, 10)
    edited(cell, **fields)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    name = "url" if "url" in sink else "path"
    (tmp_path / "sink.json").write_text(json.dumps({**sink, name: str(tmp_path / "s" / "store")}))
    code, shown = assay("publish", tmp_path / "e", "--sink", tmp_path / "sink.json")
    new = {path for path in tmp_path.rglob("*") if path.is_file()} - before - {tmp_path / "sink.json"}
    assert code == 0 and f"Not counted: {cell}" in shown.replace("\n", ""), shown
    assert all(path.is_relative_to(tmp_path / "s" / "store") for path in new) and new
    assert not any(b"PRIVATE" in path.read_bytes() for path in new) and good.exists()


@pytest.mark.parametrize("damage", ["copied", "renamed", "digest", "settings"])
def test_record_of_another_cell_counts_for_nothing_and_is_named(tmp_path: Path, damage: str):
    folder = tmp_path / "e"
    good, cell = scored(folder, 100, 20), scored(folder, 200, 11)
    indexed_records(str(folder / "run-a"))
    match damage:
        case "copied":
            shutil.rmtree(cell)
            shutil.copytree(good, cell)
        case "renamed":
            good.parents[1].rename(folder / "run-a" / "step-300")
            good, cell = cell, folder / "run-a" / "step-300" / good.parent.name / good.name
        case "digest":
            edited(cell, checkpoint__digest="f" * 64)
        case _:
            edited(cell, evaluation_hash="another")
    assert [item.cell_uri for item in find_records(str(folder))] == [str(good)]
    [done] = indexed_records(str(folder / "run-a")).done
    assert done == f"run-a-{good.parents[1].name.removeprefix('step-')}"
    code, shown = assay("records", folder, "--verify")
    assert code == 1 and f"{cell}: record.json " in shown and "1 record as written, 1 changed" in shown
    code, shown = gate(folder)
    assert code == 1 and "1 of 1 failed, 1 of them without a record" in re.sub(r"[\s│]+", " ", shown), shown
    code, shown = assay("compare", cell, good)
    assert code == 3 and "record.json" in shown
    assert assay("report", folder, "--output", tmp_path / "r.html")[0] == 0


def test_cell_that_was_deleted_is_found(tmp_path: Path):
    folder = tmp_path / "e"
    cells = [scored(folder, step, 10) for step in (100, 200, 300)]
    for number, cell in enumerate(cells[:2]):
        (record,) = (item.record for item in find_records(str(cell)))
        if number:
            note_record(str(folder / "run-a"), str(cell), record)
        else:
            indexed_records(str(folder / "run-a"))
    shutil.rmtree(cells[0])
    shutil.rmtree(cells[1])
    (cells[2] / "record.json").unlink()
    code, shown = assay("records", folder, "--verify")
    assert code == 1 and shown.count("record.json is gone") >= 3
    assert all(f"{cell}: record.json is gone, but {why}" in shown for cell, why in zip(
        cells, ["the run's index lists it"] * 2 + ["attempt-1 has its samples"], strict=True))  # fmt: skip
    (cells[2] / "unfinished.json").write_text("{}")
    assert str(cells[2]) not in assay("records", folder, "--verify")[1]


def test_records_that_were_moved_together_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scored(tmp_path / "e", 100, 10)
    (tmp_path / "e").rename(tmp_path / "moved")
    for folder in (tmp_path / "moved", tmp_path / "moved" / "run-a"):
        monkeypatch.chdir(folder)
        assert len(find_records(".")) == len(find_records(str(folder))) == 1
    assert list(indexed_records(str(tmp_path / "moved" / "run-a")).done) == ["run-a-100"]


def test_planner_evaluates_a_cell_that_holds_another_cells_record(tmp_path: Path):
    run = write_run(tmp_path / "run-a", [1, 2])
    evaluation = EvaluationConfig.model_validate(
        {"model_path": str(run), "evaluation_path": str(tmp_path / "out"), "evals": [{"name": "demo_facts"}]}
    )
    notices: list[Update] = []

    def plan() -> list[Any]:
        with listening(notices.append):
            return plan_cells.fn([evaluation], find_checkpoints(str(run)))

    first, second = plan()
    write_record(first.uri, make_record(**of_cell(first)))
    shutil.copytree(first.uri, second.uri)
    assert [cell.done for cell in plan()] == [True, False]
    [notice] = [update.text for update in notices if isinstance(update, Notice)]
    assert second.uri in notice and "step-1/" in notice and "counts as not evaluated" in notice
    record = make_record(**of_cell(second), attempt="attempt-2")
    assert write_record(second.uri, record).attempt == "attempt-2"
    assert [cell.done for cell in plan()] == [True, True]


def test_early_verdict_of_another_cell_is_none(tmp_path: Path):
    cell = Path(cell_of(tmp_path, make_record()))
    cell.mkdir(parents=True)
    checkpoint = make_record(step=200).checkpoint.model_dump()
    (cell / "early.json").write_text(json.dumps({
        "cell": cell.name, "checkpoint": checkpoint, "evaluator": cell.parent.name, "benchmarks": [],
        "evaluation_hash": make_record().evaluation_hash, "wanted": "", "gate": "g", "alpha": 0.05, "scores": [],
        "asked": 1, "questions": 2, "attempt": "attempt-1", "created": "2026-01-01T00:00:00Z",
    }))  # fmt: skip
    assert read_early(str(cell)) is None
    content = json.loads((cell / "early.json").read_text())
    (cell / "early.json").write_text(json.dumps({**content, "checkpoint": make_record().checkpoint.model_dump()}))
    assert read_early(str(cell)) is not None


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


def huge(content: bytes) -> bytes:
    return gzip.compress(gzip.decompress(content).replace(b'"acc":1.0', b'"acc":1e308'))


@pytest.mark.parametrize("damage", [flipped, huge, lambda content: content[:-20], lambda _: gzip.compress(b"[" * 9)])
def test_damaged_samples_are_a_finding_of_their_cell(tmp_path: Path, damage: Any):
    folder = tmp_path / "e"
    cells = [scored(folder, step, right) for step, right in ((100, 9), (200, 10), (300, 11))]
    file = cells[1] / "attempt-1" / SAMPLES_NAME
    file.write_bytes(damage(file.read_bytes()))
    code, shown = assay("records", folder, "--verify")
    assert code == 1 and "2 records as written, 1 changed" in shown and "samples cannot be read" in shown
    page = tmp_path / "view.html"
    assert assay("view", folder, "--output", page)[0] == 0 and page.exists()
    assert assay("compare", "run-a-100", "run-a-300", "--path", folder)[0] == 0
    code, shown = assay("compare", "run-a-100", "run-a-200", "--path", folder)
    assert code == 3 and "run-a-200, demo_facts: its samples cannot be read" in shown
    code, shown = assay("compare", "run-a-100", "run-a-200", "--path", folder, "--anyway")
    assert code == 0 and "its samples cannot be read" in " ".join(shown.split())
    form = ("--format", "every-eval-ever", "--organization", "my-lab", "--output", tmp_path / "eee")
    code, shown = assay("records", folder, *form)
    assert code == 0 and "left out: 1 with samples that cannot be read" in " ".join(shown.split()), shown
    assert len(list((tmp_path / "eee").rglob("*.json"))) == 2


def test_line_of_samples_is_bounded():
    packed = gzip.compress(b'{"benchmark": "' + b" " * (65 << 20))
    with pytest.raises(StorageError, match="a line of more than"):
        list(parsed_samples(packed, uri="samples"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("served__engine", "vllm"),
        ("served__engine", {"packages": ["vllm"]}),
        ("served__replica_seconds", "long"),
        ("evaluation__evals", "demo_facts"),
        ("evaluation__evals", [1]),
        ("evaluation__evals", [{"name": ["demo_facts"]}]),
        ("evaluation__evals", [{"name": "demo_facts", "task_kwargs": "x"}]),
        ("evaluation__pool_config", "pool"),
        ("evaluation__pool_config", {"model": 5}),
        ("evaluation__pool_config", {"resource_config": {"device": "gpu"}}),
        ("evaluation__max_eval_instances", "many"),
        ("evaluation__max_eval_instances", 2**70),
        ("evaluation__evaluator", {"temperature": float("inf")}),
        ("seconds", {"evaluate": 1e308, "write": 1e308}),
        ("metrics__0__value", 1e308),
        ("metrics__0__stderr", -1e308),
        ("metrics", [{**make_metric(a).model_dump(), "parts": {b: 1.0}} for a, b in ("xy", "yx")]),
        ("samples", 10**30),
        ("cost", {"usd": 1e308}),
        ("cost", {"earlier": {"attempts": 2**80}}),
    ],
)
def test_record_with_a_part_or_a_number_that_no_reader_takes_costs_its_own_cell(tmp_path: Path, field: str, value: Any):
    good, cell = scored(tmp_path, 100, 10), scored(tmp_path, 200, 10)
    edited(cell, **{field: value})
    rejected: dict[str, str] = {}
    assert [item.cell_uri for item in find_records(str(tmp_path), rejected=rejected)] == [str(good)]
    assert list(rejected) == [str(cell)] and "record.json cannot be read" in rejected[str(cell)]


def test_settings_of_an_evaluator_that_are_none_are_not_read():
    record = make_record(evaluation={"evaluator": {"judge": 5, "generation_params": "x"}})
    assert (judge_of(record), answers_of(record, "demo_facts")) == (None, {})
