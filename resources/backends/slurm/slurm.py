"""Slurm's command-line programs, the only interface of a client to a cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from resources.backends.slurm.resources import Node, nodes_of
from resources.backends.slurm.states import Seen, seen_by_sacct, seen_by_scontrol, seen_by_squeue
from resources.errors import BackendUnavailable, BadInput, UnsatisfiableResources
from resources.settings import process_environment, variables_like

_COMMAND_SECONDS = 120.0  # the commands themselves retry for a while if the controller is away
_NOT_ANSWERING = (
    *("Unable to contact slurm controller", "Connection refused", "Socket timed out", "timed out"),
    *("Unable to establish", "authentication plugin", "Munge", "munge", "fatal:"),
)
_FORGOTTEN, _NO_ACCOUNTING = "Invalid job id", "accounting storage is disabled"
_CONFIGURATION = "SLURM_CONF"
_OF_AN_ALLOCATION = re.compile(rf"(?!{_CONFIGURATION}$)(SLURMD?|SRUN)_")
_NODES_KNOWN_SECONDS = 60.0


class Slurm:
    """A partition of the cluster that this machine's Slurm is configured for; an empty name is the default partition.

    `options` are those of `sbatch` by name, such as account; job states are cached for `known_seconds`.
    """

    def __init__(
        self, partition: str = "", *, options: Mapping[str, str] | None = None, known_seconds: float = 2.0
    ) -> None:
        self.partition = partition
        self.options = dict(options or {})
        self._known_seconds = known_seconds
        self._states: tuple[float, dict[str, Seen]] = (-inf, {})
        self._nodes: tuple[float, list[Node]] = (-inf, [])
        self._lock = threading.Lock()

    def submit(
        self, arguments: Sequence[str], *, script: str, name: str, folder: Path, variables: Mapping[str, str]
    ) -> str:
        """Submits a line for a shell, which Slurm runs again if its machine is lost, and returns Slurm's id for it.

        It runs in `folder`, which gets its output `batch.log`; Slurm's controller stores `variables`, all it gets.
        """
        mine = [f"--partition={self.partition}"] if self.partition else []
        mine += [f"--{option}={value}" for option, value in self.options.items()]
        fixed = ["--parsable", "--requeue", "--open-mode=append", "--export=ALL", f"--job-name={name}"]
        places = [f"--chdir={folder}", f"--output={folder / 'batch.log'}", f"--wrap={script}"]
        answer = self._run("sbatch", *fixed, *mine, *arguments, *places, variables=variables)
        if answer.returncode:
            raise UnsatisfiableResources(
                expected=f"Slurm to take the job with {' '.join([*mine, *arguments])}",
                found=answer.stderr.strip(),
                remedy="Ask for less, or correct the partition, account, qos or time in the address.",
            )
        self.forget()
        return answer.stdout.strip().partition(";")[0]

    def state(self, slurm_id: str) -> Seen | None:
        """Returns the job's state from the cached listing, else from Slurm; None if Slurm has no such job any more."""
        with self._lock:
            asked_at, states = self._states
            if time.monotonic() - asked_at > self._known_seconds:
                listing = self._run("squeue", "--noheader", f"--user={os.getuid()}", "--format=%i|%T|%r")
                states = seen_by_squeue(self._stdout(listing))
                self._states = (time.monotonic(), states)
        seen = states.get(slurm_id)
        return seen if seen is not None and not seen.has_ended else self.state_now(slurm_id)

    def state_now(self, slurm_id: str) -> Seen | None:
        """Returns the job's state from the controller, else from the accounting; None if neither has the job.

        The controller keeps ended jobs for some minutes; a cluster may have no accounting.
        """
        answer = self._run("scontrol", "--oneliner", "show", "job", slurm_id)
        if seen := seen_by_scontrol(answer.stdout):
            return seen
        if _FORGOTTEN not in answer.stderr:
            raise _unavailable(answer.stderr.strip())
        if shutil.which("sacct") is None:
            return None
        columns = ("--parsable2", "--noheader", "--allocations", "--format=State,ExitCode", f"--jobs={slurm_id}")
        answer = self._run("sacct", *columns)
        if answer.returncode and _NO_ACCOUNTING not in answer.stderr:
            raise _unavailable(answer.stderr.strip())
        return seen_by_sacct(answer.stdout)

    def signal(self, slurm_id: str, number: str) -> None:
        """Signals the program of a running batch job; has no effect on other jobs."""
        self._run("scancel", "--batch", f"--signal={number}", slurm_id)

    def cancel(self, slurm_id: str) -> None:
        """Ends a job, or removes it from the queue; Slurm gives its processes `KillWait` seconds."""
        self._run("scancel", slurm_id)
        self.forget()

    def requeue(self, slurm_id: str) -> None:
        self._run("scontrol", "requeue", slurm_id)
        self.forget()

    def start_now(self, slurm_id: str) -> None:
        """Removes the delay that Slurm has set before a job's start."""
        self._run("scontrol", "update", f"JobId={slurm_id}", "StartTime=now")
        self.forget()

    def release(self, slurm_id: str) -> None:
        """Releases a held job, so that it waits for a node again."""
        self._run("scontrol", "release", slurm_id)
        self.forget()

    def forget(self) -> None:
        """Drops the cached states, so that the next query runs `squeue`."""
        with self._lock:
            self._states = (-inf, {})

    def nodes(self) -> list[Node]:
        """Returns the nodes of the partition, cached for 60 s."""
        asked_at, nodes = self._nodes
        if time.monotonic() - asked_at > _NODES_KNOWN_SECONDS:
            mine = [f"--partition={self.partition}"] if self.partition else []
            answer = self._run("sinfo", "--noheader", "--exact", "--format=%D|%c|%m|%d|%P|%G", *mine)
            nodes = nodes_of(self._stdout(answer), default_only=not self.partition)
            if not nodes:
                names = self._run("sinfo", "--noheader", "--format=%R").stdout.split()
                raise BadInput(
                    expected=f"a partition of this Slurm: {', '.join(names)}",
                    found=self.partition or "none that is the default",
                    remedy="Name a partition in the address: slurm://partition.",
                )
            self._nodes = (time.monotonic(), nodes)
        return nodes

    def preempts(self) -> bool:
        name = self.partition or "--all"
        blocks = self._run("scontrol", "--oneliner", "show", "partition", name).stdout.splitlines()
        mine = [block for block in blocks if self.partition or " Default=YES " in block]
        return any("PreemptMode=" in block and "PreemptMode=OFF" not in block for block in mine)

    def _stdout(self, answer: subprocess.CompletedProcess[str]) -> str:
        if answer.returncode:
            raise _unavailable(answer.stderr.strip())
        return answer.stdout

    def _run(
        self, program: str, *arguments: str, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        path = shutil.which(program)
        if path is None:
            raise _unavailable(f"no program {program} on the PATH")
        environment = process_environment() if variables is None else {**variables_like(_CONFIGURATION), **variables}
        # Slurm would take variables of an enclosing job as options of the new job.
        environment = {name: value for name, value in environment.items() if not _OF_AN_ALLOCATION.match(name)}
        try:
            answer = subprocess.run(
                [path, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _unavailable(f"{program} had no answer after {_COMMAND_SECONDS:g} s") from None
        if answer.returncode and any(words in answer.stderr for words in _NOT_ANSWERING):
            raise _unavailable(answer.stderr.strip())
        return answer


def _unavailable(problem: str) -> BackendUnavailable:
    return BackendUnavailable(
        expected="Slurm's commands on this machine, and its controller to answer them",
        found=problem,
        remedy="Submit from a login node, or set SLURM_CONF; `sinfo` shows whether it answers.",
    )
