"""Exports: selection of records, rows in each form, and a single read of every record."""

from __future__ import annotations

import csv
import io
import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import parquet

from fakes.cli import invoke
from fakes.records import FIRST, make_metric, make_record, of_every_evaluator, publish
from fakes.stores import folder_store
from resources.errors import BadInput
from tasks.records.cost import Cost, Predicted
from tasks.records.details import BenchmarkDetails
from tasks.records.export import COLUMNS, exported, measured_rows
from tasks.records.search import RecordFilter


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four checkpoints of a run by four evaluators, and a checkpoint of another run that was evaluated twice."""
    folder = tmp_path_factory.mktemp("evaluations")
    for record in of_every_evaluator():
        publish(folder, record)
    metrics = (make_metric("mmlu", 0.3), make_metric("mmlu_anatomy", 0.4), make_metric("gsm8k", 0.1, name="flexible"))
    for number, value in enumerate((0.3, 0.35)):
        publish(
            folder,
            make_record(
                run="run-b",
                step=50,
                metrics=(make_metric("mmlu", value), *metrics[1:]),
                benchmarks=("mmlu", "gsm8k"),
                cell=f"cell-{number}",
                tags=("nightly",) if number == 0 else ("release", "v2"),
                created=FIRST + timedelta(days=number),
            ),
        )
    return folder


def run(folder: Path | str, *arguments: str) -> str:
    done = invoke(["records", str(folder), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def rows(folder: Path | str, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(folder, *arguments, "--format", "jsonl").splitlines()]


def refused(folder: Path, *arguments: str) -> str:
    with pytest.raises(BadInput) as error:
        invoke(["records", str(folder), *arguments], catch_exceptions=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ([], 27),
        (["--all"], 30),
        (["--run", "run-b"], 3),
        (["--run", "run-?", "--steps", "50:100"], 9),
        (["--steps", ":99"], 3),
        (["--steps", "300:"], 12),
        (["--steps", "200"], 6),
        (["--evaluator", "helm"], 8),
        (["--evaluator", "lm-eval", "--evaluator", "AlpacaEval"], 15),
        (["--benchmark", "mmlu*"], 2),
        (["--benchmark", "shared"], 12),
        (["--benchmark", "shared", "--metric", "acc"], 7),
        (["--metric", "win_*"], 4),
        (["--status", "failed"], 1),
        (["--tag", "release"], 3),
        (["--tag", "nightly", "--all"], 3),
    ],
)
def test_filters_take_the_rows_they_name(evaluations: Path, arguments: list[str], number: int):
    assert len(rows(evaluations, *arguments)) == number


def test_tag_finds_its_evaluation_although_a_newer_evaluation_exists(evaluations: Path):
    [row] = rows(evaluations, "--tag", "nightly", "--benchmark", "mmlu")

    assert row["value"] == 0.3


def test_row_tells_value_counts_status_and_where_it_comes_from(evaluations: Path):
    [row] = rows(evaluations, "--evaluator", "helm", "--benchmark", "demo_mcqa", "--steps", "400")

    expected = {
        "run": "run-a",
        "checkpoint": "run-a-400",
        "metric": "exact_match",
        "value": 0.75,
        "stderr": 0.04,
        "n": 60,
        "status": "succeeded",
        "requested": 120,
        "skipped": 2,
        "truncated": 5,
        "judge_errors": 0,
        "evaluation_hash": "aa00bb11cc22dd33",
        "digest": f"{400:016x}" * 4,
        "seconds": 9.85,
        "sinks": ["wandb:team/evaluations"],
    }
    assert {name: row[name] for name in expected} == expected
    assert list(row) == list(COLUMNS)


def test_cell_without_numbers_has_a_row_that_says_why(evaluations: Path):
    [row] = rows(evaluations, "--status", "failed")

    assert (row["benchmark"], row["metric"], row["value"], row["status"]) == ("shared", None, None, "failed")
    assert "exit code 1" in row["reason"]


def test_every_form_says_the_same(evaluations: Path, tmp_path: Path):
    lines = rows(evaluations, "--all")
    table = list(csv.DictReader(io.StringIO(run(evaluations, "--all", "--format", "csv"))))
    run(evaluations, "--all", "--output", str(tmp_path / "results.parquet"))
    stored = parquet.read_table(tmp_path / "results.parquet")

    assert list(table[0]) == stored.column_names == list(COLUMNS)
    assert [row["value"] for row in lines] == stored.column("value").to_pylist()
    assert [row["value"] for row in table] == ["" if row["value"] is None else repr(row["value"]) for row in lines]
    assert [row["created"] for row in lines] == [at.isoformat() for at in stored.column("created").to_pylist()]
    assert [row["tags"] for row in lines] == stored.column("tags").to_pylist()
    assert table[-1]["tags"] == "release;v2" and table[-1]["higher_is_better"] == "true"
    assert str(stored.schema.field("step").type) == "int64"


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＠"])
def test_cell_that_a_spreadsheet_would_compute_is_text_in_csv_alone(tmp_path: Path, start: str):
    formula = f'{start}HYPERLINK("http://x";1)'
    metrics = (make_metric(value=-0.5, stderr=-2e-07),)
    publish(tmp_path, make_record(metrics=metrics, tags=(formula, "release")))
    publish(tmp_path, make_record(step=200, status="failed", reason=formula))
    first, second = csv.DictReader(io.StringIO(run(tmp_path, "--format", "csv"), newline=""))
    assert {first["tags"], second["reason"]} == {f"'{formula};release", f"'{formula}"}
    assert (first["value"], first["stderr"]) == ("-0.5", "-2e-07")
    assert {row["reason"] for row in rows(tmp_path)} == {None, formula}


@given(st.text(min_size=1))
@example("Loading: 50%\rLoading: 100%\r=cmd|'/C calc'!A0")
def test_any_text_stays_in_its_row_and_cell_of_a_csv(text: str):
    measured = measured_rows([make_record(status="failed", reason=text)], filters=RecordFilter())
    read = csv.reader(io.StringIO(exported(measured, form="csv").decode(), newline=""))
    columns, row = list(read)
    assert dict(zip(columns, row, strict=True))["reason"] in (text, f"'{text}")


def test_output_is_written_in_the_form_its_name_ends_with(evaluations: Path, tmp_path: Path):
    for name in ("a.csv", "b.jsonl", "c.txt"):
        assert run(evaluations, "--output", str(tmp_path / name)) == ""

    assert (tmp_path / "a.csv").read_text().startswith("run,step,")
    assert json.loads((tmp_path / "b.jsonl").read_text().splitlines()[0])["run"] == "run-a"
    assert "Results" in (tmp_path / "c.txt").read_text()


def test_export_of_nothing_still_names_its_columns(evaluations: Path, tmp_path: Path):
    run(evaluations, "--run", "nobody", "--output", str(tmp_path / "none.parquet"))

    assert run(evaluations, "--run", "nobody", "--format", "csv") == ",".join(COLUMNS) + "\n"
    assert parquet.read_table(tmp_path / "none.parquet").column_names == list(COLUMNS)


def test_json_prints_whole_records_and_takes_filters(evaluations: Path):
    every = json.loads(run(evaluations, "--json"))
    of_run = json.loads(run(evaluations, "--json", "--run", "run-b"))
    newest = json.loads(run(evaluations, "--json", "--run", "run-b", "--latest"))

    assert (len(every), len(of_run), len(newest)) == (18, 2, 1)
    assert of_run[0]["checkpoint"]["run"] == "run-b" and of_run[0]["counts"]["skipped"] == 0


def test_table_shows_the_metrics_that_are_named_and_older_records_if_all_are_wanted(evaluations: Path):
    named = run(evaluations, "--run", "run-b", "--benchmark", "mmlu_anatomy")
    older = run(evaluations, "--run", "run-b", "--all")

    assert "mmlu_anatomy" in named and "gsm8k" not in named
    assert "0.300" in older and "0.350" in older


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--format", "parquet"], "--output"),
        (["--output", "results.xlsx"], "results.xlsx"),
        (["--json", "--format", "csv"], "--json"),
        (["--steps", "a:b"], "--steps a:b"),
        (["--status", "done"], "infra_failed"),
        (["--evaluator", "lmeval"], "lm-eval"),
        (["--run", "nobody"], "none of 18"),
    ],
)
def test_what_cannot_be_meant_is_refused(evaluations: Path, arguments: list[str], expected: str):
    assert expected in refused(evaluations, *arguments)


def test_unknown_format_is_refused_with_the_known_names(evaluations: Path):
    done = invoke(["records", evaluations, "--format", "xlsx"])
    assert done.exit_code == 3 and all(name in done.stderr for name in ("xlsx", "table", "csv", "jsonl", "parquet"))


def test_folder_without_records_says_so(tmp_path: Path):
    assert "none" in refused(tmp_path, "--format", "csv")
    assert json.loads(run(tmp_path, "--json")) == []


def test_every_record_is_read_once_with_any_filter(tmp_path: Path):
    for step in range(200):
        publish(tmp_path / "e", make_record(step=step))
    with folder_store(tmp_path / "log") as store:
        listed = rows(f"store://{tmp_path / 'e'}", "--benchmark", "demo*", "--steps", "100:", "--status", "succeeded")
        reads = store.ranges("record.json")

    assert len(listed) == 100
    assert len(reads) == 200


def test_rows_say_what_was_noticed_of_their_benchmark_and_if_the_record_is_what_was_written() -> None:
    details = {"a": BenchmarkDetails(questions=9, truncated=2, skipped=1, at_limit=3, completed={"acc": 0.75})}
    record = make_record(metrics=(make_metric("a"), make_metric("b")), details=details)
    changed = record.model_copy(update={"attempt": "another"})
    names = ("benchmark", "benchmark_truncated", "benchmark_skipped", "at_limit", "completed_value", "integrity")
    values = [tuple(row[name] for name in names) for row in measured_rows([record, changed], filters=RecordFilter())]
    assert values[:2] == [("a", 2, 1, 3, 0.75, "intact"), ("b", None, None, None, None, "intact")]
    assert [row[-1] for row in values[2:]] == ["changed", "changed"]


def test_row_tells_price_and_expectation_and_leaves_empty_what_is_unknown(tmp_path: Path):
    predicted = Predicted(how="guess", basis="a record", seconds=90.0, chip_seconds=720.0, usd=0.1)
    cost = Cost(
        usd=0.12, replica_seconds=100.0, usd_per_hour=4.32, as_of=date(2026, 3, 1), source="the contract of March",
        region="us-east5", preemptible=True, predicted=predicted,
    )  # fmt: skip
    records = [
        make_record(step=100, cost=cost, chip_seconds=800.0),
        make_record(step=200, cost=Cost(why_unknown="it has no price"), served={"by": "endpoint"}),
    ]
    for record in records:
        publish(tmp_path, record)
    priced, unknown = rows(tmp_path)
    names = ("usd", "usd_per_hour", "price_as_of", "price_source", "region", "preemptible", "predicted_usd")
    assert [priced[name] for name in names] == [
        0.12,
        4.32,
        "2026-03-01",
        "the contract of March",
        "us-east5",
        True,
        0.1,
    ]
    assert (priced["chip_seconds"], priced["predicted_how"], priced["predicted_seconds"]) == (800.0, "guess", 90.0)
    assert {unknown[name] for name in (*names, "chip_seconds", "replica_seconds", "predicted_how")} == {None}
