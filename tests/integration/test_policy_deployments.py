"""Deployed policies: a server with its services, a worker, lm-eval, and the deterministic engine.

The tests end flow runs, and at last kill the server while an evaluation goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from operator import itemgetter
from pathlib import Path

import pytest

from fakes.deployed_policy import Deployed, deployed_policy
from fakes.jobs import FakeClient
from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from fakes.polling import eventually
from fakes.postgresql import postgresql_or_sqlite
from flows.cli.pools import accelerators_counted
from flows.reconcile import load_policy
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.kept import keep_up, take_down
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.errors import BadInput, EngineStartFailed, JobFailed, UnsatisfiableResources
from resources.jobs.jobs import JobStatus
from tasks.policies.actions import retry
from tasks.policies.reconciliation import Reconciliation, reconcile
from tasks.policies.snapshot import take_snapshot
from tasks.prefect_server.client import ACCELERATOR_LIMIT, accelerators_reserved, limit_accelerators
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL
from tasks.spec.training import TrainLmOnPodConfig
from tasks.training.job import training

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]

ASSAY = Path(sys.executable).with_name("assay")
PLACES = ("out", "by-hand")


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A server, a worker, and a policy; the database is PostgreSQL where this machine has it, else SQLite."""
    with (
        postgresql_or_sqlite() as database,
        deployed_policy(tmp_path_factory.mktemp("field"), database=database) as policy,
        policy.field.worker(LOCAL_WORK_POOL),
    ):
        yield policy


SILENCE = "assay: flow runs without a sign of life"
PENDING = "assay: flow runs that their worker did not begin"
CANCELLING = "assay: cancellations that nobody carries out"
ON_EVENT = "reconcile-policy/watched on checkpoint.complete"
DEPLOYMENT = "reconcile-policy/watched"


def test_policy_deployed_twice_is_unchanged_and_as_asked(deployed: Deployed):
    names = [DEPLOYMENT, ON_EVENT, SILENCE, PENDING, CANCELLING]
    created = [(name, "create") for name in names]
    assert deployed.apply(dry_run=True) == created
    changes = deployed.field.assay("policy", "deploy", deployed.policy, "--every", "1h", "--on-event")
    assert [(change["name"], change["action"]) for change in changes] == created
    assert deployed.apply() == [(name, "unchanged") for name in names]

    assert deployed.apply(on_event=False)[1] == (ON_EVENT, "remove")
    changed = {DEPLOYMENT: "update", ON_EVENT: "create", **dict.fromkeys((SILENCE, PENDING, CANCELLING), "unchanged")}
    assert deployed.apply(every=timedelta(hours=2)) == list(changed.items())
    deployment = deployed.field.ask("/deployments/name/reconcile-policy/watched")
    assert deployment["parameters"]["policy"]["name"] == "watched"
    assert deployed.field.ask(f"/work_queues/{deployment['work_queue_id']}")["concurrency_limit"] == 1
    assert [schedule["schedule"]["interval"] for schedule in deployment["schedules"]] == [7200.0]
    assert "assay" in deployment["tags"] and deployment["pull_steps"] == []
    eventually(lambda: any(run["auto_scheduled"] for run in deployed.field.runs("Scheduled")))

    with pytest.raises(BadInput, match="work pool elsewhere"):
        deployed.apply(work_pool="elsewhere")
    with pytest.raises(BadInput, match="a sign every 180 s"):
        deployed.apply(silent_after=timedelta(minutes=3))


def slots_held(deployed: Deployed) -> int:
    return deployed.field.ask(f"/v2/concurrency_limits/{ACCELERATOR_LIMIT}")["active_slots"]


