"""The processes of an evaluation, identified by their command lines and parents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from faults.scenarios.processes import command_line, descendants, parent, state_of

_SUPERVISOR = "programs/supervise.py"
_FORK_SERVER = "programs/fork_server.py"
_STUB = "programs/run_forked.py"
_ENGINE_PROGRAM = "serve_vllm.py"
_HARNESS_PROGRAM = "run_lm_eval.py"


@dataclass(frozen=True)
class Process:
    """A running process, with its arguments joined to a text."""

    pid: int
    parent: int
    executes: str


class Tree:
    """A snapshot of all processes below a root."""

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self.processes = processes

    @classmethod
    def below(cls, root: int) -> Tree:
        processes = {
            pid: Process(pid, parent(pid), " ".join(command_line(pid)))
            for pid in descendants(root)
            if state_of(pid) not in ("", "Z")
        }
        return cls(MappingProxyType(processes))

    def executing(self, *words: str, without: tuple[str, ...] = ()) -> list[int]:
        """Returns the processes with all of `words` in their arguments and none of `without`."""
        return [
            process.pid
            for process in self.processes.values()
            if all(word in process.executes for word in words) and not any(word in process.executes for word in without)
        ]

    def children(self, pids: list[int]) -> list[int]:
        return [process.pid for process in self.processes.values() if process.parent in pids]

    def fork_servers(self, program: str) -> list[int]:
        """Returns servers that fork a program; its runs are their children with the same arguments."""
        same = self.executing(_FORK_SERVER, program)
        return [pid for pid in same if self.processes[pid].parent not in same]

    def runs(self, program: str) -> list[int]:
        """Returns runs of a program: forked, or started cold."""
        forked = self.children(self.children(self.fork_servers(program)))
        return forked or self.executing(program, without=(_FORK_SERVER, _SUPERVISOR, _STUB))


ROLES: Mapping[str, Callable[[Tree], list[int]]] = {
    "owner": lambda tree: tree.executing("bin/assay", "evaluate"),
    "Prefect's server": lambda tree: tree.executing("prefect.server.api.server", "create_app", without=(_SUPERVISOR,)),
    "proxy": lambda tree: tree.executing("-m pools.proxy", without=(_SUPERVISOR,)),
    "agent": lambda tree: tree.executing("run_call.py", "jobs/replica-", without=(_SUPERVISOR,)),
    "engine's server": lambda tree: tree.runs(_ENGINE_PROGRAM),
    "engine's core": lambda tree: tree.children(tree.runs(_ENGINE_PROGRAM)),
    "engine's fork server": lambda tree: tree.fork_servers(_ENGINE_PROGRAM),
    "harness": lambda tree: tree.runs(_HARNESS_PROGRAM),
    "harness' fork server": lambda tree: tree.fork_servers(_HARNESS_PROGRAM),
    "supervisor": lambda tree: tree.executing(_SUPERVISOR),
    "subreaper": lambda tree: tree.children(
        [*tree.fork_servers(_ENGINE_PROGRAM), *tree.fork_servers(_HARNESS_PROGRAM)]
    ),
    "stub": lambda tree: tree.executing(_STUB, without=(_SUPERVISOR,)),
    "worker": lambda tree: tree.executing("prefect", "worker", "start"),
    "flow run": lambda tree: tree.executing("prefect.engine"),
}
"""Functions that find processes, by name; each may find several."""

DEPLOYED = ("worker", "flow run")
"""Processes that exist only with a deployment."""
