"""Policies that carry themselves out: a server with its services, a worker, lm-eval, the deterministic engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections import Counter
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
from fakes.prefect_field import WAITING, Field, prefect_field
from fakes.processes import running_program
from fakes.tokenizers import write_byte_tokenizer
from flows.policy_deploying import PolicyDeployment, deploy_policy
from flows.reconcile import load_policy
from resources.backends.local import LocalClient
from resources.config import ResourceConfig
from resources.environments import ENVIRONMENTS, ensure_environment
from resources.errors import BadInput, EngineStartFailed, UnsatisfiableResources
from tasks.accelerators import ACCELERATOR_LIMIT, accelerators_reserved, limit_accelerators
from tasks.checkpoint_events import CHECKPOINT_COMPLETE, CompleteCheckpoint, emit, send
from tasks.checkpoints import find_checkpoints
from tasks.claim_files import claims_folder, read_claims
from tasks.records import read_records
from tasks.work_pools import LOCAL_WORK_POOL, WorkPoolSpec, apply_work_pools, base_job_template

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]

STEPS = (1, 2, 3)


@dataclass
class Deployed:
    """A policy that is deployed, its run, and the endpoint that serves its checkpoints."""

    field: Field
    folder: Path
    engine: str

    @property
    def policy(self) -> str:
        return str(self.folder / "policy.yaml")

    def checkpoint(self, step: int) -> Path:
        folder = self.folder / "run" / "hf" / f"step-{step}"
        config = {**CONFIG, "num_attention_heads": 1}
        return write_byte_tokenizer(write_checkpoint(folder, seed=step, config=config))

    def answers_take(self, seconds: float) -> None:
        body = json.dumps({"delay_seconds": seconds}).encode()
        request = urllib.request.Request(f"{self.engine}/fake/faults", body, method="PUT")
        urllib.request.urlopen(request, timeout=10).close()

    @property
    def requests(self) -> int:
        with urllib.request.urlopen(f"{self.engine}/fake/stats", timeout=10) as response:
            return json.load(response)["requests"]

    def attempts(self) -> Counter[str]:
        found = (self.folder / "out").rglob("attempt-*")
        return Counter(str(path.parent) for path in found if path.is_dir())

    def succeeded(self) -> set[str]:
        return {one.checkpoint.name for one in read_records(str(self.folder / "out")) if one.succeeded}

    def event(self, step: int) -> CompleteCheckpoint:
        return CompleteCheckpoint(str(self.folder / "run" / "hf" / f"step-{step}"), "run", f"run-{step}", step)

    def apply(
        self,
        *,
        every: timedelta = timedelta(hours=1),
        on_event: bool = True,
        work_pool: str = LOCAL_WORK_POOL,
        silent_after: timedelta = timedelta(minutes=10),
    ) -> list[tuple[str, str]]:
        """Deploys it, and says what that changed."""
        policy = load_policy(self.policy)
        wanted = PolicyDeployment(policy, self.policy, work_pool, every=every, on_event=on_event)
        return [(one.name, one.action) for one in deploy_policy(wanted, silent_after=silent_after)]

    def told(self) -> int:
        """Events of complete checkpoints that the server has."""
        wanted = {"filter": {"event": {"name": [CHECKPOINT_COMPLETE]}}, "limit": 1}
        return self.field.ask("/events/filter", wanted)["total"]

    def live_claims(self) -> list[str]:
        claims = read_claims(claims_folder(str(self.folder / "out"), "run"))
        return [one.claim.subject.key for one in claims if not one.claim.released]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A server, a worker and a policy that is deployed on events."""
    ensure_environment(ENVIRONMENTS["lm-eval"])
    folder = tmp_path_factory.mktemp("field")
    address = folder / "engine.json"
    models = [part for step in STEPS for part in ("--model", f"run-{step}")]
    with (
        prefect_field(folder) as field,
        running_program(str(engine_program.__file__), "--address-file", str(address), *models),
    ):
        eventually(address.is_file)
        one = Deployed(field, folder, json.loads(address.read_text())["url"])
        evaluations = [{"label": "facts", "evals": ["demo_facts"], "max_eval_instances": 2}]
        suite = {"name": "facts", "description": "facts", "evaluations": evaluations}
        (folder / "facts.yaml").write_text(yaml.safe_dump(suite))
        policy = {
            "name": "watched",
            "runs": [str(folder / "run*")],
            "suites": [str(folder / "facts.yaml")],
            "evaluation_path": str(folder / "out"),
            "base_url": f"{one.engine}/v1",
            "retries": {"first_delay_seconds": 0},
        }
        (folder / "policy.yaml").write_text(yaml.safe_dump(policy))
        with temporary_settings({PREFECT_API_URL: field.url}):
            local = WorkPoolSpec(LOCAL_WORK_POOL, "process", base_job_template("process"))
            asyncio.run(apply_work_pools([local]))
        with field.worker(LOCAL_WORK_POOL):
            yield one


SILENCE = "assay: flow runs without a sign of life"
ON_EVENT = "reconcile-policy/watched on checkpoint.complete"
DEPLOYMENT = "reconcile-policy/watched"


@pytest.fixture(autouse=True)
def _server_of_the_module(deployed: Deployed) -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: deployed.field.url}):
        yield


