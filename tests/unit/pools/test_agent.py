"""A replica's agent alone, with a pool that says what the test wants; engines are processes that never answer."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fakes.launcher import FakeLauncher
from fakes.models import write_checkpoint
from pools.config import InferencePoolConfig
from pools.engine.launch import Servable
from pools.protocol import Announcement, Orders, ServedModel
from pools.proxy.client import ProxyAddress
from pools.replica import agent
from resources.backends.local.client import LocalClient


class Pool:
    """Orders one checkpoint, and stops the replica as soon as its engine is being started."""

    def __init__(self, served: ServedModel, launcher: FakeLauncher) -> None:
        self.heard: list[Announcement] = []
        self._served, self._launcher = served, launcher

    def announce(self, name: str, announcement: Announcement, *, join_token: str) -> Orders:
        self.heard.append(announcement)
        if self._launcher.launches:
            return Orders(version=2, known=True, stop=True)
        time.sleep(min(0.01, announcement.wait_seconds))  # as a long poll that nobody answers sooner
        return Orders(version=1, known=True, model="run-1", served=self._served)


def test_load_that_its_own_end_cuts_short_is_no_failure_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Servable.from_uri("run-1", str(write_checkpoint(tmp_path / "step-1", seed=1))).served
    launcher = FakeLauncher(tmp_path, scripts={0: "import time; time.sleep(600)"})
    pool, client = Pool(served, launcher), LocalClient()
    monkeypatch.setattr(agent, "ProxyClient", lambda *_, **__: pool)
    options: dict[str, Any] = {"address": ProxyAddress(host="127.0.0.1", port=9, pid=1), "token": "join"}
    config = InferencePoolConfig.model_validate({"model": {"name": "run"}})
    agent.Agent("replica-0", config, launcher=launcher, client=client, **options).run()
    for thread in threading.enumerate():
        if thread.name == "load":
            thread.join()
    client.shutdown()
    assert launcher.launches == ["run-1"]
    assert [load for announcement in pool.heard for load in announcement.loads] == []
    assert pool.heard[-1].state == "dead"
