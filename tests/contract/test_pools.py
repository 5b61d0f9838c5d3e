"""Behaviour of a pool, for all backends. To add a backend, add an entry in `fakes.pool_places.PLACES`."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import cloudpickle
import httpx
import pytest

from fakes import launcher
from fakes.fault_target import pool_config
from fakes.kept_pools import machine, start_pool_and_die
from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from fakes.polling import eventually
from fakes.pool_places import PLACES, Place
from fakes.pools import InferencePool
from faults.scenarios.load import LoadPlan
from faults.scenarios.processes import command_line, job_of
from faults.scenarios.target import Target
from faults.scenarios.trial import tried
from pools.endpoint import RunningModel
from pools.engine.launch import Servable
from pools.pool.kept import list_kept, require
from pools.pool.session import PoolSession
from resources.jobs.jobs import JobDetails
from resources.settings import process_environment, settings

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

CLIENTS = 16
REQUESTS = 300
KEPT_ON = {"iris", "kubernetes", "slurm"}
"""Backends with tests of kept pools here; this machine and Ray have tests of their own."""


@pytest.fixture(autouse=True)
def _launcher_travels() -> Iterator[None]:
    # pickles the tests' launcher by value: an image with the code lacks its file
    cloudpickle.register_pickle_by_value(launcher)
    yield
    cloudpickle.unregister_pickle_by_value(launcher)


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("ASSAY_INSECURE", "1")  # this machine's own address, which only this machine uses
    settings.cache_clear()
    with PLACES[request.param](tmp_path) as place:
        yield place


def log_probabilities(running: RunningModel) -> list[float]:
    answer = httpx.post(
        f"{running.base_url}/completions",
        json={"model": running.model, "prompt": "hello", "max_tokens": 4, "logprobs": 1, "echo": True},
        headers={"Authorization": f"Bearer {running.api_key}"},
        timeout=60,
        verify=False,
    )
    return answer.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"]


def jobs_of(place: Place, label: str) -> list[JobDetails]:
    return [job for job in place.client.jobs() if label in job.name and not job.status.finished]


def processes_of(label: str, folder: Path) -> list[str]:
    """Returns command lines of the pool's jobs, and of its engines and their parts, which name the test's folder."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    commands = {pid: " ".join(command_line(pid)) for pid in pids}
    return [commands[pid] for pid in pids if label in job_of(pid) or str(folder) in commands[pid]]


def listens(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname, parts.port)) == 0


def models(target: Target) -> set[str | None]:
    return {replica.announcement.model for replica in target.status().replicas}


@pytest.mark.parametrize(("replicas", "hosts"), [(2, 1), (1, 2)])
def test_pool_on_two_machines_survives_the_loss_of_a_machine(
    place: Place, tmp_path: Path, replicas: int, hosts: int
) -> None:
    label = f"contract-{secrets.token_hex(4)}"
    served = [
        Servable.from_uri(f"run-{step}", str(write_checkpoint(tmp_path / f"step-{step}", seed=step))) for step in (1, 2)
    ]
    fake = FakeLauncher(tmp_path, faults={"fresh_samples": True})
    config = pool_config(resource_config={"replicas": replicas, "hosts": hosts, **place.resources})
    events: list[str] = []
    before_all = set(place.temporary.iterdir())
    with InferencePool(config, served, client=place.client, launcher=fake, label=label, on_event=events.append) as pool:
        target = Target(pool, "run-1", owner_pid=os.getpid(), recovery_seconds=120)
        answers = []
        for name in ("run-1", "run-2", "run-1"):
            running, _ = pool.load(name)
            eventually(lambda name=name: models(target) == {name})
            assert asyncio.run(target.settled()) is None, events
            answers.append(log_probabilities(running))
        assert answers[0] == answers[2] != answers[1]
        assert len(jobs_of(place, label)) == 1 + replicas  # the proxy and the agents

        before, jobs, lost = target.instances(), jobs_of(place, label), list[JobDetails]()

        async def lose_it() -> None:
            lost.append(await asyncio.to_thread(place.lose, jobs))

        plan = LoadPlan(f"contract-{os.urandom(4).hex()}", requests=REQUESTS, concurrency=CLIENTS)
        trial = asyncio.run(tried(target, plan, lose_it))
        assert trial.broken_rules(most_upstream=REQUESTS + CLIENTS, broken_streams=CLIENTS) == [], events
        name = lost[0].name[: len("replica-0")]
        eventually(lambda: target.instances()[name] != before[name])
        assert asyncio.run(target.settled()) is None, events
        assert {other for other in before if target.instances()[other] == before[other]} == {*before} - {name}
        addresses = [pool.base_url, *pool.engine_urls()]
        assert all(map(listens, addresses))
        assert processes_of(label, tmp_path)
    assert not any(map(listens, addresses))
    assert processes_of(label, tmp_path) == []
    assert jobs_of(place, label) == []
    left = {path.name for path in set(place.temporary.iterdir()) - before_all if lost[0].name not in path.name}
    assert left <= place.lasting  # and files of the lost machine


@pytest.mark.parametrize("place", sorted(KEPT_ON), indirect=True)
def test_kept_pool_outlives_its_starter_and_is_found_used_and_taken_down_by_another_machine(
    place: Place, tmp_path: Path, session_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_POOLS", str(tmp_path / "shared"))
    before = {job.job_id for job in place.client.jobs()}
    name = f"warm-{secrets.token_hex(4)}"
    first, second = (write_checkpoint(tmp_path / f"step-{step}", seed=step) for step in (1, 2))
    start_pool_and_die(
        name,
        {"run-1": first},
        variables={**machine(tmp_path / "a", session_cache), **place.reach},
        folder=tmp_path,
        resource_config=place.resources,
    )
    for variable, value in {**machine(tmp_path / "b", session_cache), **place.reach, "ASSAY_JOBS": ""}.items():
        monkeypatch.setenv(variable, value)
    settings.cache_clear()
    [state] = list_kept()
    assert (state.pool.name, state.state, state.pool.backend) == (name, "up", place.reach["ASSAY_JOBS"])
    access, answers = require(name).access, []
    assert access.checkpoints == {"run-1": str(first)}
    own = [Servable.from_uri(f"own-{path.name}", str(path)) for path in (first, second)]
    with PoolSession(access, own, holder="a test") as session:
        for model in ("own-step-1", "own-step-2", "own-step-1"):
            running, _ = session.load(model)
            answers.append(log_probabilities(running))
            session.unwant(model)
    assert answers[0] == answers[2] != answers[1]
    assert processes_of(name, tmp_path)
    down = [Path(sys.executable).with_name("assay"), "pool", "down", name]  # its variables exist when it begins
    ended = subprocess.run(down, env=process_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"{name} is down.\n"), ended.stderr
    eventually(lambda: processes_of(name, tmp_path) == [])
    assert {job.job_id for job in place.client.jobs() if not job.status.finished} <= before
    assert (list_kept(), list((tmp_path / "shared").iterdir())) == ([], [])
