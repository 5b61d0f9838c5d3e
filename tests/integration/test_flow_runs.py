"""Flow runs in Prefect, with a gate at their end; and the steps of the CI workflow, run as in CI."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import httpx
import pytest
import yaml
from prefect import Flow
from prefect.deployments.runner import RunnerDeployment
from prefect.types.entrypoint import EntrypointType

from fakes import engine as engine_program
from fakes.cli import invoke
from fakes.models import CONFIG, write_checkpoint
from fakes.polling import eventually
from fakes.processes import running_program
from fakes.records import make_metric, make_record
from fakes.tokenizers import write_byte_tokenizer
from flows.series import evaluate_checkpoints
from flows.suites import evaluate_suite
from resources.environments.environments import ensure_environment
from resources.settings import process_environment
from resources.storage import storage
from tasks.checkpoints.discovery import discover
from tasks.errors import GateRefused
from tasks.evaluators.environments import LM_EVAL
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL, base_job_template
from tasks.records.record import Record, read_records, write_record
from tasks.running.cells import as_served, plan_cells
from tasks.spec.evaluation import CheckpointSelection, EvaluationConfig
from tasks.spec.suites import SuiteRequest, load_suite
from tasks.verdicts.gate import Gate

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600), pytest.mark.usefixtures("prefect_api")]

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / "deployments" / "ci" / "evaluate.yml").read_text())
QUESTIONS = 2
LOW = {"benchmark": "demo_facts", "metric": "acc", "at_least": 0.0}
HIGH = LOW | {"at_least": 1.01}


@pytest.fixture(scope="module", autouse=True)
def _harness_is_built() -> None:
    ensure_environment(LM_EVAL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run with two complete checkpoints and a name that no other test uses."""
    folder = tmp_path_factory.mktemp("runs") / "gated"
    for step in (1, 2):
        config = {**CONFIG, "num_attention_heads": 1}
        write_byte_tokenizer(write_checkpoint(folder / "hf" / f"step-{step}", seed=step, config=config))
    return folder


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = tmp_path_factory.mktemp("engine") / "engine.json"
    models = ("--model", "gated-1", "--model", "gated-2")
    with running_program(str(engine_program.__file__), "--address-file", str(address), "--faults", "{}", *models):
        eventually(address.is_file)
        yield f"{json.loads(address.read_text())['url']}/v1"


def asked(api: str, path: str, **filters: Any) -> list[dict[str, Any]]:
    return httpx.post(f"{api}/{path}/filter", json=filters).raise_for_status().json()


def test_flow_run_says_what_it_is_how_far_it_is_and_what_the_gate_found(
    run: Path, base_url: str, tmp_path: Path, prefect_api: str
):
    config = EvaluationConfig.model_validate(
        {
            "model_path": str(run),
            "evaluation_path": str(tmp_path / "out"),
            "base_url": base_url,
            "evals": [{"name": "demo_facts"}],
            "max_eval_instances": QUESTIONS,
            "wandb_tags": ["suite=mine", "policy=nightly"],
        }
    )
    latest = CheckpointSelection(which="latest")

    with pytest.raises(GateRefused, match=r"NO-GO(.|\n)*gated-2: demo_facts · acc at least 1.01"):
        evaluate_checkpoints(config, latest, Gate.model_validate({"name": "release", "rules": [HIGH]}))

    [flow_run] = asked(prefect_api, "flow_runs", flow_runs={"tags": {"all_": ["run=gated"]}})
    assert flow_run["name"] == "evaluate gated, latest · demo_facts"
    assert flow_run["state_type"] == "FAILED"
    tags = {"run=gated", "evaluator=lm-eval", "suite=mine", "policy=nightly"}
    assert set(flow_run["tags"]) == tags
    tasks = asked(prefect_api, "task_runs", flow_runs={"id": {"any_": [flow_run["id"]]}})
    names = {task["name"] for task in tasks}
    assert {"plan", "evaluate gated-2 · lm-eval: demo_facts", "report on gated", "gate release on gated"} <= names
    artifacts = {
        artifact["key"]: artifact
        for artifact in asked(prefect_api, "artifacts", flow_runs={"id": {"any_": [flow_run["id"]]}})
        if artifact["key"]
    }
    kinds = {"progress": "progress", "results": "table", "curves": "image", "report": "markdown", "gate": "markdown"}
    assert {f"gated-{name}": kind for name, kind in kinds.items()}.items() <= {
        key: artifact["type"] for key, artifact in artifacts.items()
    }.items()
    assert artifacts["gated-progress"]["data"] == 100.0
    assert "1 of 1 cell of gated" in artifacts["gated-progress"]["description"]
    assert str(tmp_path / "out" / "gated") in artifacts["gated-records"]["data"]
    assert all(len(str(row["stderr"])) <= 9 for row in json.loads(artifacts["gated-results"]["data"]))
    assert "NO-GO: release" in artifacts["gated-gate"]["data"]
    check_lineage(prefect_api, read_records(str(tmp_path / "out")))

    records = evaluate_checkpoints(config, latest, Gate.model_validate({"rules": [LOW]}))
    assert [record.checkpoint.name for record in records] == ["gated-2"]
    [shown] = asked(prefect_api, "artifacts/latest", artifacts={"key": {"any_": ["gated-gate"]}})
    assert "## GO: gate" in shown["data"]


