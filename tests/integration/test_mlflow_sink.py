"""Records in MLflow: a real server on SQLite, queried through MLflow's own client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fakes.broken_servers import Way, broken_server
from fakes.cells import make_cell
from fakes.records import make_metric, make_record
from resources.errors import BadInput
from tasks.errors import SinkFailed
from tasks.records.details import BenchmarkDetails
from tasks.sinks.announcement import SEVERAL_BUILDS, Announcement
from tasks.sinks.mlflow_runs import MlflowSink
from tasks.sinks.publishing import publish_record, publish_report
from tasks.sinks.senders import Senders

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def sink(mlflow_address: str, request: pytest.FixtureRequest) -> MlflowSink:
    return MlflowSink(tracking_uri=mlflow_address, experiment=f"of {request.node.name}", tags={"creator": "a test"})


@pytest.fixture
def senders() -> Iterator[Senders]:
    with Senders() as started:
        yield started


def client_of(sink: MlflowSink) -> MlflowClient:
    from mlflow import MlflowClient  # imported locally: it takes two seconds, also in processes that run other tests

    return MlflowClient(sink.tracking_uri)


def runs_of(sink: MlflowSink) -> tuple[Any, dict[str, Any]]:
    client = client_of(sink)
    experiment = client.get_experiment_by_name(sink.experiment)
    assert experiment is not None
    runs: list[Any] = list(client.search_runs([experiment.experiment_id]))
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    children = {str(run.info.run_name): run for run in runs if run is not parent}
    assert len(children) == len(runs) - 1
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parent.info.run_id}
    return parent, children


def files_of(sink: MlflowSink, run_id: str, folder: str = "") -> list[str]:
    entries = client_of(sink).list_artifacts(run_id, folder)
    return [
        path for entry in entries for path in (files_of(sink, run_id, entry.path) if entry.is_dir else [entry.path])
    ]


def test_series_has_a_run_with_curves_and_a_child_per_record(sink: MlflowSink, senders: Senders, tmp_path: Path):
    sink = sink.model_copy(update={"run_name": "pythia", "description": "a base model"})
    resources = {"cpu": 4, "ram": "16g", "device": {"kind": "gpu", "variant": "T4"}, "image": "host:5000/x:v6"}
    evaluation = {
        **make_record().evaluation,
        "pool_config": {"resource_config": resources},
        "model_path": f"runs:/{RUN}/checkpoints",
    }
    details = {"demo_facts": BenchmarkDetails(questions=120, data="org/facts@0123456789abcdef")}
    states = {}
    for step in (200, 100):
        fields = {
            "evaluation": evaluation,
            "tags": ("nightly", "suite=demo"),
            "versions": {**make_record().versions, "lm_eval": f"0.4.{step}"},
            "checkpoint": make_record(step=step).checkpoint.model_copy(
                update={"uri": f"mlflow-artifacts://host/1/{RUN}/artifacts/checkpoints/step-{step}"}
            ),
            "details": details,
            "flow_run": f"evaluate of {step}",
        }
        record, cell = make_cell(tmp_path, step=step, **fields)
        for _ in range(2):
            states[step] = publish_record(record, str(cell), (sink,), senders=senders)[sink.name]
            assert (states[step].status, states[step].reason) == ("published", None)
    parent, children = runs_of(sink)
    assert (parent.info.run_name, parent.info.status) == ("pythia", "FINISHED")
    for metric, value in {"demo_facts/acc": 0.5, "demo_facts/acc_stderr": 0.04}.items():
        history = client_of(sink).get_metric_history(parent.info.run_id, metric)
        assert sorted((point.step, point.value) for point in history) == [(100, value), (200, value)]
    assert parent.data.tags[SEVERAL_BUILDS] == "true"
    builds = sorted(text for name, text in parent.data.tags.items() if name.startswith("build/"))
    assert [text.split(", ")[1] for text in builds] == ["lm_eval 0.4.100", "lm_eval 0.4.200"]
    assert not {"job_name", "model_run_id", "training_step"} & parent.data.tags.keys()

    assert set(children) == {"run-a-100", "run-a-200"}
    child, older = children["run-a-100"], children["run-a-200"]
    assert states[100].where is not None and states[100].where.endswith(f"/runs/{child.info.run_id}")
    assert child.info.status == "FINISHED" and child.data.metrics == older.data.metrics
    tags = child.data.tags
    expected = {
        "accelerator": "T4",
        "cpu": "4",
        "memory": "16g",
        "image": "host:5000/x",
        "image_tag": "v6",
        "image_build_assay_version": metadata.version("assay-evals"),
        "model_run_id": RUN,
        "model_artifact_path": "checkpoints/step-100",
        "model_gs_uri": "None",
        "job_name": "evaluate of 100",
        "config_git_sha": "None",
        "config_path_git_repo": "None",
        "code_git_sha": record.git_commit,
        "creator": "a test",
        "mlflow.note.content": "a base model",
        "tag.nightly": "true",
        "tag.suite_demo": "true",
    }
    assert {name: tags.get(name) for name in expected} == expected
    assert older.data.tags["job_name"] == "evaluate of 200" and "demo_facts" in tags["harness_args"]
    assert child.inputs is not None and parent.inputs is not None
    (data,) = child.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("org/facts", "0123456789abcdef")
    assert parent.inputs.dataset_inputs == [] and files_of(sink, parent.info.run_id) == []
    assert set(files_of(sink, child.info.run_id)) == {
        "record.json",
        "eval_config.yaml",
        "harness_config/job.json",
        "harness_run_output/harness.log",
        "harness_run_output/samples.jsonl.gz",
    }
    local = client_of(sink).download_artifacts(child.info.run_id, "eval_config.yaml", str(tmp_path))
    assert yaml.safe_load(Path(local).read_text()) == evaluation


def test_series_sent_as_a_single_run_goes_on_without_record_tags(sink: MlflowSink, senders: Senders, tmp_path: Path):
    record, cell = make_cell(tmp_path)
    series = Announcement.of(record, str(cell)).series
    client = client_of(sink)
    experiment = client.create_experiment(sink.experiment)
    tags = {"assay.series": series.id, "model_run_id": "None", "evaluator": "x", "by hand": "kept"}
    flat = client.create_run(experiment, run_name=series.name, tags=tags)
    client.log_metric(flat.info.run_id, "demo_facts/acc", 0.25, step=50)
    assert publish_record(record, str(cell), (sink,), senders=senders)[sink.name].status == "published"
    parent, children = runs_of(sink)
    assert parent.info.run_id == flat.info.run_id and set(children) == {"run-a-100"}
    history = client.get_metric_history(flat.info.run_id, "demo_facts/acc")
    assert sorted(metric.step for metric in history) == [50, 100]
    assert parent.data.tags["by hand"] == "kept" and parent.data.tags["evaluator"] == record.evaluator
    assert "model_run_id" not in parent.data.tags


@pytest.mark.parametrize("form", ["{folder}", "file://{folder}", "sqlite:///{folder}/mlflow.db"])
def test_store_of_this_machine_takes_records_and_their_artifacts_lie_in_it(form: str, senders: Senders, tmp_path: Path):
    folder = tmp_path / "mlruns"
    sink = MlflowSink(tracking_uri=form.format(folder=folder), experiment="e")
    sink.check()
    record, cell = make_cell(tmp_path / "evaluations")
    state = publish_record(record, str(cell), (sink,), senders=senders)[sink.name]
    assert (state.status, state.reason) == ("published", None)
    _, children = runs_of(sink.model_copy(update={"tracking_uri": f"sqlite:///{folder}/mlflow.db"}))
    child = children["run-a-100"]
    assert state.where == f"{folder}/artifacts/{child.info.run_id}/artifacts"
    assert Path(str(state.where), "record.json").is_file()
    assert sink.tracking_uri in sink.name and f"{folder}/mlflow.db" in sink.shown_by


def test_series_that_begin_a_store_at_once_are_all_in_it(senders: Senders, tmp_path: Path):
    sink = MlflowSink(tracking_uri=str(tmp_path / "mlruns"), experiment="e")

    def publish(run: str) -> str | None:
        record, cell = make_cell(tmp_path / "evaluations", run=run)
        return publish_record(record, str(cell), (sink,), senders=senders)[sink.name].reason

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(publish, ("a", "b", "c"))) == [None, None, None]
    client = client_of(sink.model_copy(update={"tracking_uri": f"sqlite:///{tmp_path}/mlruns/mlflow.db"}))
    experiment = client.get_experiment_by_name("e")
    assert experiment is not None and len(client.search_runs([experiment.experiment_id])) == 6


def test_names_that_mlflow_refuses_are_rewritten_and_the_report_comes_without_harness_output(
    sink: MlflowSink, senders: Senders, tmp_path: Path
):
    sink = sink.model_copy(update={"harness_output": False})
    metric = make_metric("mmlu:subject=law", 0.5, name="exact_match,strict", stderr=None, n=9)
    record, cell = make_cell(tmp_path, metrics=(metric,))
    assert publish_record(record, str(cell), (sink,), senders=senders)[sink.name].status == "published"
    (tmp_path / "run-a" / "report.html").write_text("<html>")
    assert publish_report(Announcement.of(record, str(cell)), (sink,), senders=senders)[sink.name].status == "published"
    parent, children = runs_of(sink)
    assert parent.data.metrics == {
        "mmlu:subject_law/exact_match_strict": 0.5,
        "mmlu:subject_law/exact_match_strict_n": 9.0,
        "cost/seconds": round(sum(record.seconds.values()), 3),
    }
    assert files_of(sink, parent.info.run_id) == ["report.html"]
    assert set(files_of(sink, children["run-a-100"].info.run_id)) == {"eval_config.yaml", "record.json"}


def test_experiment_that_was_deleted_is_reported(sink: MlflowSink, tmp_path: Path):
    client = client_of(sink)
    client.delete_experiment(client.create_experiment(sink.experiment))
    record, cell = make_cell(tmp_path)
    reason = publish_record(record, str(cell), (sink,))[sink.name].reason
    assert reason is not None and "it was deleted there" in reason


@pytest.mark.parametrize(
    ("way", "about"), [("hanging", "within 3 s"), ("500", "500 error"), ("401", "MLFLOW_TRACKING_TOKEN")]
)
def test_server_that_does_not_work_is_reported_without_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, about: str
):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "open-sesame")
    record, cell = make_cell(tmp_path)
    with broken_server(way) as broken:
        seconds = 3.0 if way == "hanging" else 60.0
        down = MlflowSink(tracking_uri=broken, experiment="e", username="me", timeout_seconds=seconds)
        state = publish_record(record, str(cell), (down,))[down.name]
    assert state.status == "failed" and state.reason is not None
    assert about in state.reason and "open-sesame" not in state.reason


@pytest.mark.parametrize("way", ["refusing", "500"])
def test_server_that_cannot_be_reached_is_refused_before_an_evaluation_begins(way: Way):
    with broken_server(way) as broken:
        sink = MlflowSink(tracking_uri=broken, experiment="e")
        with pytest.raises(SinkFailed) as failed:
            sink.check()
    assert broken in failed.value.expected and failed.value.exit_code == 2 and "assay publish" in failed.value.remedy


def test_server_that_asks_for_a_password_counts_as_reached(mlflow_address: str):
    MlflowSink(tracking_uri=mlflow_address, experiment="e").check()
    with broken_server("401") as asking:
        MlflowSink(tracking_uri=asking, experiment="e").check()


def test_folder_that_cannot_take_runs_is_refused_before_an_evaluation_begins(tmp_path: Path):
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(BadInput, match=str(in_the_way)):
        MlflowSink(tracking_uri=str(in_the_way), experiment="e").check()
    former = tmp_path / "mlruns" / "0" / "meta.yaml"
    former.parent.mkdir(parents=True)
    former.touch()
    with pytest.raises(SinkFailed, match="migrate-filestore"):
        MlflowSink(tracking_uri=str(tmp_path / "mlruns"), experiment="e").check()
