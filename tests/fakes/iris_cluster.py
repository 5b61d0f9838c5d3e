"""A real Iris cluster on this machine, run by `iris_program.py`."""

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
    address: str
    process: subprocess.Popen[str]
    temporary: Path
    """The folder for temporary files of its workers and their jobs."""

    def tell(self, command: str) -> None:
        """Sends a command to the cluster and waits for its completion."""
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
        from resources.backends.iris.connection import IrisController

        controller = IrisController(self.address, patience_seconds=patience_seconds)
        return IrisClient(
            controller, grace_seconds=grace_seconds, poll_seconds=poll_seconds, lease_seconds=lease_seconds
        )

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_cluster() -> IrisCluster:
    """Starts a cluster with its own home folder, where Iris keeps credentials."""
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
    # an interpreter with all packages of this environment, without this repository
    venv.create(folder, symlinks=True)
    for name in ("purelib", "platlib"):
        variables = {"base": str(folder), "platbase": str(folder)}
        site_packages, packages = Path(sysconfig.get_path(name, "venv", variables)), sysconfig.get_path(name)
        # .pth files in that folder, which lead to this repository, are not read
        (site_packages / "packages.pth").write_text(f"{packages}\n")
    return folder / "bin" / "python"


@shared
def shared_cluster() -> Iterator[IrisCluster]:
    cluster = start_cluster()
    yield cluster
    cluster.end()
