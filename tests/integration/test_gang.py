"""Replicas of two hosts, as two processes on this machine; the deterministic engine replaces vLLM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes.fault_target import MODEL, pool_config
from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from fakes.polling import eventually
from fakes.pools import InferencePool
from faults.scenarios.load import LoadPlan
from faults.scenarios.processes import command_line, descendants, send
from faults.scenarios.target import Target
from faults.scenarios.trial import Fault, Trial, tried
from pools.engine.launch import Servable
from resources.backends.local.client import LocalClient
from resources.errors import AssayError

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]
CLIENTS = 16


@contextmanager
def running_pool(folder: Path, *, replicas: int = 1, **fields: Any) -> Iterator[Target]:
    served = [
        Servable.from_uri(f"run-{step}", str(write_checkpoint(folder / f"step-{step}", seed=step))) for step in (1, 2)
    ]
    config = pool_config(resource_config={"replicas": replicas, "hosts": 2}, **fields)
    client, events = LocalClient(grace_seconds=2), []
    try:
        launcher = FakeLauncher(folder, faults={"fresh_samples": True})
        with InferencePool(config, served, client=client, launcher=launcher, on_event=events.append) as pool:
            pool.load(MODEL)
            target = Target(pool, MODEL, owner_pid=os.getpid(), recovery_seconds=60)
            assert asyncio.run(target.settled()) is None, events
            yield target
    finally:
        client.shutdown()


def processes(words: str) -> list[int]:
    """Returns descendants of this process with `words` in their command line, in start order."""
    return [pid for pid in sorted(descendants(os.getpid())) if words in " ".join(command_line(pid))]


def agents() -> list[int]:
    return processes("run_call.py")


def parts() -> list[int]:
    """Returns the engine parts on further hosts."""
    return processes("server.sendall(label.encode())")


def under_load(target: Target, fault: Fault) -> Trial:
    plan = LoadPlan(f"gang-{os.urandom(4).hex()}", requests=600, concurrency=CLIENTS)
    return asyncio.run(tried(target, plan, fault))


def test_swap_reaches_both_hosts_and_the_end_leaves_nothing(tmp_path: Path) -> None:
    with running_pool(tmp_path) as target:
        how = [target.pool.load(name)[1].how for name in ("run-2", "run-1", "run-2")]
        assert how[1:] == ["reload", "reload"]  # the first reload may be compared with a cold start
        assert [replica.name for replica in target.status().replicas] == ["replica-0"]
        assert (len(agents()), len(parts())) == (2, 1)
    assert (agents(), parts()) == ([], [])


@pytest.mark.parametrize("host", [0, 1])
def test_host_that_is_lost_under_load_fails_no_request_and_both_are_started_again(tmp_path: Path, host: int) -> None:
    with running_pool(tmp_path, replicas=2) as target:
        before = target.instances()["replica-0"]
        lost = agents()[host]

        async def lose_it() -> None:
            send(signal.SIGKILL, [lost])

        trial = under_load(target, lose_it)
        assert trial.broken_rules(most_upstream=600 + CLIENTS, broken_streams=CLIENTS) == []
        assert asyncio.run(target.settled()) is None
        assert before not in target.instances().values()
        assert (len(agents()), len(parts())) == (4, 2)


def test_part_that_ends_on_a_further_host_restarts_the_engine_on_both(tmp_path: Path) -> None:
    with running_pool(tmp_path) as target:
        [part], hosts = parts(), agents()
        send(signal.SIGKILL, [part])
        eventually(lambda: target.status().replicas[0].announcement.restarts == 1)
        assert asyncio.run(target.settled()) is None
        assert agents() == hosts
        assert len(parts()) == 1 and parts() != [part]


def test_host_that_lacks_the_files_says_so_and_the_replica_keeps_what_it_has(tmp_path: Path) -> None:
    with running_pool(tmp_path) as target:
        (tmp_path / "step-2" / "model.safetensors").unlink()
        with pytest.raises(AssayError):
            target.pool.load("run-2")
        assert target.pool.load(MODEL)[1].how == "already loaded"
