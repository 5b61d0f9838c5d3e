"""A Prefect server that is killed while flow runs are at work, and comes back: the evaluation does not notice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.deployed_policy import Deployed, deployed_policy
from fakes.polling import eventually
from resources.backends.local.client import LocalClient
from tasks.prefect_server.work_pools import LOCAL_WORK_POOL
from tasks.records.record import read_records

pytestmark = [pytest.mark.harness, pytest.mark.timeout(400)]

ASSAY = Path(sys.executable).with_name("assay")
PLACES = ("out", "by-hand")


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    with deployed_policy(tmp_path) as one:
        yield one


def evaluate_by_hand(deployed: Deployed) -> subprocess.Popen[str]:
    options = ["--model", str(deployed.folder / "run" / "hf" / "step-1"), "--eval", "demo_facts", "--limit", "2"]
    places = ["--base-url", deployed.engine.base_url, "--output", str(deployed.folder / "by-hand"), "--json"]
    command = [str(ASSAY), "evaluate", *options, *places]
    return subprocess.Popen(command, env=deployed.field.environment(), stdout=subprocess.PIPE, text=True)


def statuses(deployed: Deployed, place: str) -> list[str]:
    return [one.status for one in read_records(str(deployed.folder / place))]


def test_server_that_goes_away_costs_no_evaluation_and_learns_how_it_ended(deployed: Deployed):
    field, engine = deployed.field, deployed.engine
    deployed.apply(every=None, on_event=False)
    deployed.checkpoint(1)
    engine.answers_take(3)
    with field.worker(LOCAL_WORK_POOL):
        run = deployed.begin()
        by_hand = evaluate_by_hand(deployed)
        eventually(lambda: all(deployed.live_claims(place) for place in PLACES), seconds=120)
        eventually(lambda: engine.requests >= 2, seconds=60)
        runs = {one["id"] for one in field.runs("Running")}
        assert run in runs and len(runs) == 2

        field.kill_server()
        asked = engine.requests
        engine.answers_take(0)
        for place in PLACES:
            eventually(lambda place=place: statuses(deployed, place) == ["succeeded"], seconds=60)
            eventually(lambda place=place: not deployed.live_claims(place))
        assert engine.requests > asked
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
