"""A private Prefect server with its services, and a worker of this machine, as a team runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fakes.cli import invoke
from fakes.polling import eventually
from fakes.prefect_server import NO_UI, start_prefect_server
from fakes.processes import end, free_port
from resources.settings import process_environment

_BIN = Path(sys.executable).parent
_QUICK = {
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_SCHEDULER_MAX_RUNS": "3",  # runs planned per schedule; the default is 100
    "DO_NOT_TRACK": "1",
}


@dataclass
class Field:
    """A server and a client of it. It can be killed and restarted with the same database and address."""

    folder: Path
    port: int
    database: str | None = None
    """URL of its database; a file of SQLite when None."""
    _server: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def environment(self) -> dict[str, str]:
        own = {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(self.folder / "prefect")}
        return process_environment({**_QUICK, **own})

    def assay(self, *arguments: str) -> Any:
        """Runs the command in this process with this server; returns its JSON output."""
        done = invoke([*arguments, "--json"])
        assert done.exit_code == 0, (done.output, done.exception)
        return json.loads(done.stdout)

    def ask(self, path: str, content: Mapping[str, Any] | None = None, *, method: str | None = None) -> Any:
        """Returns the server's answer to a request; POST if there is content."""
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=method)
        answered = eventually(lambda: _answer(request))
        return answered[0] if answered else None

    def runs(self, *names: str) -> list[dict[str, Any]]:
        """Returns flow runs in some states, or all begun runs; the newest first."""
        query = {"flow_runs": {"state": {"name": {"any_": names or _BEGUN}}}, "limit": 200}
        return self.ask("/flow_runs/filter", {**query, "sort": "EXPECTED_START_TIME_DESC"})

    def busy(self) -> bool:
        soon = datetime.now(UTC) + timedelta(seconds=30)
        waits = [run["next_scheduled_start_time"] for run in self.runs("Scheduled", "Late")]
        due = any(datetime.fromisoformat(planned) < soon for planned in waits if planned)
        return due or bool(self.runs("Pending", "Submitting", "Running", "Cancelling"))

    def process_of(self, run: str) -> int:
        """Returns the process on this machine that executes a flow run; its worker names the run in its environment."""
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                named = f"PREFECT__FLOW_RUN_ID={run}".encode() in (path / "environ").read_bytes().split(b"\0")
                if named and b"prefect.engine" in (path / "cmdline").read_bytes():
                    return int(path.name)
        raise AssertionError(f"expected a process of flow run {run}, found none")

    def start_server(self) -> None:
        variables = {**_QUICK, **NO_UI}
        if self.database is not None:
            variables["PREFECT_API_DATABASE_CONNECTION_URL"] = self.database
            variables["PREFECT_API_DATABASE_MIGRATE_ON_START"] = str(self._server is None)
        with (self.folder / "server.log").open("ab") as log:
            self._server = start_prefect_server(self.folder / "prefect", self.port, variables=variables, log=log)

    def kill_server(self) -> None:
        """Kills the server as a failing machine does: without notice and without further writes."""
        assert self._server is not None
        self._server.kill()
        self._server.wait()

    def stop_server(self) -> None:
        if self._server is not None:
            end(self._server)

    @contextmanager
    def worker(
        self, work_pool: str, *, variables: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Runs a worker for the block, with `variables` added to those of this field."""
        with (self.folder / "worker.log").open("ab") as log:
            command = [str(_BIN / "prefect"), "worker", "start", "--pool", work_pool, "--type", "process"]
            env = {**self.environment(), **(variables or {})}
            process = subprocess.Popen(command, env=env, cwd=self.folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            end(process)


def _answer(request: urllib.request.Request) -> tuple[Any] | None:
    # None after a 503, when nothing was done since SQLite's lock was held; Prefect's own client retries it too
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            body = response.read()
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return None
    return (json.loads(body) if body else None,)


WAITING = ("Pending", "Submitting", "Late")
"""States of flow runs that start by themselves soon."""
_BEGUN = (*WAITING, "Running", "Cancelling", "Cancelled", "Completed", "Failed", "Crashed")


@contextmanager
def prefect_field(folder: Path, *, database: str | None = None) -> Iterator[Field]:
    started = Field(folder, free_port(), database)
    try:
        started.start_server()
        yield started
    finally:
        started.stop_server()
