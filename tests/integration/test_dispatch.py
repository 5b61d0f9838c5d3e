"""Cells sent to work pools: two regions of a real server, lm-eval, and the deterministic engine.

The last tests stop the workers and check that leftovers of their flow runs are ended.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import yaml
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import State
from prefect.flow_engine import run_flow
from prefect.states import Cancelling, Pending, Running

from fakes import engine as engine_program
from fakes.cli import invoke
from fakes.models import CONFIG, write_checkpoint
from fakes.polling import eventually
from fakes.postgresql import postgresql_or_sqlite, require_postgresql
from fakes.prefect_field import Field, prefect_field
from fakes.prefect_server import used_here
from fakes.processes import running_program
from fakes.tokenizers import write_byte_tokenizer
from flows.deploy.policies import CANCELLING_AUTOMATION, PENDING_AUTOMATION, SILENCE_AUTOMATION, watch_over_flow_runs
from flows.reconcile import load_policy, reconcile_policy
from flows.series import evaluate_checkpoints
from resources.environments.environments import ensure_environment
from resources.errors import NoUsableWorkPool
from resources.settings import settings
from tasks.errors import UnknownBenchmark
from tasks.evaluators.environments import LM_EVAL
from tasks.policies.dispatch import TAG
from tasks.prefect_server.work_pools import work_pool_states
from tasks.records.record import read_records

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]

US, EU = "evaluations-us", "evaluations-eu"
REGIONS = {
    "prices": {
        "as_of": "2026-11-01",
        "chip_hour": {},
        "vcpu_hour": {"on_demand": 0.03, "preemptible": 0.01},
        "memory_gb_hour": {"on_demand": 0.004, "preemptible": 0.001},
        # Expensive enough that even a tiny checkpoint has a cost.
        "egress_gb": {"same_continent": 100_000, "other_continent": 1_000_000},
    },
    "regions": [
        {
            "name": name,
            "continent": continent,
            "zones": [f"{name}-a"],
            "buckets": [f"bucket-{name}"],
            "work_pool": pool,
            "work_pool_type": "process",
            "tpus": {"v5litepod": [f"{name}-a"]},
            "ray_address": "ray://head:10001",
        }
        for name, continent, pool in (("us-central1", "north-america", US), ("europe-west4", "europe", EU))
    ],
}


@dataclass
class Sent:
    """A policy for a run in America that sends its cells to the work pools of the module's server."""

    field: Field
    folder: Path
    engine: str
    name: str

    @property
    def policy(self) -> str:
        return str(self.folder / f"{self.name}.yaml")

    @property
    def output(self) -> Path:
        return self.folder / self.name

    def write_policy(self, *suites: str, **changes: Any) -> None:
        """Writes a policy with suites of a single benchmark each, in order of priority."""
        for number, name in enumerate(suites, start=1):
            evaluations = [{"label": name, "evals": ["demo_facts"], "max_eval_instances": number}]
            content = {"name": name, "description": name, "evaluations": evaluations}
            (self.folder / f"suite-{name}.yaml").write_text(yaml.safe_dump(content))
        policy = {
            "name": self.name,
            "runs": [str(self.folder / "run")],
            "suites": [
                {"suite": str(self.folder / f"suite-{name}.yaml"), "priority": -number}
                for number, name in enumerate(suites)
            ],
            "evaluation_path": str(self.output),
            "base_url": f"{self.engine}/v1",
            "dispatch": "work_pools",
            "retries": {"infra_failures": 1, "first_delay_seconds": 0},
            **changes,
        }
        Path(self.policy).write_text(yaml.safe_dump(policy))

    def alive(self, *work_pools: str) -> None:
        """Sends the heartbeat of a worker that takes no flow runs."""
        for name in work_pools:
            self.field.ask(f"/work_pools/{name}/workers/heartbeat", {"name": "idle"})

    def change(self, work_pool: str, **content: Any) -> None:
        self.field.ask(f"/work_pools/{work_pool}", content, method="PATCH")

    def end(self, run: dict[str, Any], state: str) -> None:
        content = {"state": {"type": state.upper(), "name": state}, "force": True}
        self.field.ask(f"/flow_runs/{run['id']}/set_state", content)

    def reconcile(self) -> dict[str, Any]:
        return reconcile_policy(load_policy(self.policy))

    def ask(self, *command: str) -> Any:
        done = invoke([*command, self.policy, "--json"])
        assert done.exit_code == 0, (done.output, done.exception)
        return json.loads(done.stdout)

    def series(self, benchmark: str) -> list[str]:
        places = ["--model", str(self.folder / "run"), "--output", str(self.output)]
        asked = ["--eval", benchmark, "--limit", "3", "--base-url", f"{self.engine}/v1"]
        return ["evaluate", *places, *asked, "--on-work-pool"]

    def states(self) -> list[tuple[str, str]]:
        """Returns work pool and state of every flow run that was sent, oldest first."""
        return [(run["work_pool_name"], run["state"]["name"]) for run in self.runs()]

    def runs(self) -> list[dict[str, Any]]:
        flow, tag = {"name": {"any_": ["evaluate-cells"]}}, {"tags": {"all_": [f"policy={self.name}"]}}
        flow_runs = self.field.ask("/flow_runs/filter", {"flows": flow, "flow_runs": tag, "limit": 200})
        return sorted(flow_runs, key=lambda run: run["created"])


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    """A server with a work pool for each of two regions, with or without workers."""
    folder = tmp_path_factory.mktemp("regions")
    (folder / "regions.yaml").write_text(yaml.safe_dump(REGIONS))
    with (
        pytest.MonkeyPatch.context() as patch,
        postgresql_or_sqlite() as database,
        prefect_field(folder, database=database) as server,
    ):
        patch.setenv("ASSAY_REGIONS", str(folder / "regions.yaml"))
        patch.setenv("ASSAY_PREFIX", "gs://bucket-us-central1")  # places this machine in America
        settings.cache_clear()
        with used_here(server.url):
            applied = invoke(["work-pools", "apply"])
            assert applied.exit_code == 0, (applied.output, applied.exception)
        yield server
    settings.cache_clear()


