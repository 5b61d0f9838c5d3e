"""Warm starts: a server process imports a program once (see `programs/fork_server.py`), and forks it for every run.

A run is an ordinary command that can be a job: it lives as long as the program, which starts cold without the server.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from resources.config import ResourceConfig
from resources.jobs.addresses import folder_for_a_socket
from resources.jobs.jobs import Client, Command, JobHandle, JobRequest, create_environment

_PROGRAMS = Path(__file__).parent / "programs"
_RESTARTS = 3


@dataclass(frozen=True)
class WarmProgram:
    """A program that a server listening at `socket` keeps imported; every process of the machine can run it."""

    python: Path
    program: Path
    socket: Path
    job_id: str
    """The server's job."""

    def command(self, *arguments: str) -> Command:
        """Returns a command that runs the program with these arguments; the start is cold if the server is gone."""
        stub = ("-I", "-S", "-u", str(_PROGRAMS / "run_forked.py"), str(self.socket), str(self.program))
        return Command(str(self.python), (*stub, *arguments))


@contextmanager
def fork_server(
    program: Path,
    *,
    python: Path,
    client: Client,
    variables: Mapping[str, str] | None = None,
    inherited: tuple[str, ...] | None = None,
    preload_arguments: Sequence[str] = (),
) -> Iterator[WarmProgram]:
    """Keeps `program` imported by the interpreter `python` within the block; earlier runs wait until it is imported.

    Args:
        client: runs the server as a job that ends with this process, on the machine of the commands.
        variables: environment of the import. Runs bring their own, with equal values of the variables read at import.
        inherited: names of the variables that it inherits in addition; all when None.
    """
    folder = folder_for_a_socket()
    job: JobHandle | None = None
    try:
        arguments = ("-I", "-u", str(_PROGRAMS / "fork_server.py"), str(folder / "socket"), str(program))
        job = client.submit(
            JobRequest(
                f"warm-{program.stem}-{secrets.token_hex(4)}",
                Command(str(python), (*arguments, *preload_arguments)),
                resources=ResourceConfig(),
                environment=create_environment(
                    workspace=program.parent, python=python, env_vars=dict(variables or {}), inherited=inherited
                ),
                max_retries_preemption=_RESTARTS,
            )
        )
        yield WarmProgram(python, program, folder / "socket", job.job_id)
    finally:
        if job is not None:
            job.terminate()
        shutil.rmtree(folder, ignore_errors=True)
