"""A Prefect server of one's own, with its services, and a worker of this machine: as a team runs them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.polling import eventually
from resources.settings import process_environment

_BIN = Path(sys.executable).parent
_QUICK = {
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


@dataclass
class Field:
    """The address of a server, and how to ask it."""

    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def environment(self) -> dict[str, str]:
        home = {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(self.folder / "prefect")}
        return process_environment({**_QUICK, **home})

    def assay(self, *arguments: str) -> Any:
        """What the command prints as JSON."""
        done = subprocess.run(
            [str(_BIN / "assay"), *arguments, "--json"],
            capture_output=True,
            text=True,
            env=self.environment(),
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def ask(self, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """The server's answer to a request."""
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            body = response.read()
        return json.loads(body) if body else None

    def runs(self, *names: str) -> list[dict[str, Any]]:
        """Flow runs in one of some states, or in any that is not planned for later; the newest first."""
        found = self.ask("/flow_runs/filter", {"sort": "EXPECTED_START_TIME_DESC", "limit": 200})
        return [run for run in found if run["state"]["name"] in (names or _BEGUN)]

    def process_of(self, run: str) -> int:
        """The process on this machine that carries a flow run out: whose worker names the run in its environment."""
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                named = f"PREFECT__FLOW_RUN_ID={run}".encode() in (path / "environ").read_bytes().split(b"\0")
                if named and b"prefect.engine" in (path / "cmdline").read_bytes():
                    return int(path.name)
        raise AssertionError(f"nobody carries flow run {run} out")

    @contextmanager
    def worker(self, work_pool: str) -> Iterator[subprocess.Popen[bytes]]:
        """A worker, for as long as the block lasts."""
        with (
            (self.folder / "worker.log").open("ab") as log,
            self._running("worker", "start", "--pool", work_pool, "--type", "process", log=log) as process,
        ):
            yield process

    @contextmanager
    def _running(self, *arguments: str, log: Any) -> Iterator[subprocess.Popen[bytes]]:
        command = [str(_BIN / "prefect"), *arguments]
        process = subprocess.Popen(command, env=self.environment(), cwd=self.folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


WAITING = ("Pending", "Submitting", "AwaitingConcurrencySlot", "Late")
"""States of flow runs that are to begin by themselves, and soon."""
_BEGUN = (*WAITING, "Running", "Cancelling", "Cancelled", "Completed", "Failed", "Crashed")


@contextmanager
def prefect_field(folder: Path) -> Iterator[Field]:
    """A server, for as long as the block lasts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        field = Field(folder, probe.getsockname()[1])

    def answers() -> bool:
        try:
            return bool(field.ask("/health"))
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    with (
        (folder / "server.log").open("wb") as log,
        field._running("server", "start", "--port", str(field.port), "--no-ui", log=log),
    ):
        eventually(answers, seconds=120)
        yield field
