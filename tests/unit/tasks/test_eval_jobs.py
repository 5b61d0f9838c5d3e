"""Evaluation jobs from a YAML file: accepted content, refusals and their messages, and rendered manifests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fakes.eval_jobs import SEED, git, new_repository, push, seed_content, write_job
from fakes.models import write_checkpoint
from resources.config import CpuConfig, GpuConfig, TpuConfig
from resources.errors import BadInput
from resources.gke import GPU_NAMES, TPU_NAMES
from tasks.errors import SinkFailed
from tasks.eval_jobs.helm import RunEntry, read_run_entries
from tasks.eval_jobs.here import fetch_model, flat_tags, job_tags, prepare, sink_of
from tasks.eval_jobs.job_file import ComputeConfig, JobFile, ModelSource, advice
from tasks.eval_jobs.manifests import written
from tasks.eval_jobs.reading import EvalJob, evaluation_of, git_state_of, read_job
from tasks.eval_jobs.submission import job_documents
from tasks.spec.evaluation import EvaluationConfig
from tasks.spec.suites import SuiteRequest

ARTIFACT = {"run_id": "3969f731d3f74fd19cfed62a9aa26d69", "artifact_path": "model"}


def rendered(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    read = read_job(write_job(folder, **changes))
    return read.manifests(read.git_state())


def pod_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return documents[0]["spec"]["template"]["spec"]


def with_seed(**changes: Any) -> JobFile:
    content = {name: value for name, value in {**seed_content(), **changes}.items() if value is not None}
    return JobFile.model_validate(content)


# The file


def test_seed_files_are_accepted_unchanged():
    read = read_job(SEED / "eval_config.yml")
    config = evaluation_of(read.job, helm_config="run_specs.conf", entries=read.entries)
    assert isinstance(config, EvaluationConfig)
    assert [task.name for task in config.evals] == ["boolq", "mmlu"]
    assert config.max_eval_instances == 10
    assert config.pool_config is not None
    assert config.pool_config.resource_config.device == GpuConfig(variant="nvidia-tesla-t4")
    assert config.run_name == "model-3969f731"
    assert [(entry.name, entry.priority) for entry in read.entries] == [
        ("boolq", 1), ("mmlu", 2), ("mmlu", 3), ("mmlu", 4)
    ]  # fmt: skip
    first, second = advice(read.job)
    assert first.startswith("image_tag: latest") and second.startswith("evaluation_path is unset")


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        ({"model_config": {"mlflow_artifact": ARTIFACT, "path": "/m"}}, "model_config:", "one of mlflow_artifact"),
        ({"model_config": {"gs_uri": None}}, "model_config:", "found none of them"),
        ({"model_config": {"gs_uri": "s3://b/m"}}, "gs_uri:", "other places go into path"),
        ({"compute_config": {"accelerator": "nvidia-tesla-t5"}}, "accelerator:", "use one of nvidia-tesla-t4"),
        ({"compute_config": {"accelerator": "v6e-16"}}, "compute_config:", "4 VMs"),
        ({"compute_config": {"accelerator": "tpu-v6e-slice"}}, "compute_config:", "with its topology"),
        ({"compute_config": {"acelerator": "T4"}}, "acelerator:", "did you mean accelerator?"),
        ({"compute_config": {"memory": "a lot"}}, "memory:", "a size such as 16Gi"),
        ({"helm": {"args": ["--local-path", "x"]}}, "helm:", "--local-path of helm-run has no meaning here"),
        ({"helm": {"args": ["--max-eval-instances", "ten"]}}, "helm:", "invalid int value: 'ten'"),
        ({"image": "registry/x:v1"}, "image:", "put the tag in image_tag"),
        ({"evaluation": {"suite": "demo"}}, "", "one of helm and evaluation, found both"),
        ({"helm": None}, "", "found neither"),
        ({"helm": None, "evaluation": {"evals": [{"nam": "x"}]}}, "- nam:", "did you mean name?"),
        ({"helm": None, "evaluation": {"suite": "demo", "model_path": "x"}}, "evaluation:", "names the model"),
        ({"kubernetes_config": {"secrets": {"KEY": "hf_secret"}}}, "secrets:", "secret/key"),
    ],
)  # fmt: skip
def test_mistake_is_named_with_its_field_line_and_remedy(
    tmp_path: Path, change: dict[str, Any], line: str, words: str
) -> None:
    file = write_job(tmp_path, **change)
    number = next((n for n, text in enumerate(file.read_text().splitlines(), 1) if line and line in text), None)
    with pytest.raises(BadInput) as refused:
        read_job(file)
    assert words in refused.value.found
    assert "hf_secret" not in str(refused.value)
    if number is not None:
        assert f"line {number}: " in refused.value.found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('entries: [ {description: "mmlu"', "line 1, column"),
        ("[1, 2]", "entries: Field required"),
        ("entries: []", "at least 1 item"),
        ("entries: [{priority: 1}]", "description: Field required"),
        ('entries: [{description: "mmlu:subject"}]', "such as mmlu:subject=anatomy, found 'mmlu:subject'"),
        ("entries: ${nowhere}", "nowhere"),
    ],
)
def test_conf_that_is_no_hocon_or_has_no_run_entries_is_refused_with_its_place(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "run_specs.conf").write_text(text)
    with pytest.raises(BadInput, match=r"run_specs\.conf") as refused:
        read_run_entries(str(tmp_path / "run_specs.conf"))
    assert words in refused.value.found


def test_files_that_are_not_there_or_not_wanted_are_refused(tmp_path: Path) -> None:
    file = write_job(tmp_path)
    (tmp_path / "run_specs.conf").unlink()
    with pytest.raises(BadInput, match="name it with --helm-config"):
        read_job(file)
    suite = write_job(tmp_path, helm=None, evaluation={"suite": "demo"})
    with pytest.raises(BadInput, match="leave --helm-config out"):
        read_job(suite, helm_file=tmp_path / "run_specs.conf")
    with pytest.raises(BadInput, match="did you mean"):
        read_job(write_job(tmp_path, helm=None, evaluation={"suite": "demoo"}))
    with pytest.raises(BadInput, match="raise --priority"):
        read_job(write_job(tmp_path, helm={"args": ["--priority", "0"]}))


def test_evaluation_is_any_evaluator_any_suite_or_helm_on_the_resources_of_the_job() -> None:
    tasks = with_seed(helm=None, evaluation={"evals": [{"name": "demo_facts"}], "max_eval_instances": 5})
    config = evaluation_of(tasks, model_path="/scratch/model")
    assert isinstance(config, EvaluationConfig) and config.pool_config is not None
    assert (config.evaluator.name, config.model_path, config.max_eval_instances) == (
        "lm_evaluation_harness",
        "/scratch/model",
        5,
    )
    assert config.pool_config.resource_config.device == GpuConfig(variant="nvidia-tesla-t4")
    engine = {"model": {"name": "m", "engine_kwargs": {"max_model_len": 64}}}
    pooled = evaluation_of(with_seed(helm=None, evaluation={"evals": [{"name": "x"}], "pool_config": engine}))
    assert pooled.pool_config is not None and pooled.pool_config.model.engine_kwargs == {"max_model_len": 64}
    assert pooled.pool_config.resource_config.ram == "16gi"
    native = evaluation_of(
        with_seed(helm=None, evaluation={"evaluator": "levanter_lm_evaluation_harness", "evals": [{"name": "x"}]})
    )
    assert isinstance(native, EvaluationConfig) and native.pool_config is None
    assert native.resource_config is not None and native.resource_config.cpu == 4
    suite = evaluation_of(with_seed(helm=None, evaluation={"suite": "demo", "model_name": "a"}), device=CpuConfig())
    assert isinstance(suite, SuiteRequest) and suite.model_name == "a"
    assert suite.resource_config is not None and suite.resource_config.device == CpuConfig()
    nested = with_seed(helm=None, evaluation={"helm": {"args": ["-n", "4", "--groups-to-run", "a", "b"]}})
    options = evaluation_of(nested, entries=[RunEntry(description="mmlu:a=1")])
    assert isinstance(options, EvaluationConfig)
    assert options.evaluator.model_dump(include={"num_threads", "groups"}) == {"num_threads": 4, "groups": ("a", "b")}


# The manifests


@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_manifests_follow_the_published_schemas_and_are_the_same_bytes_twice(tmp_path: Path, version: str) -> None:
    rich = {
        "compute_config": {"accelerator": "H100", "count": 8, "spot": True, "machine_family": "a3"},
        "kubernetes_config": {"workload_identity": True, "secrets": {"HF_TOKEN": "hub/token"}, "namespace": "ml"},
    }  # fmt: skip
    for number, changes in enumerate(
        ({}, rich, {"compute_config": {"accelerator": "tpu-v6e-slice", "topology": "2x2"}})
    ):
        read = read_job(write_job(tmp_path / str(number), **changes))
        state = read.git_state()
        assert read.manifests(state) == read_job(read.file).manifests(state)
        for document in read.manifests(state):
            kubernetes_validate.validate(document, version, strict=True)


def test_job_in_a_queue_is_suspended_until_kueue_admits_it(tmp_path: Path) -> None:
    job, config_map = rendered(tmp_path, kubernetes_config={"queue_name": "team"})
    assert (job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"], job["spec"]["suspend"]) == ("team", True)
    assert "kueue" not in json.dumps([config_map, job["spec"]])


def test_job_has_the_parts_that_evaluation_jobs_have_had(tmp_path: Path) -> None:
    job, config_map = documents = rendered(tmp_path)
    spec, pod = job["spec"], pod_of(documents)
    assert (spec["ttlSecondsAfterFinished"], spec["backoffLimit"], pod["restartPolicy"]) == (1800, 3, "Never")
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    ]
    assert "suspend" not in spec
    assert (pod["serviceAccountName"], pod["nodeSelector"]) == (
        "kubernetes",
        {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"},
    )
    [init], [main] = pod["initContainers"], pod["containers"]
    assert init["args"] == [*main["args"], "--fetch"]
    assert main["args"][:3] == ["eval-job", "run", "--config"]
    assert main["resources"] == {
        "requests": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "1"},
    }
    assert {mount["mountPath"] for mount in main["volumeMounts"]} == {"/etc/configs", "/scratch"}
    variables = {variable["name"]: variable.get("value") for variable in main["env"]}
    assert {"CONFIG_PATH_GIT_REPO", "HELM_CONFIG_PATH_GIT_REPO"} <= set(variables)
    assert variables["JOB_NAME"] == job["metadata"]["name"]
    configs, scratch = pod["volumes"]
    assert configs["configMap"]["name"] == config_map["metadata"]["name"] == f"{job['metadata']['name']}-configs"
    claim = scratch["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (claim["storageClassName"], claim["resources"]) == ("standard-rwo", {"requests": {"storage": "50Gi"}})
    assert config_map["immutable"]
    assert config_map["data"] == {name: (SEED / name).read_text() for name in ("run_specs.conf",)} | {
        "eval_config.yml": (tmp_path / "eval_config.yml").read_text()
    }


def test_pod_is_not_root_and_has_secrets_by_reference_only(tmp_path: Path) -> None:
    pod = pod_of(rendered(tmp_path, kubernetes_config={"secrets": {"MLFLOW_TRACKING_PASSWORD": "mlflow/password"}}))
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    assert not pod["automountServiceAccountToken"]
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {
            "name": "MLFLOW_TRACKING_PASSWORD",
            "valueFrom": {"secretKeyRef": {"name": "mlflow", "key": "password"}},
        } in container["env"]


@pytest.mark.parametrize("accelerator", [*GPU_NAMES.values(), *TPU_NAMES.values()])
def test_every_accelerator_of_gke_selects_its_nodes(tmp_path: Path, accelerator: str) -> None:
    tpu = accelerator in TPU_NAMES.values()
    changes = {"accelerator": accelerator, **({"count": 4} if tpu else {})}
    pod = pod_of(rendered(tmp_path, compute_config=changes))
    label = "cloud.google.com/gke-tpu-accelerator" if tpu else "cloud.google.com/gke-accelerator"
    assert pod["nodeSelector"][label] == accelerator
    amount = {"google.com/tpu": "4"} if tpu else {"nvidia.com/gpu": "1"}
    assert amount.items() <= pod["containers"][0]["resources"]["limits"].items()


def test_words_of_autopilot_spot_and_machines_become_selectors(tmp_path: Path) -> None:
    compute = {"accelerator": "L4", "count": 2, "spot": True, "machine_family": "g2", "compute_class": "Accelerator"}
    pod = pod_of(rendered(tmp_path, compute_config=compute, kubernetes_config={"workload_identity": True}))
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-accelerator": "nvidia-l4",
        "cloud.google.com/gke-spot": "true",
        "cloud.google.com/machine-family": "g2",
        "cloud.google.com/compute-class": "Accelerator",
        "iam.gke.io/gke-metadata-server-enabled": "true",
    }
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    assert isinstance(ComputeConfig(accelerator="v5e-4").device, TpuConfig)


def test_job_that_a_pod_could_not_run_is_not_rendered(tmp_path: Path) -> None:
    for changes in ({"model_config": {"path": "/data/m"}}, {"mlflow_config": {"tracking_uri": "sqlite:///m.db"}}):
        with pytest.raises(BadInput, match="--local"):
            rendered(tmp_path, **changes)
    with pytest.raises(BadInput, match="to fit a ConfigMap"):
        read = read_job(write_job(tmp_path))
        big = replace(read, texts={**read.texts, "run_specs.conf": "#" * 1_000_001})
        big.manifests(big.git_state())


def test_name_is_readable_and_follows_from_files_and_commit(tmp_path: Path) -> None:
    names = {rendered(tmp_path, version=version)[0]["metadata"]["name"] for version in ("v1", "v2")}
    long = rendered(tmp_path, tracking_config={"experiment_name": "Ünder_scores " * 20})[0]["metadata"]["name"]
    assert len(names) == 2 and all(name.startswith("eval-test-debug-") for name in names)
    assert len(long) <= 52 and long.replace("-", "").isalnum() and long == long.lower()


# The repository


def repository(folder: Path) -> EvalJob:
    return read_job(write_job(new_repository(folder / "repository") / "jobs"))


def test_files_that_are_not_committed_or_not_pushed_are_refused_unless_allowed(tmp_path: Path) -> None:
    read = repository(tmp_path)
    root = read.file.parents[1]
    with pytest.raises(BadInput, match="no commit"):
        read.git_state().require_clean(allow_dirty=False)
    commit = push(root)
    read.git_state().require_clean(allow_dirty=False)
    origin = read.origin(read.git_state(), job_name="a")
    assert (origin.config_version, origin.config_path, origin.helm_config_path) == (
        commit,
        "jobs/eval_config.yml",
        "jobs/run_specs.conf",
    )
    (root / "other").write_text("x")
    with pytest.raises(BadInput, match="uncommitted: other"):
        read.git_state().require_clean(allow_dirty=False)
    read.git_state(but=root / "other").require_clean(allow_dirty=False)
    git(root, "add", "other")
    git(root, "commit", "-qm", "more")
    with pytest.raises(BadInput, match="not pushed"):
        job_documents(read.file, None, helm_file=None, allow_dirty=False)
    documents = job_documents(read.file, None, helm_file=None, allow_dirty=True)
    assert {"name": "CONFIG_GIT_STATE", "value": "not pushed"} in pod_of(documents)["containers"][0]["env"]
    assert git_state_of([tmp_path]).words == "no commit"


def test_job_file_that_git_ignores_is_not_clean(tmp_path: Path) -> None:
    read = repository(tmp_path)
    (read.file.parents[1] / ".gitignore").write_text("*.conf\n")
    push(read.file.parents[1])
    assert read.git_state().words == "uncommitted: jobs/run_specs.conf"


def test_manifests_that_are_checked_in_are_submitted_as_they_are(tmp_path: Path) -> None:
    read = repository(tmp_path)
    push(read.file.parents[1])
    spec = read.file.with_name("job.yaml")
    spec.write_text(written(read.manifests(read.git_state())))
    with pytest.raises(BadInput, match=r"uncommitted: jobs/job\.yaml"):
        job_documents(None, spec, helm_file=None, allow_dirty=False)
    push(read.file.parents[1])
    assert job_documents(read.file, spec, helm_file=None, allow_dirty=False) == list(
        yaml.safe_load_all(spec.read_text())
    )
    read.file.write_text(read.file.read_text().replace("version: v4", "version: v5"))
    with pytest.raises(BadInput, match="render it again"):
        job_documents(read.file, spec, helm_file=None, allow_dirty=True)
    spec.write_text("kind: Job\n")
    with pytest.raises(BadInput, match="a Job and a ConfigMap"):
        job_documents(None, spec, helm_file=None, allow_dirty=True)


# MLflow


def test_tags_are_those_of_the_seed_with_true_values(tmp_path: Path) -> None:
    read = read_job(SEED / "eval_config.yml")
    variables = {
        "JOB_NAME": "eval-a",
        "CONFIG_VERSION": "10abfb1bf8a0fd1ff65751521daaa0cd76fbc85d",
        "CONFIG_GIT_STATE": "clean",
    }
    paths = {"CONFIG_PATH_GIT_REPO": "jobs/a.yml", "HELM_CONFIG_PATH_GIT_REPO": "jobs/a.conf"}
    origin = read.origin(read.git_state()).in_container({**variables, **paths})
    assert origin.variables() == {**variables, **paths}
    tags = sink_of(read.job, origin).tags
    assert tags == {
        "creator": "Jasper",
        "datasets": '["dolly", "dataset2"]',
        "lifecycle": "experimental",
        "model": "Pythia-70m",
        "job_name": "eval-a",
        "config_version": "v4",
        "config_git_sha": variables["CONFIG_VERSION"],
        "config_git_state": "clean",
        "config_path_git_repo": "jobs/a.yml",
        "helm_config_path_git_repo": "jobs/a.conf",
        "model_run_id": ARTIFACT["run_id"],
        "model_artifact_path": "model",
        "model_gs_uri": "None",
        "accelerator": "nvidia-tesla-t4",
        "accelerator_count": "1",
        "cpu": "4",
        "memory": "16Gi",
        "helm_args": "--max-eval-instances 10 --enable-local-huggingface-models /scratch/model/model",
        "helm_suite": "v1",
        "image": read.job.image,
        "image_tag": "latest",
    }
    bucket = job_tags(with_seed(model_config={"gs_uri": "gs://b/m"}), origin)
    assert (bucket["model_run_id"], bucket["model_gs_uri"]) == ("None", "gs://b/m")
    assert flat_tags({"a": {"b": {"c": 1}}, "d": None, "e": True}) == {"a.b.c": "1", "d": "null", "e": "true"}


def test_tracking_server_is_reached_before_the_model_is_fetched(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m")
    unreachable = {"mlflow_config": {"tracking_uri": "http://127.0.0.1:9"}}
    read = read_job(write_job(tmp_path, model_config={"path": str(model)}, **unreachable))
    notes: list[str] = []
    with pytest.raises(SinkFailed, match="tracking server that answers"):
        prepare(read, local=True, scratch=tmp_path / "scratch", note=notes.append)
    assert not notes and not (tmp_path / "scratch").exists()


# The model


def test_model_is_fetched_once_with_a_tokenizer_of_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    logged = write_checkpoint(tmp_path / "logged" / "step-20")
    memory = fsspec.filesystem("memory")
    memory.put(f"{logged}/", "/bucket/run/hf/step-20/", recursive=True)
    source = ModelSource(path="memory://bucket/run/hf/step-20")
    notes: list[str] = []
    folder = Path(fetch_model(source, scratch=tmp_path / "scratch", note=notes.append))
    assert folder == tmp_path / "scratch" / "checkpoints" / "run" / "hf" / "step-20"
    assert (folder / "model.safetensors").read_bytes() == (logged / "model.safetensors").read_bytes()
    memory.rm("/bucket", recursive=True)
    assert Path(fetch_model(source, scratch=tmp_path / "scratch", note=notes.append)) == folder
    assert [note.split()[0] for note in notes] == ["fetching", source.uri]
    local = ModelSource(path=str(logged))
    assert fetch_model(local, scratch=tmp_path / "other", note=notes.append) == str(logged)
    assert (source.name, local.name) == ("run", "logged")


def test_json_of_a_job_file_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "run_specs.conf").write_text((SEED / "run_specs.conf").read_text())
    (tmp_path / "job.json").write_text(json.dumps(seed_content(), indent=1))
    assert read_job(tmp_path / "job.json").job == read_job(SEED / "eval_config.yml").job
