"""A real Iris cluster of this machine: controller, autoscaler and workers in one process, jobs as processes.

Run as a program it obeys lines on standard input, and ends with it: `restart` stops the controller and starts another
on the same port and database, `stop` and `start` do one of the two.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from resources.backends.iris.client import IrisClient

_READY = "ready"


@dataclass(frozen=True)
class IrisCluster:
    """A cluster that a program of ours runs."""

    address: str
    process: subprocess.Popen[str]

    def tell(self, command: str) -> None:
        """Has the cluster obey, and returns when it has."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline().strip()) != _READY:
            assert line or self.process.poll() is None, "the Iris cluster has ended"

    def client(
        self,
        *,
        patience_seconds: float = 20.0,
        lease_seconds: float = 60.0,
        poll_seconds: float = 0.2,
        grace_seconds: float = 0.5,
    ) -> IrisClient:
        """A client of its own, with little grace."""
        from resources.backends.iris.connection import IrisController

        controller = IrisController(self.address, patience_seconds=patience_seconds)
        return IrisClient(
            controller, grace_seconds=grace_seconds, poll_seconds=poll_seconds, lease_seconds=lease_seconds
        )

    def end(self) -> None:
        """Ends the cluster and its jobs."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_cluster() -> IrisCluster:
    """A new cluster with a home folder of its own, where Iris keeps credentials."""
    home = Path(tempfile.mkdtemp(prefix="iris-home-"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (home / "cluster.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "HOME": str(home), "PYTHONPATH": ""},
        )
    cluster = IrisCluster(f"127.0.0.1:{port}", process)
    cluster.tell("start")
    return cluster


@cache
def shared_cluster() -> IrisCluster:
    """The cluster of this test process, ended with it."""
    cluster = start_cluster()
    atexit.register(cluster.end)
    return cluster


def main(port: int) -> None:
    """Runs a cluster with one kind of machine, which has room for many jobs."""
    from datetime import timedelta

    from iris.cluster.backends.local.cluster import LocalCluster, make_local_cluster_config
    from iris.cluster.controller import service

    service.FRESHNESS_WINDOW = timedelta(days=36500)  # it refuses clients that were built over 14 days ago
    config = make_local_cluster_config(2)
    config.controller.local.port = port
    config.storage.remote_state_dir = f"file://{Path.home()}/state"  # else gone with the first controller
    machine = config.scale_groups["local-cpu"].resources
    machine.cpu_millicores, machine.memory_bytes, machine.disk_bytes = 900_000, 900 * 2**30, 90 * 2**40
    cluster = LocalCluster(config)
    for line in sys.stdin:
        if line.strip() in {"stop", "restart"}:
            cluster.stop()
        if line.strip() in {"start", "restart"}:
            cluster.start()
        print(_READY, flush=True)
    cluster.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
