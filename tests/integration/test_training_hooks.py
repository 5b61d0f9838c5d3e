"""A training with `transformers` itself notifies a deployed policy of its checkpoint; `assay notify` reports others."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

from fakes.cli import invoke
from fakes.models import write_checkpoint
from fakes.polling import eventually
from fakes.tokenizers import write_byte_tokenizer
from fakes.trainers import run_trainer
from flows.deploy.policies import PolicyDeployment, deploy_policy
from flows.reconcile import load_policy
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL, WorkPoolSpec, apply_work_pools, base_job_template

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "tests" / "fakes" / "transformers_training.py"


def notify(uri: Path) -> dict[str, Any]:
    done = invoke(["notify", str(uri), "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


@pytest.fixture
def deployed(tmp_path: Path, prefect_api: str) -> Iterator[PolicyDeployment]:
    """A deployed policy about a run of `tmp_path`; the server is restored afterwards."""
    content = {
        "name": "trained",
        "runs": str(tmp_path / "run"),
        "suites": ["demo"],
        "evaluation_path": str(tmp_path / "out"),
        "base_url": "http://127.0.0.1:9/v1",
    }
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump(content))
    apply_work_pools([WorkPoolSpec(LOCAL_WORK_POOL, "process", base_job_template("process"))])
    deployment = PolicyDeployment(load_policy(str(policy)), str(policy), LOCAL_WORK_POOL, on_event=True)
    with get_client(sync_client=True) as client:
        before = {automation.id for automation in client.read_automations()}
        deploy_policy(deployment, silent_after=timedelta(minutes=10))
        try:
            yield deployment
        finally:
            for automation in client.read_automations():
                if automation.id not in before:
                    client.delete_automation(automation.id)
            client.delete_deployment(client.read_deployment_by_name(deployment.name).id)


def test_training_with_transformers_begins_a_run_of_the_policy_about_it(
    tmp_path: Path, prefect_api: str, deployed: PolicyDeployment
):
    run, elsewhere = tmp_path / "run", write_checkpoint(tmp_path / "elsewhere" / "step-1")
    answer = notify(elsewhere)
    assert (answer["sent"], answer["automations"], answer["problems"]) == (True, [], [])
    (elsewhere / "model.safetensors").unlink()
    answer = notify(elsewhere)
    assert not answer["sent"] and "no weights" in answer["problems"][0]

    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    variables = {"ASSAY": str(Path(sys.executable).with_name("assay")), "PREFECT_API_URL": prefect_api}
    done = run_trainer(TRAINING, tokenizer, run, ROOT / "deployments" / "hooks", variables=variables)
    trained = run / "checkpoint-1"
    assert f"Assay was notified of {trained}; it begins: {deployed.event_automation}" in done.stderr
    named = DeploymentFilter(name=DeploymentFilterName(any_=["trained"]))
    with get_client(sync_client=True) as client:
        eventually(lambda: client.read_flow_runs(deployment_filter=named))
