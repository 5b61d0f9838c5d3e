"""Flow runs at work pools: cells that wait for a run or are sent again; and cleanup after flow runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pydantic import ValidationError

from fakes.policies import seen_checkpoint, wanted_evaluation
from fakes.records import make_record
from pools.jobs import labelled
from resources.backends.local.client import LocalClient
from resources.config import ResourceConfig
from resources.jobs.jobs import Command, JobHandle, JobRequest, create_environment
from resources.regions.region_table import Regions
from resources.regions.work_pools import Source, WorkPoolState
from tasks.errors import ClaimLost
from tasks.policies.actions import end_claims, end_jobs
from tasks.policies.batches import batches_of, placed
from tasks.policies.dispatch import MOVED, Dispatch, Dispatches, name_of_cell, with_dispatches
from tasks.policies.policy import Override, Overrides, Policy
from tasks.policies.reconciliation import OpenCell, Reconciliation, RunListing
from tasks.policies.snapshot import Estimates
from tasks.records.index import RunRecords
from tasks.records.usage import IndexedRecord, usage_of
from tasks.running.claims.files import Subject, claims_folder
from tasks.running.claims.leases import Claims
from tasks.spec.names import job_label

NOW = 1_000_000.0
POLICY = Policy.model_validate(
    {
        "name": "p",
        "runs": ["/runs/run"],
        "suites": ["demo"],
        "evaluation_path": "/out",
        "dispatch": "work_pools",
        "retries": {"infra_failures": 2, "first_delay_seconds": 600},
    }
)
PRICES = {
    "as_of": "2026-01-01",
    "chip_hour": {"v6e": {"on_demand": 2, "preemptible": 1}},
    "vcpu_hour": {"on_demand": 0.03, "preemptible": 0.01},
    "memory_gb_hour": {"on_demand": 0.004, "preemptible": 0.001},
    "egress_gb": {"same_continent": 0.02, "other_continent": 0.08},
}
REGIONS = Regions.model_validate(
    {
        "prices": PRICES,
        "regions": [
            {
                "name": name,
                "continent": "north-america",
                "zones": [f"{name}-a"],
                "tpus": {"v6e": [f"{name}-a"]},
                "work_pool": f"pool-{name}",
                "work_pool_type": "vertex-ai",
            }
            for name in ("us-east5", "us-central1")
        ],
    }
)


def cell(step: int = 1, name: str = "a", *, listing: str = "listing", **serving: Any) -> OpenCell:
    evaluation = wanted_evaluation(name, **serving)
    return OpenCell("run", seen_checkpoint(step, listing=listing), evaluation, "work")


def flow_run(*cells: OpenCell, ended: float | None = None, state: str = "Crashed", sent: float = NOW - 900) -> Dispatch:
    names = frozenset(map(name_of_cell, cells))
    return Dispatch(uuid4(), "blue-bird", "pool-us-east5", state if ended else "Running", sent, names, ended=ended)


def decided(work: list[OpenCell], sent: Dispatches, **more: Any) -> list[tuple[str, str | None]]:
    listing = RunListing("/runs/run", "run", [], [], more.pop("records", RunRecords({}, (), {})), **more)
    reconciliation = with_dispatches(Reconciliation({}, work, [], 0), [listing], sent, POLICY, now=NOW)
    assert len(reconciliation.work) + len(reconciliation.others) == len(work)
    return [(open_cell.state, open_cell.reason) for open_cell in (*reconciliation.work, *reconciliation.others)]


def test_cell_of_a_flow_run_that_goes_on_waits_for_it_and_the_same_checkpoint_written_again_does_not():
    sent = Dispatches(at_work=[flow_run(cell(1))])
    on_its_way = "on work pool pool-us-east5: flow run 'blue-bird' is Running"
    assert decided([cell(1)], sent) == [("scheduled", on_its_way)]
    assert decided([cell(1, listing="written again"), cell(2), cell(1, "b")], sent) == [("work", None)] * 3


@pytest.mark.parametrize(
    ("ended", "state"),
    [
        ([], "work"),
        ([flow_run(cell(), ended=NOW - 60)], "backing_off"),
        ([flow_run(cell(), ended=NOW - 700)], "work"),
        ([flow_run(cell(), ended=NOW - 60, state="Completed")], "backing_off"),  # without a result
        ([flow_run(cell(), ended=NOW - 60, state=MOVED)], "work"),
        ([flow_run(cell(), ended=NOW - 700), flow_run(cell(), ended=NOW - 700)], "backing_off"),  # 1,200 s by now
        ([flow_run(cell(), ended=NOW - 700) for _ in range(3)], "retries_exhausted"),
        ([flow_run(cell(), ended=NOW - 60, state="Cancelled")], "stopped"),  # by a person, like started runs
        ([flow_run(cell(2), ended=NOW - 60)], "work"),
    ],
)
def test_cell_of_a_dead_flow_run_is_sent_again_with_a_limit(ended: list[Dispatch], state: str):
    assert [decision for decision, _ in decided([cell()], Dispatches(ended=ended))] == [state]


def test_flow_run_that_left_a_record_or_was_forgiven_counts_no_more():
    sent = Dispatches(ended=[flow_run(cell(), ended=NOW - 60, sent=NOW - 500)])
    usage = usage_of(make_record())
    row = IndexedRecord(
        "cell", "run-1", "hash-a", "digest", "listing", "infra_failed", NOW - 400, 1.0, 0.0, 1, "a disk was full", usage
    )
    assert decided([cell()], sent, records=RunRecords({}, [row], {})) == [("work", None)]
    older = row._replace(created=NOW - 600)
    assert decided([cell()], sent, records=RunRecords({}, [older], {}))[0][0] == "backing_off"
    retry = Override(kind="retry", policy="p", cells=None, at=NOW - 10, user="somebody")
    assert decided([cell()], sent, overrides=Overrides(by_policy={"p": retry})) == [("work", None)]


def test_batches_share_run_and_resources_and_take_each_others_places():
    slices = {"device": {"kind": "tpu", "variant": "v6e-8"}}
    pool: dict[str, Any] = {"model": {"name": "run"}}
    served: dict[str, Any]
    by_slice: dict[str, Any]
    served, by_slice = {"pool_config": pool}, {"pool_config": {**pool, "resource_config": slices}}
    work = [cell(1, **served), cell(2, "b", **by_slice), cell(3, **served)]
    batches = batches_of(work)
    assert [[open_cell.checkpoint.step for open_cell in batch.cells] for batch in batches] == [[1, 3], [2]]

    states = {"pool-us-east5": WorkPoolState(limit=1), "pool-us-central1": WorkPoolState(limit=1, active=1)}

    def placed_from(source: Source | None, most: int) -> list[tuple[str | None, bool]]:
        at = placed(batches, regions=REGIONS, states=states, source_of=lambda _: source, max_egress_usd=Decimal(most))
        return [(place.choice.work_pool if place.choice else None, place.waits) for place in at]

    assert placed_from(None, 0) == [("pool-us-east5", False), (None, True)]
    states["pool-us-central1"] = WorkPoolState()
    assert placed_from(Source("us-east5", 10**12), 25) == [("pool-us-east5", False), ("pool-us-central1", False)]
    assert placed_from(Source("us-east5", 10**12), 5) == [("pool-us-east5", False), (None, True)]
    states["pool-us-east5"] = WorkPoolState(paused=True)
    assert placed_from(Source("us-east5", 10**12), 5) == [(None, False), (None, False)]


def test_plan_says_where_each_cell_goes_or_that_it_is_for_a_later_pass():
    work = [cell(1), cell(2)]
    at = placed(
        batches_of(work[:1]),
        regions=REGIONS,
        states={region.work_pool: WorkPoolState() for region in REGIONS.regions if region.work_pool},
        source_of=lambda _: Source("us-central1", 10**9),
        max_egress_usd=Decimal(0),
    )
    estimates = Estimates([], at)
    assert [estimates.of(open_cell)["where"] for open_cell in work] == ["us-central1", "in a later pass"]


def test_policy_that_is_sent_away_cannot_name_a_pool_of_this_machine():
    with pytest.raises(ValidationError, match="do not reach"):
        Policy.model_validate(POLICY.model_dump() | {"pool_name": "kept"})
    sent = Policy.model_validate(POLICY.model_dump() | {"pool_name": "https://pool.test", "pool_key_block": "warm"})
    [evaluation] = {(suite.served(sent)["pool_name"], suite.served(sent)["pool_key_block"]) for suite in sent.suites}
    assert evaluation == ("https://pool.test", "warm")


RUN, OTHER = "0a1b2c3d-0000-4000-8000-000000000001", "9a1b2c3d-0000-4000-8000-000000000002"


class Cluster(LocalClient):
    """Fake of a cluster with jobs that outlive their submitter."""

    @property
    def url(self) -> str:
        return "cluster://somewhere"

    @property
    def is_local(self) -> bool:
        return False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    client = Cluster(tmp_path / "jobs", grace_seconds=1.0)
    yield client
    client.shutdown()


def start(client: LocalClient, name: str, folder: Path) -> JobHandle:
    command = Command(sys.executable, ("-c", "import time; time.sleep(600)"))
    environment = create_environment(workspace=folder)
    return client.submit(JobRequest(name, command, resources=ResourceConfig(), environment=environment))


def test_jobs_of_a_flow_run_are_ended_by_their_names_and_others_go_on(cluster: Cluster, tmp_path: Path):
    left = start(cluster, labelled("proxy", job_label(RUN), "abc"), tmp_path)
    others = [start(cluster, labelled("proxy", label, "abd"), tmp_path) for label in (job_label(OTHER), None)]
    assert end_jobs(cluster, flow_run=RUN) == 1
    assert left.status().finished
    assert not any(job.status().finished for job in others)
    assert end_jobs(LocalClient(tmp_path / "jobs"), flow_run=OTHER) == 0  # ends with its parent


@pytest.mark.parametrize("key", ["policy", "config", "request", "training"])
def test_claims_of_a_flow_run_end_and_other_claims_hold(tmp_path: Path, key: str):
    (tmp_path / "run").mkdir()
    parameters = {key: {"model_path": str(tmp_path / "run"), "evaluation_path": str(tmp_path / "out")}}
    if key == "policy":
        asked = {"name": "p", "runs": [str(tmp_path / "r*")], "suites": ["key_evals"], "base_url": "http://x/v1"}
        parameters = {key: {**asked, "evaluation_path": str(tmp_path / "out")}}
    if key == "training":
        request = {"evaluation_path": str(tmp_path / "out")}
        training = {"train_config": {}, "output_path": str(tmp_path / "run")}
        parameters = {"config": {"training": training, "suite": "key_evals", "request": request}}
    folder = claims_folder(str(tmp_path / "out"), "run")
    mine, others = (Subject(key=f"step-{n}.c", checkpoint=f"run-{n}", evaluation_hash="h") for n in (1, 2))
    with (
        Claims(folder, flow_run=RUN, in_background=False) as dead,
        Claims(folder, flow_run=OTHER, in_background=False) as alive,
    ):
        assert dead.acquire([mine]).ours and alive.acquire([others]).ours
        assert end_claims(parameters, flow_run=RUN) == 1
        with pytest.raises(ClaimLost):
            dead.prove(mine.key)
        alive.prove(others.key)
        assert end_claims(parameters, flow_run=RUN) == 0
        assert alive.acquire([mine]).ours == {mine.key}


def test_parameters_of_another_flow_leave_nothing_to_end(tmp_path: Path):
    assert end_claims({"policy": {"name": "no policy"}}, flow_run=RUN) == 0
    assert end_claims({"config": {"training": {}}}, flow_run=RUN) == 0