@pytest.fixture
def sent(field: Field, tmp_path: Path) -> Iterator[Sent]:
    config = {**CONFIG, "num_attention_heads": 1}
    write_byte_tokenizer(write_checkpoint(tmp_path / "run" / "hf" / "step-1", seed=1, config=config))
    address = tmp_path / "engine.json"
    with (
        used_here(field.url),
        running_program(str(engine_program.__file__), "--address-file", str(address), "--model", "run-1"),
    ):
        eventually(address.is_file)
        policy = Sent(field, tmp_path, json.loads(address.read_text())["url"], f"sent-{uuid4().hex[:8]}")
        for work_pool in (US, EU):
            policy.change(work_pool, is_paused=False, concurrency_limit=None)
        yield policy
        for run in policy.runs():
            if run["state"]["type"] == "SCHEDULED":  # late runs too: the worker of a later test would start them
                policy.end(run, "Cancelled")


def test_cells_go_where_a_worker_lives_and_only_at_a_price_that_is_allowed(sent: Sent):
    sent.write_policy("first")
    with pytest.raises(NoUsableWorkPool, match=r"nearest: evaluations-us, which has no live worker"):
        sent.reconcile()
    sent.alive(EU)
    with pytest.raises(NoUsableWorkPool, match=r"europe-west4 would cost \d"):
        sent.reconcile()
    assert sent.states() == []

    sent.write_policy("first", max_egress_usd=1000)
    [batch] = sent.ask("status", "--plan")["batches"]
    assert batch["work_pool"] == EU and 1 < batch["egress_usd"] < 1000
    assert "no live worker" in batch["passed_over"]["us-central1"]
    with ThreadPoolExecutor(2) as both:  # CI and a schedule at once
        futures = [both.submit(copy_context().run, sent.reconcile) for _ in range(2)]
        assert sum(future.result()["scheduled"] for future in futures) >= 1
    assert sent.reconcile()["scheduled"] == 0
    assert sent.states() == [(EU, "Scheduled")]

    [cell] = sent.ask("status", "--gaps")["cells"]
    assert cell["state"] == "scheduled" and f"on work pool {EU}" in cell["reason"]
    assert sent.ask("status", "--plan")["cells"] == []


