"""A replica's agent alone, against a scripted pool."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fakes.jobs import FakeJob
from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint, write_safetensors
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.pool.processes import AgentJobs, is_silent
from pools.protocol import Announcement, Orders
from pools.proxy.client import ProxyAddress
from pools.replica import agent
from pools.replica.replica import ReplicaEngine
from resources.backends.local.client import LocalClient
from resources.errors import BackendUnavailable
from resources.jobs.jobs import JobDetails, JobStatus
from resources.settings import settings


class Pool:
    """Answers a replica with scripted orders, and keeps its announcements."""

    def __init__(self, orders: Callable[[Announcement], Orders]) -> None:
        self.heard: list[Announcement] = []
        self._orders = orders

    def announce(self, name: str, announcement: Announcement, *, join_token: str) -> Orders:
        self.heard.append(announcement)
        time.sleep(min(0.01, announcement.wait_seconds))  # like a long poll without an early answer
        return self._orders(announcement)


def run_agent(
    launcher: FakeLauncher, orders: Callable[[Announcement], Orders], patch: pytest.MonkeyPatch, **fields: Any
) -> Pool:
    pool, client = Pool(orders), LocalClient()
    patch.setattr(agent, "ProxyClient", lambda *_, **__: pool)
    options: dict[str, Any] = {"address": ProxyAddress(host="127.0.0.1", port=9, pid=1), "token": "join", "start": 7}
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}, **fields})
    agent.Agent("replica-0", config, launcher=launcher, client=client, **options).run()
    for thread in threading.enumerate():
        if thread.name == "load":
            thread.join()
    client.shutdown()
    return pool


def test_load_that_its_own_end_cuts_short_is_no_failure_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Servable.from_uri("run-1", str(write_checkpoint(tmp_path / "step-1", seed=1))).served
    launcher = FakeLauncher(tmp_path, scripts={0: "import time; time.sleep(600)"})

    def orders(announcement: Announcement) -> Orders:
        if launcher.launches:
            return Orders(version=2, known=True, stop=True)
        return Orders(version=1, known=True, model="run-1", served=served)

    pool = run_agent(launcher, orders, monkeypatch)
    assert launcher.launches == ["run-1"]
    assert [load for announcement in pool.heard for load in announcement.loads] == []
    assert pool.heard[-1].state == "dead"
    assert {announcement.start for announcement in pool.heard} == {7}


def test_replica_with_an_engine_that_died_too_often_ignores_start_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Servable.from_uri("run-1", str(write_checkpoint(tmp_path / "step-1", seed=1))).served
    launcher, failures = FakeLauncher(tmp_path), 0

    def orders(announcement: Announcement) -> Orders:
        nonlocal failures
        if announcement.state == "ready":
            [engine] = tmp_path.glob("engine-*.json")
            with suppress(ProcessLookupError):
                os.kill(json.loads(engine.read_text())["pid"], signal.SIGKILL)
        failures += announcement.failure is not None
        return Orders(version=failures, known=True, model="run-1", served=served, stop=failures > 3)

    pool = run_agent(launcher, orders, monkeypatch, max_replica_restarts=0)
    assert [failure.kind for failure in [pool.heard[-1].failure] if failure] == ["EngineDied"]
    assert launcher.launches == ["run-1"]


def test_replica_that_says_it_is_ready_says_how_it_became_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))  # a cache without reload verdicts
    settings.cache_clear()
    checkpoints = [
        Servable.from_uri(f"run-{seed}", str(write_checkpoint(tmp_path / f"step-{seed}", seed=seed))) for seed in (1, 2)
    ]
    first_words: dict[str | None, Announcement] = {}

    def orders(announcement: Announcement) -> Orders:
        if announcement.state == "ready":
            first_words.setdefault(announcement.model, announcement)
        for version, checkpoint in enumerate(checkpoints):
            if checkpoint.name not in first_words:
                return Orders(version=version, known=True, model=checkpoint.name, served=checkpoint.served)
        return Orders(version=len(checkpoints), known=True, stop=True)

    run_agent(FakeLauncher(tmp_path), orders, monkeypatch)
    assert [load.how for load in first_words["run-1"].loads] == ["cold start"]
    assert [load.how for load in first_words["run-2"].loads] == ["cold start", "restart"]


def end_engine(folder: Path) -> None:
    """Kills the newest engine, like the out-of-memory killer."""
    address = max(folder.glob("engine-*.json"), key=lambda path: path.stat().st_mtime_ns)
    os.kill(json.loads(address.read_bytes())["pid"], signal.SIGKILL)


def stop_once_settled(announcement: Announcement) -> Orders | None:
    """Returns the order to stop once an engine was restarted, or could not be."""
    revived = announcement.state == "ready" and announcement.restarts
    if revived or any(load.failure for load in announcement.loads):
        return Orders(version=9, known=True, stop=True)
    return None


def test_engine_is_not_revived_on_files_written_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "step-1", seed=1)
    served = Servable.from_uri("run-1", str(folder)).served
    launcher, heard_ready = FakeLauncher(tmp_path), threading.Event()

    def orders(announcement: Announcement) -> Orders:
        if announcement.state == "ready" and not heard_ready.is_set():
            heard_ready.set()
            write_safetensors(folder / "model.safetensors", seed=2)
            end_engine(tmp_path)
        return stop_once_settled(announcement) or Orders(version=1, known=True, model="run-1", served=served)

    pool = run_agent(launcher, orders, monkeypatch)
    assert launcher.launches == ["run-1"]
    assert heard_ready.is_set()
    failure = pool.heard[-1].loads[-1].failure
    assert failure is not None
    assert failure.kind == "CheckpointChanged"


def test_engine_is_revived_on_the_files_that_a_link_showed_when_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (write_checkpoint(tmp_path / f"step-{seed}", seed=seed) for seed in (1, 2))
    latest = tmp_path / "latest"
    latest.symlink_to(first)
    served = Servable.from_uri("run", str(latest)).served
    assert served.uri == str(first)
    launcher, killed = FakeLauncher(tmp_path), threading.Event()

    def orders(announcement: Announcement) -> Orders:
        if announcement.state == "ready" and not killed.is_set():
            killed.set()
            latest.unlink()
            latest.symlink_to(second)
            end_engine(tmp_path)
        return stop_once_settled(announcement) or Orders(version=1, known=True, model="run", served=served)

    pool = run_agent(launcher, orders, monkeypatch)
    assert launcher.launches == ["run", "run"]
    assert [load.failure for load in pool.heard[-1].loads] == [None]


def test_engine_that_answers_otherwise_after_a_revival_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Servable.from_uri("run-1", str(write_checkpoint(tmp_path / "step-1", seed=1))).served
    engine = Path(__file__).parents[2] / "fakes" / "engine.py"
    other = (
        f"import runpy, sys; sys.argv = ['engine', '--port', sys.argv[1], '--label', 'others', '--address-file', "
        f"{str(tmp_path / 'other.json')!r}]; runpy.run_path({str(engine)!r}, run_name='__main__')"
    )
    launcher, killed = FakeLauncher(tmp_path, scripts={1: other, 2: other}), threading.Event()

    def orders(announcement: Announcement) -> Orders:
        if announcement.state == "ready" and not killed.is_set():
            killed.set()
            end_engine(tmp_path)
        return stop_once_settled(announcement) or Orders(version=1, known=True, model="run-1", served=served)

    pool = run_agent(launcher, orders, monkeypatch)
    assert not [heard for heard in pool.heard if heard.state == "ready" and heard.restarts]
    failure = pool.heard[-1].loads[-1].failure
    assert failure is not None
    assert "as it did before" in failure.expected


def test_replica_between_two_checkpoints_never_says_that_it_is_ready_for_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = [
        Servable.from_uri(f"run-{seed}", str(write_checkpoint(tmp_path / f"step-{seed}", seed=seed)))
        for seed in range(3)
    ]

    def say_at_every_instruction(frame: FrameType, event: str, _: object) -> Any:
        # Announces the replica at every instruction that changes its state.
        if frame.f_code is not ReplicaEngine._become.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            frame.f_locals["self"]._on_change()
        return say_at_every_instruction

    def orders(announcement: Announcement) -> Orders:
        loaded = {load.model for load in announcement.loads}
        for version, checkpoint in enumerate(checkpoints):
            if checkpoint.name not in loaded:
                return Orders(version=version, known=True, model=checkpoint.name, served=checkpoint.served)
        return Orders(version=len(checkpoints), known=True, stop=True)

    threading.settrace(say_at_every_instruction)
    try:
        pool = run_agent(FakeLauncher(tmp_path), orders, monkeypatch)
    finally:
        threading.settrace(None)  # pyright: ignore[reportArgumentType]
    assert pool.heard[-1].loads[-1].how == "reload"
    words = [(heard.state, heard.digest) for heard in sorted(pool.heard, key=lambda heard: heard.sequence)]
    for checkpoint in checkpoints[:-1]:
        digest = checkpoint.digests.checkpoint
        first = words.index(("ready", digest))
        gone = next(place for place, pair in enumerate(words) if place > first and pair != ("ready", digest))
        assert ("ready", digest) not in words[gone:]


@pytest.mark.parametrize(
    ("silent", "started", "expected"),
    [
        (5, 100, False),
        (7, 100, True),  # announced before, silent now
        (150, 100, True),  # never announced: its start takes too long
        (1000, 50, False),  # only an earlier agent announced: this agent may still build an environment
        (6.5, 6, False),
    ],
)
def test_new_agent_may_be_silent_for_as_long_as_a_start_takes_and_others_for_some_leases(
    silent: float, started: float, expected: bool
) -> None:
    assert is_silent(silent, started_seconds=started, patience_seconds=6, startup_seconds=60) is expected


def test_stop_reports_an_agent_that_could_not_be_ended() -> None:
    class Stuck(FakeJob):
        def terminate(self) -> None:
            raise BackendUnavailable(expected="an answer", found="none", remedy="try again")

    running, events = JobDetails(job_id="j", name="j", status=JobStatus.RUNNING), list[str]()
    jobs = {"a": Stuck("a", running), "b": FakeJob("b", running)}
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}})
    agents = AgentJobs(lambda name, _: jobs[name], config, on_event=events.append)
    agents.start(jobs)
    agents.stop()
    assert jobs["b"].terminated == 1
    assert len(events) == 1 and events[0].startswith("a may still run")
