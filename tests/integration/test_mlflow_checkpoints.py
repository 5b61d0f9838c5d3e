"""Checkpoints in MLflow: logged to a real server, found, digested, staged and evaluated from there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes.broken_servers import broken_server
from fakes.endpoints import endpoint
from fakes.models import write_nano_llama, write_run
from fakes.tokenizers import write_byte_tokenizer
from flows.series import evaluate_checkpoints
from pools.weights.model_files import digest_model_folder
from pools.weights.staging import Staging
from resources.environments.environments import ensure_environment
from resources.errors import BadInput, StorageError
from resources.storage.mlflow_artifacts import pinned
from tasks.checkpoints.discovery import Checkpoint, find_checkpoints
from tasks.checkpoints.run_snapshot import expand_runs, snapshot_run
from tasks.evaluators.environments import LM_EVAL
from tasks.records.record import read_records
from tasks.sinks.mlflow_runs import MlflowSink
from tasks.spec.evaluation import EvaluationConfig

pytestmark = [pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Logged:
    """A model and a run of two checkpoints, as a training logs them; the model is version 2 of `llama`."""

    address: str
    run_id: str
    model: Path
    artifacts: str


@pytest.fixture(scope="module")
def logged(mlflow_address: str, tmp_path_factory: pytest.TempPathFactory) -> Logged:
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("logged")
    model = write_byte_tokenizer(write_nano_llama(folder / "model", shards=2))
    write_run(folder / "checkpoints", [100, 200])
    client = MlflowClient(mlflow_address)
    run = client.create_run(client.create_experiment("a training"))
    client.log_artifacts(run.info.run_id, str(folder))
    client.create_registered_model("llama")
    for path in ("checkpoints", "model"):
        client.create_model_version("llama", f"runs:/{run.info.run_id}/{path}", run.info.run_id)
    client.set_registered_model_alias("llama", "champion", "2")
    artifacts = str(run.info.artifact_uri).removeprefix("mlflow-artifacts:/")
    return Logged(mlflow_address, run.info.run_id, model, artifacts)


@pytest.fixture(autouse=True)
def _tracking_server(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.address)


def only_checkpoint(uri: str) -> Checkpoint:
    (checkpoint,) = find_checkpoints(uri)
    return checkpoint


@pytest.mark.parametrize(
    "place",
    ["runs:/{run_id}/model", "mlflow-artifacts:/{artifacts}/model", "models:/llama/2", "models:/llama@champion"],
)
def test_checkpoint_is_found_whole_by_each_of_mlflow_s_names_and_staged_as_it_was_logged(
    place: str, logged: Logged, tmp_path: Path
):
    checkpoint = only_checkpoint(place.format(run_id=logged.run_id, artifacts=logged.artifacts))
    server = logged.address.removeprefix("http://")
    assert checkpoint.complete and checkpoint.folder is not None
    assert checkpoint.uri == f"mlflow-artifacts://{server}/{logged.artifacts}/model"
    digests = digest_model_folder(checkpoint.folder)
    with (
        Staging(tmp_path / "staged", max_bytes=2**30, range_bytes=1000) as staging,
        staging.stage(checkpoint.uri, digests) as staged,
    ):
        staged_files = {file.name: file.read_bytes() for file in staged.path.iterdir()}
        assert (
            staged_files == {name: (logged.model / name).read_bytes() for name in staged_files}
            and len(staged_files) > 4
        )


def test_run_of_checkpoints_is_what_a_policy_sees_too(logged: Logged):
    place = f"runs:/{logged.run_id}/checkpoints"
    checkpoints = find_checkpoints(place)
    assert [(checkpoint.step, checkpoint.complete) for checkpoint in checkpoints] == [(100, True), (200, True)]
    (run,) = expand_runs([place])
    assert [seen.uri for seen in snapshot_run(run)] == [checkpoint.uri for checkpoint in checkpoints]
    assert {checkpoint.run for checkpoint in checkpoints} == {f"checkpoints-{logged.run_id[:8]}"}


def test_alias_and_latest_are_pinned_to_a_version(logged: Logged):
    assert pinned("models:/llama@champion") == "models:/llama/2"
    assert pinned("models:/llama/latest") == "models:/llama/2"
    assert pinned("models:/llama@champion/hf/step-5") == "models:/llama/2/hf/step-5"
    assert pinned("models:/llama/1") == "models:/llama/1"


@pytest.mark.parametrize(
    "place",
    [
        "runs:/00000000000000000000000000000000/model",
        "runs:/{run_id}/no-such-folder",
        "models:/llama/77",
        "models:/llama@nobody",
        "models:/llama/Production",
        "models:/no-such-model/1",
        "mlflow-artifacts:/0/no-such-run/artifacts/model",
    ],
)
def test_artifact_that_is_not_there_is_refused(place: str, logged: Logged):
    with pytest.raises(BadInput) as refused:
        find_checkpoints(place.format(run_id=logged.run_id))
    assert "Traceback" not in str(refused.value) and refused.value.remedy


@pytest.mark.harness
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("prefect_api")
def test_model_of_the_registry_is_evaluated_and_its_record_names_the_run_that_logged_it(logged: Logged, tmp_path: Path):
    ensure_environment(LM_EVAL)
    sink = MlflowSink(tracking_uri=logged.address, experiment="of the registry")
    with endpoint(tmp_path, "llama-v2") as served:
        config = EvaluationConfig.model_validate(
            {
                "model_path": "models:/llama@champion",
                "evaluation_path": str(tmp_path / "evaluations"),
                "base_url": served.base_url,
                "evals": [{"name": "demo_facts"}],
                "max_eval_instances": 4,
                "sinks": [sink],
            }
        )
        (record,) = evaluate_checkpoints(config)
    assert record.succeeded and record.checkpoint.name == "llama-v2" and record.flow_run
    assert record.evaluation["model_path"] == "models:/llama/2"
    (noted,) = read_records(str(tmp_path / "evaluations"))
    assert noted.sinks[sink.name].status == "published", noted.sinks[sink.name].reason

    from mlflow import MlflowClient

    client = MlflowClient(logged.address)
    run = client.get_run(str(noted.sinks[sink.name].where).rpartition("/")[2])
    expected = {"model_run_id": logged.run_id, "model_artifact_path": "model", "job_name": record.flow_run}
    assert {name: run.data.tags[name] for name in expected} == expected
    assert run.inputs is not None and [dataset_input.dataset.name for dataset_input in run.inputs.dataset_inputs] == [
        "demo_facts"
    ]


def test_name_without_a_tracking_server_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(BadInput, match="MLFLOW_TRACKING_URI"):
        find_checkpoints("runs:/00000000000000000000000000000001/model")


def test_tracking_server_that_does_not_answer_is_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with broken_server("refusing") as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with pytest.raises(StorageError) as failed:
            find_checkpoints("runs:/00000000000000000000000000000002/model")
    assert address in failed.value.expected and failed.value.exit_code == 2
