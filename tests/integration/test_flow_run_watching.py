"""Flow runs that their workers left behind, and the automations that say so."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Pending, Running

from fakes.polling import eventually
from fakes.prefect_field import prefect_field
from flows.deploy.policies import watch_over_flow_runs
from tasks.policies.dispatch import TAG

pytestmark = pytest.mark.timeout(300)

LEFT: dict[str, tuple[str, tuple[State, ...]]] = {
    "begun by nobody": ("process", (Pending(),)),
    "waits for its machine": ("kubernetes", (Pending(),)),
    "silent": ("kubernetes", (Pending(), Running())),
    "cancelled": ("process", (Pending(), Running(), Cancelling())),
}
"""Flow runs by name: the type of their work pool, and the states that they have had when their worker goes."""


@flow
def nothing() -> None:
    """Is never run here."""


def left_by_its_worker(client: SyncPrefectClient, deployment: UUID, name: str, states: tuple[State, ...]) -> str:
    run = client.create_flow_run_from_deployment(deployment, name=name, tags=[TAG])
    for state in states:
        client.set_flow_run_state(run.id, state, force=True)
    return str(run.id)


def test_flow_runs_whose_worker_is_gone_are_ended_and_those_that_wait_for_a_machine_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")  # the shortest that there is
    with prefect_field(tmp_path) as field, temporary_settings({PREFECT_API_URL: field.url}):
        assert {change.action for change in watch_over_flow_runs(timedelta(seconds=45))} == {"create"}
        assert watch_over_flow_runs(timedelta(seconds=45)) == []
        with get_client(sync_client=True) as client:
            identifier, deployments = client.create_flow(nothing), {}
            for type_ in ("process", "kubernetes"):
                client.create_work_pool(WorkPoolCreate(name=type_, type=type_))
                deployments[type_] = client.create_deployment(
                    identifier, name=type_, work_pool_name=type_, entrypoint="nothing.py:nothing"
                )
            runs = {
                name: left_by_its_worker(client, deployments[type_], name, states)
                for name, (type_, states) in LEFT.items()
            }

        def states() -> dict[str, str]:
            return {name: field.ask(f"/flow_runs/{one}")["state"]["name"] for name, one in runs.items()}

        ended = {"begun by nobody": "Crashed", "silent": "Crashed", "cancelled": "Cancelled"}
        eventually(lambda: states() == {**ended, "waits for its machine": "Pending"}, seconds=180)
