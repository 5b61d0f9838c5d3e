"""Sinks: refusals of their configuration, their notifications, and the work that `assay publish` finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from fakes.cells import METRICS, make_cell
from fakes.records import make_metric, make_record
from resources.errors import BadInput
from tasks.errors import SinkFailed
from tasks.records.details import BenchmarkDetails
from tasks.records.record import read_record
from tasks.sinks.announcement import Announcement, metric_values
from tasks.sinks.credentials import credentials_of, scrub
from tasks.sinks.hugging_face import HuggingFaceSink, with_results
from tasks.sinks.publishing import publish_missing, sinks_in
from tasks.spec.sinks import Sinks

SECRET = "0123456789abcdef0123456789abcdef01234567"
SINKS: TypeAdapter[Any] = TypeAdapter(Sinks)
MLFLOW = {"kind": "mlflow", "tracking_uri": "http://10.0.0.15:5000", "experiment": "e"}
WANDB = {"kind": "wandb", "project": "p"}
STORE = {"kind": "object_store", "url": "gs://bucket/evaluations"}


@pytest.mark.parametrize(
    "sink",
    [
        {**WANDB, "api_key": SECRET},
        {**WANDB, "project": SECRET},
        {**WANDB, "tags": ["a", "wandb_v1_" + SECRET]},
        {**WANDB, "base_url": f"https://user:{SECRET}@wandb.example"},
        {**MLFLOW, "tracking_uri": f"http://user:{SECRET}@10.0.0.15:5000"},
        {**MLFLOW, "password": SECRET},
        {**MLFLOW, "tags": {"api_key": "0" + SECRET}},
        {**MLFLOW, "token_block": SECRET},
        {**STORE, "url": f"s3://bucket/evaluations?X-Amz-Signature={SECRET}"},
        {**STORE, "credentials": {"private_key": SECRET}},
    ],
)
def test_sink_that_holds_a_key_is_refused_without_showing_it(sink: dict[str, Any]):
    with pytest.raises(BadInput) as refused:
        SINKS.validate_python([sink])
    shown = f"{refused.value}{refused.value.__cause__!r}{refused.value.__context__!r}"
    assert SECRET not in shown and "environment" in refused.value.remedy


@pytest.mark.parametrize(
    ("sink", "about"),
    [
        ({**MLFLOW, "tracking_uri": "mlflow.example:5000"}, "http://"),
        ({**MLFLOW, "tracking_uri": "gs://bucket/mlruns"}, "a folder"),
        ({**MLFLOW, "tracking_uri": "sqlite:///"}, "sqlite:///FILE"),
        ({**MLFLOW, "experiment": " "}, "1 to 500 characters"),
        ({**WANDB, "project": "team/project"}, "none of them"),
        ({**WANDB, "entity": ""}, "none of them"),
        ({**WANDB, "mode": "offline", "folder": "gs://bucket/x"}, "local folder"),
        ({"kind": "object_store"}, "neither"),
        ({**STORE, "block": "a-block"}, "both"),
        ({**WANDB, "timeout_seconds": 0}, "greater than 0"),
        ({**WANDB, "colour": "red"}, "colour"),
    ],
)
def test_sink_that_cannot_work_is_refused(sink: dict[str, Any], about: str):
    with pytest.raises(ValidationError, match=about):
        SINKS.validate_python([sink])


def test_same_place_twice_is_refused():
    with pytest.raises(ValidationError, match="found twice: mlflow"):
        SINKS.validate_python([MLFLOW, WANDB, {**MLFLOW, "tags": {"creator": "me"}}])


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("https://mlflow.example/team/", "https://mlflow.example/team"),
        ("mlruns", "{here}/mlruns"),
        ("file:///mlruns/", "/mlruns"),
        ("sqlite:///runs/mlflow.db", "sqlite:///{here}/runs/mlflow.db"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
    ],
)
def test_tracking_uri_means_the_same_place_in_other_folders(written: str, meant: str):
    [sink] = SINKS.validate_python([{**MLFLOW, "tracking_uri": written}])
    meant = meant.format(here=Path.cwd())
    assert sink.model_dump()["tracking_uri"] == meant
    assert SINKS.validate_python([sink.model_dump()]) == (sink,)


def test_publishing_imports_no_client_library():
    clients = "{'wandb', 'mlflow', 'gcsfs', 'prefect_gcp'}"
    program = f"import sys, tasks.sinks.publishing; print(sorted({clients} & set(sys.modules)))"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "text",
    [
        f"cannot reach https://user:{SECRET}@mlflow.example/api",
        f"Authorization: Bearer {SECRET}",
        f"GET /o?name=a&X-Goog-Signature={SECRET} failed",
        f"the key {SECRET} is wrong",
    ],
)
def test_scrubbed_text_holds_no_secret(text: str):
    assert SECRET not in scrub(text, [SECRET] if "key" in text else [])
    assert "***" in scrub(text, [SECRET])


def test_sink_s_process_gets_no_run_of_a_training_job(monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_RUN_ID", "WANDB_MODE", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "theirs")
    variables = credentials_of(SINKS.validate_python([WANDB])[0]).variables
    assert {name for name, value in variables.items() if value == "theirs"} == {"WANDB_API_KEY"}


def test_series_tells_settings_evaluators_and_folders_apart():
    def series(cell: str, **fields: Any) -> str:
        return Announcement.of(make_record(**fields), f"{cell}/run-a/step-100/lm_evaluation_harness/x-1").series.id

    ids = [series("/e"), series("/f"), series("/e", evaluation_hash="of five shots"), series("/e", evaluator="helm")]
    assert len(set(ids)) == 4
    assert series("/e", step=200) == ids[0]
    quick = make_record(evaluation={"max_eval_instances": 5})
    named = Announcement.of(quick, "/e/run-a/step-100/lm_evaluation_harness/x-1").series.name
    assert named == "run-a lm_evaluation_harness demo_facts limit 5 5f0c2a7b"


def test_metric_values_have_intervals_and_what_was_noticed_of_benchmarks_and_groups():
    share = make_metric("a", 0.0, stderr=None).model_copy(update={"low": 0.0, "high": 0.03})
    group = make_metric("g", 0.5, stderr=None).model_copy(update={"parts": {"a": 0.5, "b": 0.5}})
    details = {
        "a": BenchmarkDetails(questions=120, truncated=3, at_limit=30, completed={"acc": 0.25}),
        "b": BenchmarkDetails(questions=10, skipped=2),
    }
    values = metric_values(make_record(metrics=(share, group), details=details))
    assert {name: value for name, value in values.items() if not name.endswith("_n")} == {
        "a/acc": 0.0,
        "a/acc_low": 0.0,
        "a/acc_high": 0.03,
        "g/acc": 0.5,
        "a/truncated": 3,
        "a/skipped": 0,
        "a/at_limit": 30,
        "a/completed/acc": 0.25,
        "b/truncated": 0,
        "b/skipped": 2,
        "g/truncated": 3,
        "g/skipped": 2,
        "g/at_limit": 30,
        "cost/seconds": 9.85,
    }


def test_samples_are_bounded_and_cover_every_benchmark(tmp_path: Path):
    record, cell = make_cell(tmp_path, questions=10)
    announcement = Announcement.of(record, str(cell))
    taken = [(sample.benchmark, sample.id) for sample in announcement.samples(4)]
    assert taken == [("demo_facts", "0"), ("demo_facts", "1"), ("demo_backwards", "0"), ("demo_backwards", "1")]
    (cell / record.attempt / "samples.jsonl.gz").unlink()
    assert list(announcement.samples(4)) == []


def card_of(card: str, **fields: Any) -> tuple[dict[str, Any], str]:
    record = make_record(**{"metrics": METRICS, **fields})
    announcement = Announcement.of(record, "gs://bucket/evaluations/run-a/step-100/lm_evaluation_harness/x-1")
    written = with_results(card, record, announcement, task_type="text-generation", uri="README.md")
    _, front, body = written.split("---\n", 2)
    return yaml.safe_load(front), body


def test_model_card_keeps_what_others_wrote():
    theirs = {"task": {"type": "text-generation"}, "dataset": {"name": "mmlu", "type": "mmlu"}, "metrics": []}
    before = {"license": "apache-2.0", "model-index": [{"name": "mine", "results": [theirs]}]}
    metadata, body = card_of(f"---\n{yaml.safe_dump(before)}---\n# My model\n\n---\ntext\n")
    assert metadata["license"] == "apache-2.0" and body == "# My model\n\n---\ntext\n"
    model = metadata["model-index"][0]
    assert model["name"] == "mine"
    assert [result["dataset"]["name"] for result in model["results"]] == ["demo_backwards", "demo_facts", "mmlu"]
    assert model["results"][0]["source"]["url"].startswith("gs://bucket/evaluations/")


def test_model_card_replaces_older_numbers_of_the_same_benchmark():
    first, _ = card_of("")
    metadata, _ = card_of(f"---\n{yaml.safe_dump(first)}---\n", metrics=(make_metric("demo_facts", 0.9),))
    values = {
        result["dataset"]["name"]: result["metrics"][0]["value"] for result in metadata["model-index"][0]["results"]
    }
    assert values == {"demo_facts": 0.9, "demo_backwards": 0.25}


@pytest.mark.parametrize("metadata", ["- a list", "model-index: {name: a}", "model-index: [a, b]"])
def test_model_card_with_invalid_metadata_is_refused(metadata: str):
    with pytest.raises(SinkFailed, match="mend or remove it"):
        card_of(f"---\n{metadata}\n---\n")


def test_publish_sends_what_is_missing_and_only_that(tmp_path: Path):
    evaluations, cards = tmp_path / "evaluations", tmp_path / "cards"
    cells = {step: make_cell(evaluations, step=step)[1] for step in (100, 200)}
    make_cell(evaluations, step=300, status="withheld")
    sink = HuggingFaceSink(path=str(cards))
    first = publish_missing(str(evaluations), (sink,))
    assert [(published.title, published.state.status) for published in first] == [
        ("run-a-100 lm_evaluation_harness", "published"),
        ("run-a-200 lm_evaluation_harness", "published"),
    ]
    assert {path.parent.name for path in cards.rglob("README.md")} == {"step-100", "step-200"}
    standing = read_record(str(cells[100]))
    assert standing is not None and standing.sinks[sink.name].status == "published"
    assert publish_missing(str(evaluations), (sink,)) == []
    assert len(publish_missing(str(evaluations), (sink,), again=True)) == 2


def test_publish_without_a_file_sends_records_where_their_evaluation_said(tmp_path: Path):
    named = [{"kind": "hugging_face", "path": str(tmp_path / "cards")}]
    make_cell(tmp_path / "evaluations", evaluation={**make_record().evaluation, "sinks": named})
    assert [sent.state.status for sent in publish_missing(str(tmp_path / "evaluations"), None)] == ["published"]


def test_publish_with_nothing_to_send_to_is_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="no succeeded record"):
        publish_missing(str(tmp_path), None)
    make_cell(tmp_path)
    with pytest.raises(BadInput, match="--sink FILE"):
        publish_missing(str(tmp_path), None)


@pytest.mark.parametrize(
    "content",
    [
        "kind: hugging_face\npath: cards\n",
        "- kind: hugging_face\n  path: cards\n",
        "sinks:\n  - kind: hugging_face\n    path: cards\n",
    ],
)
def test_sink_file_may_hold_a_single_sink_or_a_list(tmp_path: Path, content: str):
    file = tmp_path / "sink.yaml"
    file.write_text(content)
    assert sinks_in(str(file), None) == (HuggingFaceSink(path="cards"),)


@pytest.mark.parametrize(
    ("content", "about"),
    [
        ("kind: wandb\nprojekt: p\n", "did you mean project"),
        ("kind: floppy\n", "floppy"),
        ("sinks: []\n", "a sink in"),
        ("- kind: [\n", "YAML"),
        ("just words", "sinks"),
    ],
)
def test_sink_file_that_is_wrong_is_refused_with_its_mistake(tmp_path: Path, content: str, about: str):
    file = tmp_path / "sink.yaml"
    file.write_text(content)
    with pytest.raises(BadInput, match=about):
        sinks_in(str(file), None)
