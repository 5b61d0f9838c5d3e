"""Requests of a training to the job client, and its refusals; nothing is trained."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fakes.jobs import FakeClient, FakeJob
from resources.config import Device, GpuConfig, ResourceConfig, TpuConfig
from resources.errors import BackendUnavailable, BadInput, JobFailed
from resources.jobs.jobs import Call, JobDetails, JobRequest, JobStatus
from tasks.spec.training import TrainAndEvaluateConfig, TrainLmOnPodConfig
from tasks.training.job import (
    accelerator_defaults,
    finished,
    is_trained,
    plan_training,
    run_id_of,
    run_levanter_train_lm,
    training,
    training_job,
    training_of,
    variables_of,
)

TWO_GPUS = ResourceConfig.with_gpu("H100", 8, replicas=2)
ON_TPU = ResourceConfig.with_tpu("v5litepod-16", slice_count=2)


@pytest.fixture(autouse=True)
def _process_without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_ID", "WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


def config(output: Path | str | None = None, **changes: Any) -> TrainLmOnPodConfig:
    given = {"train_config": {"trainer": {"num_train_steps": 4}}, "output_path": str(output) if output else None}
    return TrainLmOnPodConfig.model_validate({**given, **changes})


def submitted(training: TrainLmOnPodConfig) -> JobRequest:
    client = FakeClient()
    assert run_levanter_train_lm(training, client=client) is JobStatus.SUCCEEDED
    [request] = client.requests
    return request


def levanter_of(request: JobRequest) -> dict[str, Any]:
    assert isinstance(request.entrypoint, Call)
    return request.entrypoint.args[0]


def variables(request: JobRequest) -> Mapping[str, str]:
    return request.environment.env_vars


@pytest.mark.parametrize(
    ("resources", "kind", "replicas"),
    [(ResourceConfig(), "cpu", 1), (ResourceConfig.with_gpu("H100", 8), "gpu", 1), (ON_TPU, "tpu", 2)],
)
def test_training_asks_for_device_and_replicas_of_its_resources(
    tmp_path: Path, resources: ResourceConfig, kind: str, replicas: int
) -> None:
    request = submitted(config(tmp_path / "run-a", resources=resources, env_vars={"WANDB_MODE": "offline"}))
    assert request.resources.device.kind == kind
    assert request.replicas is None and request.replica_count == replicas
    assert (request.max_retries_failure, request.max_retries_preemption) == (0, 100)
    assert request.name == "train_lm-run-a" and not request.outlives_parent
    assert isinstance(request.entrypoint, Call)
    assert request.entrypoint.kwargs["device"] == kind
    assert request.environment.python is None, "the node builds it, not we"
    assert levanter_of(request)["trainer"].get("require_accelerator", True) is (kind != "cpu")


@pytest.mark.parametrize(
    ("trainer_id", "given", "process", "impute", "expected"),
    [
        ("of-trainer", {"RUN_ID": "of-caller"}, {"RUN_ID": "of-process"}, True, "of-trainer"),
        (None, {"RUN_ID": "of-caller"}, {"RUN_ID": "of-process"}, True, "of-caller"),
        (None, {}, {"RUN_ID": "of-process"}, True, "of-process"),
        (None, {}, {}, True, "of-path"),
        (None, {}, {}, False, None),
    ],
)
def test_run_id_follows_trainer_then_caller_then_process_then_path(
    trainer_id: str | None, given: dict[str, str], process: dict[str, str], impute: bool, expected: str | None
) -> None:
    trainer = {"id": trainer_id} if trainer_id else {}
    training = config(
        "gs://bucket/runs/of-path/",
        train_config={"trainer": trainer},
        env_vars=given,
        impute_run_id_from_output_path=impute,
    )
    planned = training_of(training, process=process)
    assert re.fullmatch(expected or "[a-z2-7]{8}", planned.run_id)
    assert planned.train_config["trainer"]["id"] == planned.run_id
    assert planned.train_config["trainer"]["checkpointer"]["append_run_id_to_base_path"] is not impute
    if expected is None:
        assert planned.run_id != run_id_of(training, {}, process=process), "a new ID every time"
    env_vars = variables_of(
        planned, given, device=training.resources.device, process=process, workspace=Path("/"), git_commit=None
    )
    assert env_vars["RUN_ID"] == planned.run_id


def test_training_on_this_machine_keeps_everything_below_its_output(tmp_path: Path) -> None:
    output = tmp_path / "run-a"
    request = submitted(config(output, auto_build_caches=True))
    written = levanter_of(request)
    assert written["hf_save_path"] == str(output / "hf")
    assert written["trainer"]["log_dir"] == str(output / "logs")
    assert written["trainer"]["checkpointer"] == {
        "append_run_id_to_base_path": False,
        "base_path": str(output / "checkpoints"),
        "temporary_base_path": str(output / "temporary"),
    }
    assert written["data"] == {"auto_build_caches": True, "cache_dir": str(output / "cache")}
    assert json.loads((output / "train_config.json").read_text()) == written
    assert "JAX_COMPILATION_CACHE_DIR" not in variables(request), "each machine has a cache of its own"


def test_training_in_a_store_keeps_what_expires_apart() -> None:
    planned = training_of(config("gs://bucket/runs/run-a"), process={})
    checkpointer = planned.train_config["trainer"]["checkpointer"]
    assert checkpointer["base_path"] == "gs://bucket/runs/run-a/checkpoints"
    assert checkpointer["temporary_base_path"] == "gs://bucket/tmp/ttl=14d/checkpoints/bucket/runs/run-a"
    assert "log_dir" not in planned.train_config["trainer"]
    env_vars = variables_of(
        planned, {}, device=TpuConfig(), process={"WANDB_API_KEY": "k"}, workspace=Path("/"), git_commit="c0"
    )
    assert env_vars["JAX_COMPILATION_CACHE_DIR"] == "gs://bucket/tmp/ttl=30d/compilation-cache"
    assert env_vars["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] == "none"
    elsewhere = training_of(config("gs://bucket/runs/run-a", temporary_path="gs://tmp-eu"), process={})
    assert elsewhere.train_config["trainer"]["checkpointer"]["temporary_base_path"].startswith("gs://tmp-eu/ttl=14d/")


def test_training_without_output_leaves_places_to_its_configuration() -> None:
    given = {"hf_save_path": "/mine", "trainer": {"checkpointer": {"base_path": "/own"}}, "data": {"cache_dir": "/c"}}
    planned = training_of(config(None, train_config=given), process={})
    assert planned.trained is None and not is_trained(planned)
    assert planned.train_config["hf_save_path"] == "/mine"
    assert planned.train_config["trainer"]["checkpointer"]["base_path"] == "/own"
    assert given["trainer"] == {"checkpointer": {"base_path": "/own"}}, "the given configuration is not changed"


def test_training_takes_the_first_tpu_type_where_its_variables_differ_by_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    either = ResourceConfig.with_tpu(["v5e-8", "v6e-8"])
    asked = config("gs://b/run-a", resources=either)
    planned = training_of(asked, process={})
    assert training_job(asked, planned).resources == either
    (tmp_path / ".levanter.yaml").write_text("accel_env: {v6e: {A: newer}}")
    assert training_job(asked, planned).resources == ResourceConfig.with_tpu("v5e-8")


def test_variables_of_the_caller_win_over_the_accelerators_and_these_over_ours(tmp_path: Path) -> None:
    (tmp_path / ".levanter.yaml").write_text(
        "env: {A: env, B: env, C: env, TPU_MIN_LOG_LEVEL: 0}\n"
        "accel_env: {v5litepod: {B: generation, C: generation}, v5litepod-16: {C: type, D: type}, v4-8: {D: other}}\n"
    )
    device = TpuConfig(variant="v5litepod-16")
    assert accelerator_defaults(tmp_path, GpuConfig()) == {}
    env_vars = variables_of(
        training_of(config("gs://b/run-a"), process={}),
        {"D": "caller", "HF_ALLOW_CODE_EVAL": "0"},
        device=device,
        process={"WANDB_API_KEY": "k"},
        workspace=tmp_path,
        git_commit="c0ffee",
    )
    assert {name: env_vars[name] for name in "ABCD"} == {"A": "env", "B": "generation", "C": "type", "D": "caller"}
    assert env_vars["TPU_MIN_LOG_LEVEL"] == "0" and env_vars["TPU_STDERR_LOG_LEVEL"] == "2"
    assert env_vars["HF_ALLOW_CODE_EVAL"] == "0" and env_vars["HF_DATASETS_TRUST_REMOTE_CODE"] == "1"
    assert env_vars["TOKENIZERS_PARALLELISM"] == "false" and env_vars["GIT_COMMIT"] == "c0ffee"
    assert "JAX_PLATFORMS" not in env_vars


@pytest.mark.parametrize(
    ("device", "given", "process", "refused"),
    [
        (TpuConfig(), {}, {}, True),
        (TpuConfig(), {"WANDB_API_KEY": "k"}, {}, False),
        (TpuConfig(), {}, {"WANDB_API_KEY": "k"}, False),
        (TpuConfig(), {"WANDB_MODE": "dryrun"}, {}, False),
        (TpuConfig(), {}, {"WANDB_MODE": "disabled"}, False),
        (TpuConfig(), {"WANDB_MODE": "online"}, {"WANDB_MODE": "offline"}, True),
        (GpuConfig(), {}, {}, False),
    ],
)
def test_training_on_a_tpu_needs_a_key_for_wandb_unless_that_is_off(
    device: Device, given: dict[str, str], process: dict[str, str], refused: bool
) -> None:
    def made() -> dict[str, str]:
        planned = training_of(config("gs://b/run-a"), process=process)
        return variables_of(planned, given, device=device, process=process, workspace=Path("/"), git_commit=None)

    if refused:
        with pytest.raises(BadInput, match="WANDB_API_KEY"):
            made()
    else:
        assert made()["RUN_ID"] == "run-a"


def test_failed_training_raises_and_a_refused_training_says_what_to_do(tmp_path: Path) -> None:
    def fail(job: FakeJob) -> None:
        job.ends_as, job.log = JobStatus.FAILED, "out of memory"

    def refuse(job: FakeJob) -> None:
        fail(job)
        job.announcement = json.dumps({"kind": "BadInput", "expected": "a", "found": "bogus", "remedy": "correct it"})

    with pytest.raises(JobFailed, match="out of memory"):
        run_levanter_train_lm(config(tmp_path / "run-a"), client=FakeClient(fail))
    with pytest.raises(BadInput, match="bogus"):
        run_levanter_train_lm(config(tmp_path / "run-a"), client=FakeClient(refuse))


def test_training_goes_on_while_its_backend_is_silent_unless_that_lasts(tmp_path: Path) -> None:
    class Silent(FakeJob):
        # Does not answer during the first wait.

        answers = True

        def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:
            if not self.current.reason:
                self.says(JobStatus.RUNNING, reason="seen")
                raise BackendUnavailable(expected="an answer", found="a controller that starts", remedy="wait")
            return super().wait(timeout, raise_on_failure=raise_on_failure)

        def status(self) -> JobStatus:
            if not self.answers:
                raise BackendUnavailable(expected="an answer", found="no controller", remedy="start it")
            return super().status()

    def silent() -> Silent:
        return Silent("train_lm-1", JobDetails(job_id="train_lm-1", name="train_lm", status=JobStatus.RUNNING))

    assert finished(silent(), sleep=lambda seconds: None) is JobStatus.SUCCEEDED
    gone = silent()
    gone.answers = False
    with pytest.raises(BackendUnavailable, match="no controller"):
        finished(gone, silence_seconds=0.0, sleep=lambda seconds: None)


def test_training_ends_with_the_block_that_it_was_for(tmp_path: Path) -> None:
    client = FakeClient()
    with pytest.raises(KeyboardInterrupt), training(config(tmp_path / "run-a"), client=client) as job:
        raise KeyboardInterrupt
    assert job.status() is JobStatus.STOPPED


def test_training_is_done_once_it_says_so_for_the_same_configuration(tmp_path: Path) -> None:
    planned = plan_training(config(tmp_path / "run-a"))
    assert planned.trained is not None and not is_trained(planned)
    Path(planned.trained).parent.mkdir()
    Path(planned.trained).write_text(json.dumps({"run_id": "run-a", "steps": 4, "digest": planned.digest}))
    assert is_trained(planned)
    longer = config(tmp_path / "run-a", train_config={"trainer": {"num_train_steps": 8}})
    assert not is_trained(plan_training(longer))


def test_configuration_in_a_file_is_read_where_the_training_is_planned(tmp_path: Path) -> None:
    file = tmp_path / "nano.yaml"
    training = config(tmp_path / "run-a", train_config=str(file))
    with pytest.raises(BadInput, match="is not there"):
        plan_training(training)
    file.write_text("trainer: {num_train_steps: 4}\nmodell: {type: llama}\n")
    with pytest.raises(BadInput, match="did you mean model"):
        plan_training(training)
    file.write_text("trainer: {num_train_steps: 4}\nmodel: {type: llama}\n")
    assert plan_training(training).train_config["model"] == {"type": "llama"}


@pytest.mark.parametrize(
    ("train_config", "message"),
    [
        ({"trainr": {}}, "did you mean trainer"),
        ({"trainer": 3}, "keys and values in trainer"),
        ({"trainer": {"num_train_steps": "many"}}, "trainer.num_train_steps"),
        ({"hf_save_steps": 0}, "hf_save_steps"),
        ({"trainer": {"id": 7}}, "trainer.id"),
        (
            {"data": {"components": {"a": {"source": {"train_urls": ["a.jsonl"]}}}}},
            "data.components.a.source.train_urls",
        ),
        ({"trainer": {"load_checkpoint_path": "checkpoints"}}, "whole path as trainer.load_checkpoint_path"),
        ({"data": {"tokenizer": "./tokenizer"}}, "whole path as data.tokenizer"),
    ],
)
def test_configuration_that_levanter_could_not_read_is_refused_early(
    train_config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        config("run-a", train_config=train_config)


def test_paths_that_are_whole_and_names_at_a_hub_are_taken() -> None:
    source = {"train_urls": ["gs://bucket/a-{0..9}.jsonl", "/data/b.jsonl", "https://host/c.jsonl"]}
    config("run-a", train_config={"data": {"tokenizer": "org/name", "components": {"a": {"source": source}}}})


def both(**changes: Any) -> TrainAndEvaluateConfig:
    given = {
        "training": {"train_config": {}, "output_path": "/runs/run-a/"},
        "evaluations": [{"evals": [{"name": "demo_facts"}]}],
    }
    return TrainAndEvaluateConfig.model_validate({**given, **changes})


def test_evaluations_are_of_the_exports_of_the_training() -> None:
    [evaluation] = both().asked()
    assert (evaluation.model_path, evaluation.run_name) == ("/runs/run-a/hf", "run-a")
    again = TrainAndEvaluateConfig.model_validate(both().model_dump(mode="json"))
    assert again == both(), "as a deployed flow gets it"
    [evaluation, *_] = both(evaluations=(), suite="demo", request={"evaluation_path": "/out"}).asked()
    assert (evaluation.model_path, evaluation.evaluation_path) == ("/runs/run-a/hf", "/out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluations": []}, "neither"),
        ({"suite": "demo"}, "both"),
        ({"training": {"train_config": {}}}, "output_path"),
        ({"training": {"train_config": {}, "output_path": "/r", "resources": TWO_GPUS}}, "expected a single replica"),
        ({"evaluations": [{"evals": [{"name": "demo_facts"}], "model_path": "/runs/run-b/hf"}]}, "left out"),
        ({"evaluations": [{"evals": [{"name": "demo_facts"}], "base_url": "http://h/v1"}]}, "base_url"),
        ({"training": {"train_config": {"trainr": {}}, "output_path": "/r"}}, "did you mean trainer"),
    ],
)
def test_training_with_evaluations_that_do_not_fit_it_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        both(**changes)
