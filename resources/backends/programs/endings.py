"""Ends of processes: causes with their retry budgets, and the processes that are to be ended or reaped.

Standard library only, since it also runs on nodes without Assay.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Set
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from attempts import Outcome

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_OOM_WINDOW_SECONDS = 60.0  # a large process takes up to that long to die after the kernel's SIGKILL

_FROM_OUTSIDE = {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}
_FROM_OUTSIDE_IN_A_SHELL = {128 + signal.SIGKILL, 128 + signal.SIGTERM}
_KILLED = {-signal.SIGKILL, 128 + signal.SIGKILL}

Cause = Literal[
    "finished",
    "crashed",
    "out of memory",
    "out of its own disk",
    "signalled",
    "machine lost",
    "place taken",
    "data lost",
]

ENDINGS: dict[Cause, Outcome] = {
    "finished": "succeeded",
    "crashed": "failed",
    "out of memory": "failed",
    "out of its own disk": "failed",
    "signalled": "preempted",
    "machine lost": "preempted",
    "place taken": "preempted",
    "data lost": "preempted",
}
"""Retry budget that each cause counts against on every backend; backends map their own signs to causes."""
OUT_OF_MEMORY = "out of memory: killed for needing more than there was; ask for more with resources.ram, or need less"


def cause_of_exit(returncode: int, *, out_of_memory: bool = False) -> Cause:
    """Returns the cause of a process' end from its exit code (negative: signal) and from recent OOM kills."""
    if returncode == 0:
        return "finished"
    if out_of_memory and returncode in _KILLED:
        return "out of memory"
    if -returncode in _FROM_OUTSIDE or returncode in _FROM_OUTSIDE_IN_A_SHELL:
        return "signalled"
    return "crashed"


def classify_exit(returncode: int, *, out_of_memory: bool = False) -> Outcome:
    """Returns the budget that an exit code counts against; see `cause_of_exit`."""
    return ENDINGS[cause_of_exit(returncode, out_of_memory=out_of_memory)]


def outcome_of_supervised(status: dict[str, Any], *, supervisor_code: int, stopping: bool) -> Outcome:
    """Returns the outcome of a replica from the last status and the exit code of its supervisor, which retries nothing.

    A supervisor that was stopped although `stopping` is False, or killed, was ended from outside.
    """
    match status.get("status"):
        case "succeeded":
            return "succeeded"
        case "failed":
            return "preempted" if status["preemptions"] else "failed"
        case "stopped":
            return "stopped" if stopping else "preempted"
        case _:
            return "preempted" if classify_exit(supervisor_code) == "preempted" else "failed"


def counters_of(cgroups: str) -> list[Path]:
    """Returns the files that count OOM kills, the most specific first.

    Those of a control group count its own processes, for all of its limits; `/proc/vmstat` counts the whole machine.
    """
    files: list[Path] = []
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
        elif "memory" in controllers.split(","):
            files.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
            files.append(Path("/sys/fs/cgroup/memory/memory.oom_control"))  # path of its own group inside a container
    return [*files, Path("/proc/vmstat")]


def kills_counted(counters: list[Path]) -> int:
    """Returns the number of OOM kills so far, from the first readable counter; 0 if none is readable."""
    for counter in counters:
        try:
            lines = counter.read_text().splitlines()
        except OSError:
            continue
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        if counts:
            return counts[0]
    return 0


class OomWatch:
    """Detects recent OOM kills by the first readable of the `counters`, files with a line `oom_kill <count>`.

    By default it reads the file named by `ASSAY_OOM_COUNTER`, else the counters of this process's control group.
    """

    def __init__(self, counters: list[Path] | None = None) -> None:
        self._counters = _counters_of_process() if counters is None else counters
        self._before = self._latest = kills_counted(self._counters)
        self._latest_at = time.monotonic()

    def has_struck(self) -> bool:
        """Returns True if the OOM killer was active in the last 1 to 2 minutes and since this watch was created."""
        count = kills_counted(self._counters)
        if time.monotonic() - self._latest_at > _OOM_WINDOW_SECONDS:
            self._before, self._latest, self._latest_at = self._latest, count, time.monotonic()
        return count > self._before


def _counters_of_process() -> list[Path]:
    if named := os.environ.get("ASSAY_OOM_COUNTER"):
        return [Path(named)]
    try:
        return counters_of(Path("/proc/self/cgroup").read_text())
    except OSError:
        return []


def end_marked(**variables: str) -> None:
    """Kills the leftover processes of a killed supervisor, found by these variables in their environment."""
    marks = {f"{name}={value}".encode() for name, value in variables.items()}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            continue


def prctl(option: int, value: int) -> None:
    """Calls Linux' function of that name; has no effect on other systems."""
    if sys.platform == "linux" and (libc := _libc()) is not None:
        libc.prctl(option, value, 0, 0, 0)


@cache
def _libc() -> Any:
    import ctypes

    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


def wake_pipe() -> tuple[int, int]:
    """Returns the ends of a pipe, for reading and writing, that gets a byte for each signal with a handler."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    return read_fd, write_fd


def wait_for(wake_fd: int, *sources: Any, seconds: float | None) -> list[Any]:
    """Waits for a signal or a readable source, no longer than `seconds`; returns the readable sources."""
    ready, _, _ = select.select([wake_fd, *sources], [], [], seconds)
    if wake_fd in ready:
        os.read(wake_fd, 4096)
    return [source for source in ready if source != wake_fd]


def ended_children() -> Iterator[tuple[int, int]]:
    """Reaps ended children of this process; yields the id and the exit code (negative: signal) of each."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def living_processes() -> dict[int, tuple[int, int]]:
    """Returns parent and process group of each process of this machine that has not ended, by its id."""
    if not Path("/proc/self/stat").exists():
        return _living_by_ps()
    table = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            state, parent, group, threads = fields[0], int(fields[1]), int(fields[2]), int(fields[17])
        except (OSError, ValueError, IndexError):
            continue
        if state not in (b"Z", b"X") or threads > 1:  # a process can outlive its main thread
            table[int(folder.name)] = (parent, group)
    return table


def _living_by_ps() -> dict[int, tuple[int, int]]:
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="], stdout=subprocess.PIPE, text=True) as ps:
        output, _ = ps.communicate()
    rows = [line.split() for line in output.splitlines()]
    living = [row for row in rows if len(row) == 4 and not row[3].startswith("Z") and int(row[0]) != ps.pid]
    return {int(pid): (int(parent), int(group)) for pid, parent, group, _ in living}


def descendants(*, groups: Set[int] = frozenset(), spared: Callable[[int], bool] = lambda pid: False) -> set[int]:
    """Returns living descendants of this process, and members of these process groups; none below a spared process."""
    table = living_processes()
    family, known = {os.getpid()}, {os.getpid()}
    while grown := {pid for pid, (parent, group) in table.items() if parent in family or group in groups} - known:
        known |= grown
        family |= {pid for pid in grown if not spared(pid)}
    return family - {os.getpid()}


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process; has no effect if it has ended, or belongs to another user."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return