def test_policy_deployed_twice_is_unchanged_and_as_asked(deployed: Deployed):
    command = ("policy", "deploy", deployed.policy, "--every", "1h", "--on-event")
    created = [(DEPLOYMENT, "create"), (ON_EVENT, "create"), (SILENCE, "create")]
    assert [(one["name"], one["action"]) for one in deployed.field.assay(*command, "--dry-run")] == created
    assert deployed.apply() == created
    assert {one["action"] for one in deployed.field.assay(*command)} == {"unchanged"}

    assert deployed.apply(on_event=False)[1] == (ON_EVENT, "remove")
    assert deployed.apply(every=timedelta(hours=2)) == [
        (DEPLOYMENT, "update"),
        (ON_EVENT, "create"),
        (SILENCE, "unchanged"),
    ]
    found = deployed.field.ask("/deployments/name/reconcile-policy/watched")
    assert found["parameters"]["policy"]["name"] == "watched"
    assert found["global_concurrency_limit"]["limit"] == 1
    assert [one["schedule"]["interval"] for one in found["schedules"]] == [7200.0]
    assert "assay" in found["tags"] and found["pull_steps"] == []
    eventually(lambda: any(run["auto_scheduled"] for run in deployed.field.runs("Scheduled")), seconds=60)

    with pytest.raises(BadInput, match="work pool elsewhere"):
        deployed.apply(work_pool="elsewhere")
    with pytest.raises(BadInput, match="one every 180 s"):
        deployed.apply(silent_after=timedelta(minutes=3))


@pytest.mark.skipif(
    os.environ.get("ASSAY_QUIET_MACHINE") != "1", reason="two bursts of 50 events want a machine of their own"
)
def test_checkpoint_is_evaluated_by_itself_and_once_however_often_it_is_told(deployed: Deployed):
    deployed.apply()
    eventually(lambda: not deployed.field.runs(*WAITING, "Running"), seconds=120)
    one, two = (1, 2) if not (deployed.folder / "run").exists() else (11, 12)  # others where it is tried again
    before, told_before = {run["id"] for run in deployed.field.runs()}, deployed.told()
    whole = deployed.checkpoint(one)
    weights = whole / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    told = deployed.field.assay("notify", str(weights))
    assert told["sent"] is False and told["problems"], told
    assert {run["id"] for run in deployed.field.runs()} == before
    weights.write_bytes(content)
    asked = deployed.requests
    send([deployed.event(one)] * 50)
    eventually(lambda: deployed.requests > asked, seconds=90)

    deployed.checkpoint(two)  # while the first one is evaluated
    emit(find_checkpoints(str(whole.with_name(f"step-{two}"))))  # as the training flow does
    send([deployed.event(two)] * 49)
    eventually(lambda: deployed.told() == told_before + 100)
    eventually(lambda: deployed.succeeded() >= {f"run-{one}", f"run-{two}"}, seconds=120)
    eventually(lambda: not deployed.field.runs(*WAITING, "Running"), seconds=60)
    tries = {
        cell: count for cell, count in deployed.attempts().items() if f"/step-{one}/" in cell or f"/step-{two}/" in cell
    }
    assert set(tries.values()) == {1}, tries
    states = Counter(run["state"]["name"] for run in deployed.field.runs() if run["id"] not in before)
    assert states.keys() <= {"Completed", "Cancelled"} and 2 <= states["Completed"] <= 4, states


@pytest.mark.parametrize(
    ("ending", "state"), [(None, "Cancelled"), (signal.SIGKILL, "Crashed"), (signal.SIGTERM, "Crashed")]
)
def test_flow_run_ended_in_mid_evaluation_leaves_nothing_and_its_state_is_true(
    deployed: Deployed, ending: signal.Signals | None, state: str
):
    deployed.apply()
    deployed.answers_take(4)
    if not (deployed.folder / "run/hf/step-3").exists():
        deployed.checkpoint(3)
    asked = deployed.requests
    send([deployed.event(3)])
    eventually(lambda: deployed.requests > asked + 2, seconds=120)
    [run] = deployed.field.runs("Running")
    assert [key.partition(".")[0] for key in deployed.live_claims()] == ["step-3"]

    if ending is None:
        cancelling = {"type": "CANCELLING", "name": "Cancelling"}
        deployed.field.ask(f"/flow_runs/{run['id']}/set_state", {"state": cancelling})
    else:
        os.kill(deployed.field.process_of(run["id"]), ending)

    eventually(lambda: deployed.field.ask(f"/flow_runs/{run['id']}")["state"]["name"] == state, seconds=90)
    eventually(lambda: not deployed.live_claims(), seconds=30)
    eventually(lambda: not [job for job in LocalClient().jobs() if not job.status.finished], seconds=30)
    assert "run-3" not in deployed.succeeded()


def test_cell_whose_flow_runs_were_ended_is_evaluated_by_the_next_one(deployed: Deployed):
    deployed.apply()
    deployed.answers_take(0)
    if not (deployed.folder / "run/hf/step-3").exists():
        deployed.checkpoint(3)
    send([deployed.event(3)])
    eventually(lambda: "run-3" in deployed.succeeded(), seconds=120)


def test_accelerators_are_reserved_up_to_the_limit_and_given_back_on_every_way_out(deployed: Deployed):
    eight = ResourceConfig.with_tpu("v6e-8")
    with accelerators_reserved(eight):  # nobody has set a limit
        pass
    limit_accelerators(8)

    def held() -> int:
        return deployed.field.ask(f"/v2/concurrency_limits/{ACCELERATOR_LIMIT}")["active_slots"]

    with accelerators_reserved(ResourceConfig()):
        assert held() == 0
    with pytest.raises(EngineStartFailed), accelerators_reserved(eight):
        assert held() == 8
        raise EngineStartFailed(expected="an engine", found="none", remedy="look")
    eventually(lambda: held() == 0)
    with (
        pytest.raises(UnsatisfiableResources, match="at most 8"),
        accelerators_reserved(ResourceConfig.with_tpu("v6e-16")),
    ):
        pass
