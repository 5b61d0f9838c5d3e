"""One replica's engine that dies: how often it is started again, and what counts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from fakes.polling import eventually
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable, ServedCheckpoint
from pools.replica.loading import Loading
from pools.replica.replica import ReplicaEngine
from pools.replica.restarts import Restarts
from resources.backends.local.client import LocalClient
from resources.errors import EngineDied


def test_restarts_are_those_of_ten_minutes() -> None:
    times = iter((0.0, 300.0, 601.0, 700.0))
    restarts = Restarts(2, clock=lambda: next(times))
    allowed = [restarts.allow() for _ in range(4)]
    assert allowed == [True, True, True, False]
    assert restarts.last == "for the 3. time in ten minutes"


@pytest.mark.parametrize("most", [0, 1])
def test_death_that_the_load_of_another_checkpoint_overtakes_counts(tmp_path: Path, most: int) -> None:
    first, second = (
        ServedCheckpoint.from_folder(servable.name, Path(servable.uri), servable.digests)
        for seed in (1, 2)
        for servable in [Servable.from_uri(f"run-{seed}", str(write_checkpoint(tmp_path / f"{seed}", seed=seed)))]
    )
    client, launcher = LocalClient(tmp_path / "jobs"), FakeLauncher(tmp_path)
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}, "max_replica_restarts": most})
    replica = ReplicaEngine(
        "replica-0", config, launcher=launcher, client=client, on_change=lambda: None, drain=lambda: None
    )
    try:
        replica.load(first, Loading())
        [engine] = tmp_path.glob("engine-*.json")
        os.kill(json.loads(engine.read_text())["pid"], signal.SIGKILL)
        eventually(lambda: replica.engine_ended)
        loading = Loading()
        if most == 0:
            with pytest.raises(EngineDied, match=r"it died, for the 1\. time in ten minutes"):
                replica.load(second, loading)
            assert replica.state == "dead"
            return
        replica.load(second, loading)
        assert (replica.state, loading.how, loading.reason) == ("ready", "restart", "the engine died")
        assert replica.revived == 1
    finally:
        replica.stop()
        client.shutdown()
