"""A Prefect server that is killed while flow runs are at work, and comes back: the evaluation does not notice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from fakes import engine as engine_program
from fakes.models import CONFIG, write_checkpoint
from fakes.polling import eventually
from fakes.prefect_field import Field, prefect_field
from fakes.processes import running_program
from fakes.tokenizers import write_byte_tokenizer
from flows.policy_deploying import PolicyDeployment, deploy_policy
from flows.reconcile import load_policy
from resources.backends.local import LocalClient
from resources.environments import ENVIRONMENTS, ensure_environment
from tasks.claim_files import claims_folder, read_claims
from tasks.records import read_records
from tasks.work_pools import LOCAL_WORK_POOL, WorkPoolSpec, apply_work_pools, base_job_template

pytestmark = [pytest.mark.harness, pytest.mark.timeout(400)]

ASSAY = Path(sys.executable).with_name("assay")
PLACES = ("by-policy", "by-hand")


@dataclass(frozen=True)
class Evaluated:
    """A run with one checkpoint, a server, and the endpoint that serves the checkpoint."""

    folder: Path
    field: Field
    engine: str

    def answers_take(self, seconds: float) -> None:
        body = json.dumps({"delay_seconds": seconds}).encode()
        request = urllib.request.Request(f"{self.engine}/fake/faults", body, method="PUT")
        urllib.request.urlopen(request, timeout=10).close()

    @property
    def requests(self) -> int:
        with urllib.request.urlopen(f"{self.engine}/fake/stats", timeout=10) as response:
            return json.load(response)["requests"]

    def deploy(self) -> str:
        """The id of the policy's deployment."""
        evaluations = [{"label": "facts", "evals": ["demo_facts"], "max_eval_instances": 2}]
        (self.folder / "facts.yaml").write_text(
            yaml.safe_dump({"name": "facts", "description": "facts", "evaluations": evaluations})
        )
        policy = {
            "name": "lost",
            "runs": [str(self.folder / "run")],
            "suites": [str(self.folder / "facts.yaml")],
            "evaluation_path": str(self.folder / "by-policy"),
            "base_url": f"{self.engine}/v1",
        }
        (self.folder / "policy.yaml").write_text(yaml.safe_dump(policy))
        asyncio.run(apply_work_pools([WorkPoolSpec(LOCAL_WORK_POOL, "process", base_job_template("process"))]))
        uri = str(self.folder / "policy.yaml")
        deploy_policy(PolicyDeployment(load_policy(uri), uri, LOCAL_WORK_POOL), silent_after=timedelta(minutes=10))
        return self.field.ask("/deployments/name/reconcile-policy/lost")["id"]

    def evaluate_by_hand(self) -> subprocess.Popen[str]:
        options = ["--model", str(self.folder / "run" / "hf" / "step-1"), "--eval", "demo_facts", "--limit", "2"]
        places = ["--base-url", f"{self.engine}/v1", "--output", str(self.folder / "by-hand"), "--json"]
        command = [str(ASSAY), "evaluate", *options, *places]
        return subprocess.Popen(command, env=self.field.environment(), stdout=subprocess.PIPE, text=True)

    def live_claims(self, place: str) -> int:
        claims = read_claims(claims_folder(str(self.folder / place), "run"))
        return sum(not one.claim.released for one in claims)

    def statuses(self, place: str) -> list[str]:
        return [one.status for one in read_records(str(self.folder / place))]


@pytest.fixture
def evaluated(tmp_path: Path) -> Iterator[Evaluated]:
    ensure_environment(ENVIRONMENTS["lm-eval"])
    config = {**CONFIG, "num_attention_heads": 1}
    write_byte_tokenizer(write_checkpoint(tmp_path / "run" / "hf" / "step-1", seed=1, config=config))
    address = tmp_path / "engine.json"
    with (
        running_program(str(engine_program.__file__), "--address-file", str(address), "--model", "run-1"),
        prefect_field(tmp_path) as field,
        temporary_settings({PREFECT_API_URL: field.url}),
    ):
        eventually(address.is_file)
        yield Evaluated(tmp_path, field, json.loads(address.read_text())["url"])


def test_server_that_goes_away_costs_no_evaluation_and_learns_how_it_ended(evaluated: Evaluated):
    field = evaluated.field
    deployment = evaluated.deploy()
    evaluated.answers_take(3)
    with field.worker(LOCAL_WORK_POOL):
        run = field.ask(f"/deployments/{deployment}/create_flow_run", {})["id"]
        by_hand = evaluated.evaluate_by_hand()
        eventually(lambda: all(evaluated.live_claims(place) for place in PLACES), seconds=120)
        eventually(lambda: evaluated.requests >= 2, seconds=60)
        runs = {one["id"] for one in field.runs("Running")}
        assert run in runs and len(runs) == 2

        field.kill_server()
        asked = evaluated.requests
        evaluated.answers_take(0)
        for place in PLACES:
            eventually(lambda place=place: evaluated.statuses(place) == ["succeeded"], seconds=60)
            eventually(lambda place=place: not evaluated.live_claims(place))
        assert evaluated.requests > asked
        assert by_hand.poll() is None and field.process_of(run)  # their end is not told yet

        field.start_server()
        eventually(lambda: {one["id"] for one in field.runs("Completed")} == runs, seconds=90)
    printed, _ = by_hand.communicate(timeout=60)
    assert by_hand.returncode == 0, printed
    shown = field.ask("/artifacts/filter", {"artifacts": {"key": {"any_": ["run-progress", "run-results"]}}})
    told = {(one["key"], one["flow_run_id"]) for one in shown}
    assert told == {(key, one) for key in ("run-progress", "run-results") for one in runs}
    assert {one["data"] for one in shown if one["type"] == "progress"} == {100.0}
    eventually(lambda: not [job for job in LocalClient().jobs() if not job.status.finished])
