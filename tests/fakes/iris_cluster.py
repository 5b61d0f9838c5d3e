"""A real Iris cluster of this machine, run by `iris_program.py`."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fakes.processes import free_port
from fakes.shared import shared
from resources.backends.iris.client import IrisClient

_READY = "ready"
_PROGRAM = Path(__file__).with_name("iris_program.py")


@dataclass(frozen=True)
class IrisCluster:
    """A cluster that a program of ours runs."""

    address: str
    process: subprocess.Popen[str]
    temporary: Path
    """The folder for temporary files of its workers and their jobs."""

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
    temporary = home / "temporary"
    temporary.mkdir()
    port = free_port()
    python = _python_without_us(home / "python")
    with (home / "cluster.log").open("wb") as log:
        process = subprocess.Popen(
            [python, str(_PROGRAM), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=home,
            env={**os.environ, "HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": ""},
        )
    cluster = IrisCluster(f"127.0.0.1:{port}", process, temporary)
    cluster.tell("start")
    return cluster


def _python_without_us(folder: Path) -> Path:
    """An interpreter that has every package of ours, and none of our own code."""
    venv.create(folder, symlinks=True)
    for name in ("purelib", "platlib"):
        variables = {"base": str(folder), "platbase": str(folder)}
        here, packages = Path(sysconfig.get_path(name, "venv", variables)), sysconfig.get_path(name)
        (here / "packages.pth").write_text(f"{packages}\n")  # whose own .pth files, with the way to us, are not read
    return folder / "bin" / "python"


@shared
def shared_cluster() -> Iterator[IrisCluster]:
    """The cluster of this test process."""
    cluster = start_cluster()
    yield cluster
    cluster.end()