def test_cells_not_begun_or_of_crashed_runs_are_sent_again_but_not_forever(sent: Sent):
    sent.alive(US, EU)
    sent.write_policy("first", max_egress_usd=1000)
    sent.change(US, is_paused=True)
    sent.reconcile()
    sent.change(US, is_paused=False)
    sent.change(EU, is_paused=True)
    sent.reconcile()
    assert sent.states() == [(EU, "Moved"), (US, "Scheduled")]

    sent.change(EU, is_paused=False)
    sent.change(US, concurrency_limit=1)
    sent.write_policy("first", "second", max_egress_usd=1000)
    assert sent.reconcile()["scheduled"] == 1  # the waiting flow run stays; the next finds no room there
    assert sent.states()[2:] == [(EU, "Scheduled")]
    sent.write_policy("first", "second", "third")
    assert sent.ask("status", "--plan")["batches"][0]["why_not"] is not None
    assert sent.reconcile()["scheduled"] == 0, "it waits for room, which is no error"

    sent.change(US, concurrency_limit=None)
    sent.write_policy("first", "second")
    sent.end(sent.runs()[1], "Crashed")
    assert sent.reconcile()["scheduled"] == 1
    assert sent.states()[3:] == [(US, "Scheduled")]
    sent.end(sent.runs()[3], "Crashed")
    assert sent.reconcile()["scheduled"] == 0
    assert sent.ask("status", "--gaps")["missing"] == {"retries_exhausted": 1, "scheduled": 1}

    slices = {"device": {"kind": "tpu", "variant": "v5litepod-16"}}  # several machines: needs a cluster
    sent.write_policy("first", "second", "third", resource_config=slices)
    assert sent.reconcile()["scheduled"] == 1
    own_region = {"ASSAY_REGION": "us-central1"}
    may_read_from_elsewhere = {"ASSAY_REGION": "europe-west4", "ASSAY_MAX_EGRESS_USD": "1000.0"}
    assert [run["job_variables"]["env"] for run in sent.runs()] == [
        *(may_read_from_elsewhere, own_region, may_read_from_elsewhere, own_region),
        {"ASSAY_JOBS": "ray://head:10001", **own_region},
    ]
    assert len(sent.ask("cancel")["flow_runs_cancelled"]) == 2
    assert Counter(state for _, state in sent.states()) == {"Moved": 1, "Crashed": 2, "Cancelled": 2}


def test_moved_flow_runs_swap_slots_and_the_sender_uses_no_slot(sent: Sent, monkeypatch: pytest.MonkeyPatch):
    sent.alive(US, EU)
    sent.write_policy("first", "second", max_egress_usd=1000)
    sent.reconcile()
    assert sent.states() == [(US, "Scheduled")] * 2
    sent.change(US, is_paused=True)
    sent.change(EU, concurrency_limit=1)
    sent.reconcile()
    assert Counter(sent.states()) == {(US, "Moved"): 1, (US, "Scheduled"): 1, (EU, "Scheduled"): 1}

    assert work_pool_states([EU])[EU].obstacle == "is full (1 of 1 flow runs)"
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", sent.runs()[-1]["id"])
    assert work_pool_states([EU])[EU].obstacle is None, "it reconciles, and ends when it has sent"


def test_work_pools_are_applied_with_what_ends_flow_runs_that_died_with_their_workers(field: Field):
    automations = {
        automation["name"]: automation["actions"][0]["state"] for automation in field.ask("/automations/filter", {})
    }
    assert automations == {
        SILENCE_AUTOMATION: "CRASHED",
        PENDING_AUTOMATION: "CRASHED",
        CANCELLING_AUTOMATION: "CANCELLED",
    }


