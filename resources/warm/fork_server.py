"""Warm starts: a server process imports a program once (see `programs/fork_server.py`), and forks it for every run.

A run is an ordinary command that can be a job: it lives as long as the program, which starts cold without the server.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

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

    def command(self, *arguments: str) -> Command:
        """Returns a command that runs the program with these arguments; the start is cold if the server is gone."""
        stub = ("-I", "-S", "-u", str(_PROGRAMS / "run_forked.py"), str(self.socket), str(self.program))
        return Command(str(self.python), (*stub, *arguments))


class ForkServer(AbstractContextManager["ForkServer"]):
    """Keeps `program` imported by the interpreter `python`, and creates commands that run it in a fork.

    Args:
        client: runs the server as a job that ends with this process, on the machine of the commands.
        variables: environment of the import. Runs bring their own, with equal values of the variables read at import.
        inherited: names of the variables that it inherits in addition; all when None.
        preload_arguments: passed to the program's `preload`.
    """

    def __init__(
        self,
        program: Path,
        *,
        python: Path,
        client: Client,
        variables: Mapping[str, str] | None = None,
        inherited: tuple[str, ...] | None = None,
        preload_arguments: Sequence[str] = (),
    ) -> None:
        self._program = program
        self._python = python
        self._client = client
        self._variables = dict(variables or {})
        self._inherited = inherited
        self._preload_arguments = tuple(preload_arguments)
        self._folder: Path | None = None
        self._socket: Path | None = None
        self._job: JobHandle | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Starts the server and returns while it imports; earlier runs wait until it is ready."""
        self._folder = folder_for_a_socket()
        self._socket = self._folder / "socket"
        arguments = ("-I", "-u", str(_PROGRAMS / "fork_server.py"), str(self._socket), str(self._program))
        self._job = self._client.submit(
            JobRequest(
                f"warm-{self._program.stem}-{secrets.token_hex(4)}",
                Command(str(self._python), (*arguments, *self._preload_arguments)),
                resources=ResourceConfig(),
                environment=create_environment(
                    workspace=self._program.parent,
                    python=self._python,
                    env_vars=dict(self._variables),
                    inherited=self._inherited,
                ),
                max_retries_preemption=_RESTARTS,
            )
        )

    def command(self, *arguments: str) -> Command:
        return self.warm.command(*arguments)

    @property
    def warm(self) -> WarmProgram:
        """Returns the program, for processes that do not end the server."""
        return WarmProgram(self._python, self._program, self._socket or Path(os.devnull))

    def logs(self) -> str:
        return self._job.logs() if self._job else ""

    def close(self) -> None:
        """Ends the server and all its runs; safe to call twice."""
        if self._job is not None:
            self._job.terminate()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