def test_accelerators_are_reserved_up_to_the_limit_and_given_back_on_every_way_out(deployed: Deployed):
    eight = ResourceConfig.with_tpu("v6e-8")
    with accelerators_reserved(eight):  # no limit is set
        pass
    limit_accelerators(8)

    with accelerators_reserved(ResourceConfig()):
        assert slots_held(deployed) == 0
    with pytest.raises(EngineStartFailed), accelerators_reserved(eight):
        assert slots_held(deployed) == 8
        raise EngineStartFailed(expected="an engine", found="none", remedy="look")
    eventually(lambda: slots_held(deployed) == 0)
    with (
        pytest.raises(UnsatisfiableResources, match="at most 8"),
        accelerators_reserved(ResourceConfig.with_tpu("v6e-16")),
    ):
        pass


def counted_as(resources: ResourceConfig, _: ResourceConfig) -> AbstractContextManager[None]:
    """Reserves `resources` in place of the pool's own: this machine has no accelerators."""
    return accelerators_counted(resources)


def test_trainings_and_kept_pools_take_accelerators_of_the_same_limit(
    deployed: Deployed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    eight = ResourceConfig.with_tpu("v6e-8")
    limit_accelerators(8)

    eventually(lambda: slots_held(deployed) == 0)
    client = FakeClient()
    output = str(tmp_path / "run")
    training_config = TrainLmOnPodConfig(
        train_config={}, output_path=output, resources=eight, env_vars={"WANDB_MODE": "offline"}
    )
    with training(training_config, client=client):
        assert slots_held(deployed) == 8
        client.submitted[-1].says(JobStatus.SUCCEEDED)
        eventually(lambda: slots_held(deployed) == 0)
        with accelerators_reserved(eight):  # as the pool of its evaluations does before the block ends
            pass
    with pytest.raises(JobFailed), training(training_config, client=client):
        assert slots_held(deployed) == 8
        raise JobFailed(expected="a training", found="none", remedy="look")
    eventually(lambda: slots_held(deployed) == 0)
    submitted = len(client.requests)
    two_slices = training_config.model_copy(update={"resources": ResourceConfig.with_tpu("v6e-8", 2)})
    with pytest.raises(UnsatisfiableResources, match="at most 8"), training(two_slices, client=client):
        pass
    assert len(client.requests) == submitted

    checkpoint = Servable.from_uri("tiny-1", str(write_checkpoint(tmp_path / "step-1", seed=1)))
    config = InferencePoolConfig.model_validate({"model": {"name": "tiny"}})
    launcher = FakeLauncher(tmp_path)
    reserved = partial(counted_as, eight)
    variables = {"PREFECT_API_URL": deployed.field.url}
    keep_up(
        "counted", config, [checkpoint], idle_seconds=600, launcher=launcher, reserved=reserved, variables=variables
    )
    try:
        assert slots_held(deployed) == 8
    finally:
        take_down("counted")
    eventually(lambda: slots_held(deployed) == 0)


@pytest.mark.parametrize(
    ("ending", "state"), [(None, "Cancelled"), (signal.SIGSTOP, "Cancelled"), (signal.SIGTERM, "Crashed")]
)
def test_flow_run_ended_in_mid_evaluation_leaves_nothing_and_its_state_is_true(
    deployed: Deployed, ending: signal.Signals | None, state: str
):
    # A suspended process receives no cancellation and is killed; its worker then cleans up in its place.
    deployed.apply()
    deployed.engine.answers_take(4)
    if not (deployed.folder / "run/hf/step-3").exists():
        deployed.checkpoint(3)
    asked = deployed.engine.requests
    deployed.begin()
    eventually(lambda: deployed.engine.requests > asked + 2)
    deployed.engine.answers_take(600)  # so that nothing ends by itself, however long the server takes
    [run] = deployed.field.runs("Running")
    assert [key.partition(".")[0] for key in deployed.live_claims()] == ["step-3"]

    if ending is not None:
        os.kill(deployed.field.process_of(run["id"]), ending)
    if state == "Cancelled":
        cancelling = {"type": "CANCELLING", "name": "Cancelling"}
        deployed.field.ask(f"/flow_runs/{run['id']}/set_state", {"state": cancelling})

    eventually(lambda: deployed.field.ask(f"/flow_runs/{run['id']}")["state"]["name"] == state)
    eventually(lambda: not deployed.live_claims())
    eventually(lambda: not [job for job in LocalClient().jobs() if not job.status.finished])
    eventually(lambda: deployed.progress_of(run["id"])["description"].endswith(f"; {state.lower()}"))
    assert deployed.progress_of(run["id"])["data"] < 100
    tasks = {"flow_runs": {"id": {"any_": [run["id"]]}}, "task_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    eventually(lambda: not deployed.field.ask("/task_runs/filter", tasks))
    assert "run-3" not in deployed.succeeded()
    waiting = {cell.checkpoint.step: cell for cell in reconciled(deployed).others}
    if state == "Cancelled":
        assert waiting[3].state == "stopped" and "with the flow run reconcile" in str(waiting[3].reason)
        retry(load_policy(deployed.policy), reconciled(deployed), cells=None, failed=False)
    assert 3 in {cell.checkpoint.step for cell in reconciled(deployed).work}, "only a person stops cells"


def reconciled(deployed: Deployed) -> Reconciliation:
    policy = load_policy(deployed.policy)
    return reconcile(take_snapshot(policy), policy, now=time.time())


def evaluate_by_hand(deployed: Deployed) -> subprocess.Popen[str]:
    options = ["--model", str(deployed.folder / "run" / "hf" / "step-3"), "--eval", "demo_facts", "--limit", "2"]
    places = ["--base-url", deployed.engine.base_url, "--output", str(deployed.folder / "by-hand"), "--json"]
    command = [str(ASSAY), "evaluate", *options, *places]
    return subprocess.Popen(command, env=deployed.field.environment(), stdout=subprocess.PIPE, text=True)


def test_server_that_goes_away_costs_no_evaluation_and_learns_how_it_ended(deployed: Deployed):
    field, engine = deployed.field, deployed.engine
    deployed.apply(every=None, on_event=False)
    engine.answers_take(3)
    if not (deployed.folder / "run/hf/step-3").exists():
        deployed.checkpoint(3)
    asked = engine.requests
    run = deployed.begin()  # earlier flow runs of its cell were ended if the tests above have run
    by_hand = evaluate_by_hand(deployed)
    eventually(lambda: all(deployed.live_claims(place) for place in PLACES))
    eventually(lambda: engine.requests >= asked + 2)
    runs = {flow_run["id"] for flow_run in field.runs("Running")}
    assert run in runs and len(runs) == 2

    field.kill_server()
    asked = engine.requests
    engine.answers_take(0)
    for place in PLACES:
        eventually(lambda place=place: "run-3" in deployed.succeeded(place))
        eventually(lambda place=place: not deployed.live_claims(place))
    assert engine.requests > asked
    assert by_hand.poll() is None and field.process_of(run)  # their end is not reported yet

    field.start_server()
    eventually(lambda: {flow_run["id"] for flow_run in field.runs("Completed")} >= runs)
    printed, _ = by_hand.communicate(timeout=60)
    assert by_hand.returncode == 0, printed
    of_both = {"flow_runs": {"id": {"any_": list(runs)}}}
    shown = field.ask("/artifacts/filter", {**of_both, "artifacts": {"key": {"any_": ["run-progress", "run-results"]}}})
    reported = {(artifact["key"], artifact["flow_run_id"]) for artifact in shown}
    assert reported == {(key, flow_run) for key in ("run-progress", "run-results") for flow_run in runs}
    # An artifact that was being created when the server died may exist twice: the later copy counts.
    shown.sort(key=itemgetter("created"))
    progress = {artifact["flow_run_id"]: artifact["data"] for artifact in shown if artifact["type"] == "progress"}
    assert set(progress.values()) == {100.0}
    eventually(lambda: not [job for job in LocalClient().jobs() if not job.status.finished])