def check_lineage(api: str, records: list[Record]) -> None:
    """Asserts that the server has each record as an asset with scores, and the checkpoint as its source."""
    query = {"event": {"name": ["prefect.asset.materialization.succeeded"]}}
    [record] = records

    def told() -> list[dict[str, Any]]:
        events = httpx.post(f"{api}/events/filter", json={"filter": query}).json()["events"]
        return [event for event in events if event["resource"]["prefect.resource.id"].endswith(record.cell)]

    eventually(told)
    [event] = told()
    assert event["resource"]["prefect.resource.id"] == f"assay://records/gated/step-2/{record.evaluator}/{record.cell}"
    assert event["resource"]["prefect.resource.name"] == "gated-2 · lm-eval: demo_facts"
    related = {resource["prefect.resource.role"]: resource["prefect.resource.id"] for resource in event["related"]}
    assert related["asset"] == f"assay://checkpoints/gated/step-2/{record.checkpoint.digest[:10]}"
    assert {"flow-run", "task-run"} <= related.keys()
    scores = {f"{metric.benchmark} {metric.name}": metric.value for metric in record.metrics}
    assert event["payload"]["scores"] == scores and event["payload"]["status"] == "succeeded"


@dataclass(frozen=True)
class Checkout:
    """The folder of a CI runner: the team's files, and a run with records for all of its cells."""

    folder: Path
    run: Path
    api: str

    def variables(self, gate: dict[str, Any]) -> dict[str, str]:
        """Returns the variables that the workflow sets, with this gate."""
        file = self.folder / f"{gate['name']}.yaml"
        file.write_text(yaml.safe_dump(gate))
        return {
            "PREFECT_API_URL": self.api,
            "PREFECT_API_AUTH_STRING": "",  # the secret is not set
            "DEPLOYMENT": "evaluate-suite/local",
            "MODEL_PATH": str(self.run),
            "RECORDS": str(self.folder / "records"),
            "SUITE": str(self.folder / "mine.yaml"),
            "GATE": str(file),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
        }

    def step(self, job: str, name: str, gate: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        programs = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
        return subprocess.run(
            ["bash", "-e", "-c", script(job, name)],
            cwd=self.folder,
            env=process_environment({**programs, **self.variables(gate)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
        )


def script(job: str, name: str) -> str:
    [command] = [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if step.get("name") == name]
    return command


@pytest.fixture(scope="module")
def checkout(run: Path, tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> Checkout:
    """A checkout with records for all cells, so no engine is started."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "assay").symlink_to(ROOT)
    evaluation = {"label": "facts", "evals": ["demo_facts"], "max_eval_instances": QUESTIONS}
    suite = {"name": "mine", "description": "Facts.", "engine_kwargs": {"max_model_len": 64}}
    (folder / "mine.yaml").write_text(yaml.safe_dump({**suite, "evaluations": [evaluation]}))
    request = SuiteRequest(model_path=str(run), evaluation_path=str(folder / "records"))
    configs = [as_served(config) for config in load_suite(str(folder / "mine.yaml")).evaluations_of(request)]
    for cell in plan_cells.fn(configs, discover.fn(str(run), CheckpointSelection())):
        record = make_record(
            metrics=(make_metric(value=0.5, n=QUESTIONS),),
            checkpoint=cell.reference,
            cell=storage.basename(cell.uri),
            evaluation=cell.config.model_dump(mode="json"),
            evaluation_hash=cell.evaluation_hash,
        )
        write_record(cell.uri, record)
    return Checkout(folder, run, prefect_api)


GO = {"name": "go", "rules": [LOW]}
NO_GO = {"name": "no-go", "rules": [HIGH]}


def test_step_on_the_runner_ends_as_the_gate_says_and_leaves_a_summary(checkout: Checkout):
    refused = checkout.step("here", "Evaluate", NO_GO)
    line = Template(script("here", "Evaluate").replace("\\\n", " ")).substitute(checkout.variables(GO))
    _, *options = shlex.split(line)
    allowed = invoke(options)  # in this process: starting the command takes seconds
    outputs = [refused.stdout, allowed.output]
    assert (refused.returncode, allowed.exit_code) == (1, 0), outputs
    assert all("Evaluated 0, already recorded 2" in text or "2 cells recorded already" in text for text in outputs), (
        outputs
    )
    summary = (checkout.folder / "summary.md").read_text()
    assert {line for line in summary.splitlines() if line.startswith("## ")} == {"## GO: go", "## NO-GO: no-go"}


@pytest.fixture(scope="module")
def worker(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A worker of the local work pool, and the deployment of the flow for suites."""
    pool = {"name": LOCAL_WORK_POOL, "type": "process", "base_job_template": base_job_template("process")}
    httpx.post(f"{prefect_api}/work_pools/", json=pool)  # may exist from another test
    flow: Flow[..., Any] = evaluate_suite
    deployment = flow.to_deployment("local", work_pool_name=LOCAL_WORK_POOL, entrypoint_type=EntrypointType.MODULE_PATH)
    assert isinstance(deployment, RunnerDeployment)
    deployment.apply()
    env = process_environment({"PREFECT_API_URL": prefect_api, "PREFECT_WORKER_QUERY_SECONDS": "2"})
    start = [sys.executable, "-m", "prefect", "worker", "start", "--pool", LOCAL_WORK_POOL]
    folder = tmp_path_factory.mktemp("worker")
    with subprocess.Popen(start, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as process:
        try:
            yield
        finally:
            process.terminate()


@pytest.mark.usefixtures("worker")
def test_step_that_waits_for_a_deployed_flow_fails_where_the_gate_refuses(checkout: Checkout):
    refused = checkout.step("deployed", "Evaluate, and wait", NO_GO)
    assert refused.returncode == 1 and "Failed" in refused.stdout, refused.stdout
    filters = {"flows": {"name": {"any_": ["evaluate-suite"]}}, "deployments": {"name": {"any_": ["local"]}}}
    [run] = asked(checkout.api, "flow_runs", **filters)
    assert "NO-GO" in run["state"]["message"] and "no-go" in run["state"]["message"], run["state"]