def test_sent_cells_and_a_sent_series_are_evaluated_there_once(sent: Sent):
    ensure_environment(LM_EVAL)
    sent.alive(US)
    sent.write_policy("first")
    planned = invoke([*sent.series("demo_facts"), "--dry-run", "--json"])
    assert planned.exit_code == 0, (planned.output, planned.exception)
    assert (json.loads(planned.stdout)["work_pool"], json.loads(planned.stdout)["wanted"]) == (US, 1)
    with sent.field.worker(US):
        assert sent.reconcile()["scheduled"] == 1
        done = invoke([*sent.series("demo_facts"), "--json"])
        assert done.exit_code == 0, (done.output, done.exception)
        assert json.loads(done.stdout)["evaluated"] >= 1
        eventually(lambda: not {"Scheduled", "Pending", "Running"} & {state for _, state in sent.states()})
    assert sent.states() == [(US, "Completed")], [run["state"] for run in sent.runs()]
    assert sent.ask("status", "--gaps")["missing"] == {}
    assert len([record for record in read_records(str(sent.output)) if record.succeeded]) == 2
    attempts = Counter(path.parent for path in sent.output.rglob("attempt-*") if path.is_dir())
    assert set(attempts.values()) == {1}


def test_series_that_is_refused_at_the_work_pool_is_refused_here_in_the_same_words(sent: Sent):
    sent.alive(US)
    with ThreadPoolExecutor(1) as threads:
        at_work_pool = threads.submit(copy_context().run, carry_out_series, sent)
        refused = invoke(sent.series("no_such_benchmark"))
        assert isinstance(at_work_pool.exception(), UnknownBenchmark)
    assert isinstance(refused.exception, UnknownBenchmark), refused.output
    assert "no_such_benchmark" in refused.exception.found and "Found:" not in refused.exception.found


def carry_out_series(sent: Sent) -> None:
    """Runs the series that waits for a worker in this process."""
    series, scheduled = {"name": {"any_": ["evaluate-checkpoints"]}}, {"state": {"type": {"any_": ["SCHEDULED"]}}}
    [run] = eventually(lambda: sent.field.ask("/flow_runs/filter", {"flows": series, "flow_runs": scheduled}))
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_run(UUID(run["id"]))
    run_flow(evaluate_checkpoints, flow_run=flow_run)


LEFT: dict[str, tuple[str, tuple[State, ...]]] = {
    "not begun yet": ("process", (Pending(),)),
    "waits for its machine": ("kubernetes", (Pending(),)),
    "silent": ("kubernetes", (Pending(), Running())),
    "cancelled": ("process", (Pending(), Running(), Cancelling())),
}
"""Flow runs by name: type of their work pool, and their states up to the loss of their worker."""


@flow
def nothing() -> None:
    """Body of a flow that is deployed and never run."""


def left_by_its_worker(client: SyncPrefectClient, deployment: UUID, name: str, states: tuple[State, ...]) -> str:
    run = client.create_flow_run_from_deployment(deployment, name=name, tags=[TAG])
    for state in states:
        client.set_flow_run_state(run.id, state, force=True)
    return str(run.id)


@pytest.mark.postgresql
def test_flow_runs_without_a_worker_are_ended_unless_they_wait_for_machines(
    field: Field, monkeypatch: pytest.MonkeyPatch
):
    require_postgresql()
    monkeypatch.setenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")  # the minimum
    for automation in field.ask("/automations/filter", {}):  # the automations of the work pools wait longer
        field.ask(f"/automations/{automation['id']}", method="DELETE")
    with used_here(field.url), get_client(sync_client=True) as client:
        assert {change.action for change in watch_over_flow_runs(timedelta(seconds=45))} == {"create"}
        assert watch_over_flow_runs(timedelta(seconds=45)) == []
        identifier, deployments = client.create_flow(nothing), {}
        for type_ in ("process", "kubernetes"):
            client.create_work_pool(WorkPoolCreate(name=type_, type=type_))
            deployments[type_] = client.create_deployment(
                identifier, name=type_, work_pool_name=type_, entrypoint="nothing.py:nothing"
            )
        runs = {
            left_by_its_worker(client, deployments[type_], name, states): name for name, (type_, states) in LEFT.items()
        }

    def states() -> dict[str, str]:
        flow_runs = field.ask("/flow_runs/filter", {"flow_runs": {"id": {"any_": list(runs)}}})
        return {runs[run["id"]]: run["state"]["name"] for run in flow_runs}

    ended = {"not begun yet": "Crashed", "silent": "Crashed", "cancelled": "Cancelled"}
    eventually(lambda: states() == {**ended, "waits for its machine": "Pending"})
