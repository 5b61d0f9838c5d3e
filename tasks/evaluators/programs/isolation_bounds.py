"""Resource limits of processes that run model-written code, each and all together. Standard library only."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_LARGEST_READ = 1 << 16
_LOG_BYTES, _LOG_END_BYTES = 16 << 20, 1 << 16
_EXACT_SECONDS = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_GROUPS = Path("/sys/fs/cgroup")


def pass_log_on(log: int) -> None:
    """Passes on the first 16 MiB of a log, and when it is complete, the last 64 KiB of the rest."""
    passed = left_out = 0
    end = b""
    while block := os.read(log, _LARGEST_READ):
        start = block[: _LOG_BYTES - passed]
        passed, left_out = passed + len(start), left_out + len(block) - len(start)
        end = (end + block[len(start) :])[-_LOG_END_BYTES:]
        with suppress(OSError):  # on a full disk the command must end, not block
            sys.stdout.buffer.write(start)
            sys.stdout.buffer.flush()
    if left_out:
        note = f"\nisolation: {left_out - len(end)} bytes of the log are left out here\n"
        sys.stdout.buffer.write(note.encode() + end)
        sys.stdout.buffer.flush()


def bound_tasks(tasks: int) -> None:
    """Limits processes and threads: counted per user and namespace since Linux 5.14; never limits root."""
    if tuple(map(int, platform.release().split(".")[:2])) >= (5, 14):
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))


def bound_process(specification: dict[str, Any]) -> None:
    """Limits memory, processor time and file sizes of this process, and of each child."""
    for kind, bound in (
        (resource.RLIMIT_AS, specification["memory_bytes"]),
        (resource.RLIMIT_CPU, specification["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, specification["file_bytes"]),
        (resource.RLIMIT_NOFILE, specification["open_files"]),  # each pipe holds 8 KiB outside all processes
        (resource.RLIMIT_SIGPENDING, 4096),  # counted per user, like locked memory
        (resource.RLIMIT_MEMLOCK, 8 << 20),
        (resource.RLIMIT_CORE, 1),  # with 0 the kernel would start a core dump handler, as root
    ):
        _, most = resource.getrlimit(kind)
        bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
        resource.setrlimit(kind, (bound, bound))


def make_group(memory_bytes: int) -> Path | None:
    """Creates a control group with a memory limit; None if cgroup v2 or its memory controller is not this user's."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((_GROUPS / line[4:] for line in lines if line.startswith("0::/")), _GROUPS)
    for parent in (folder for folder in (own, *own.parents) if (folder / "cgroup.subtree_control").exists()):
        group = parent / f"assay-cage-{os.getpid()}"
        for left in parent.glob("assay-cage-*"):
            with suppress(OSError):  # leftover of a killed process; the kernel removes empty groups only
                left.rmdir()
        try:
            group.mkdir()
            (group / "memory.max").write_text(str(memory_bytes))
            (group / "memory.oom.group").write_text("1")
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        with suppress(OSError):  # a kernel without swap
            (group / "memory.swap.max").write_text("0")
        return group
    return None


def enter(group: Path | None) -> None:
    """Moves this process into a control group; without a group, only the watcher limits the total memory."""
    with suppress(OSError):
        if group:
            (group / "cgroup.procs").write_text("0")


def remove_group(group: Path | None) -> bool:
    """Removes the control group of ended processes; returns True if the kernel killed them at its limit."""
    try:
        events = (group / "memory.events").read_text().split() if group else []
        killed = "oom_kill" in events and events[events.index("oom_kill") + 1] != "0"
        if group:
            group.rmdir()
    except OSError:
        return False
    return killed


def excess(specification: dict[str, Any]) -> str | None:
    """Returns the limit that the processes in /proc exceed together, formatted; None if none."""
    processes = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    for kind, count, most in (  # cheapest first: inspecting each of too many processes is slow
        ("", lambda: len(processes), specification["processes"]),
        ("threads ", lambda: sum(map(_threads, processes)), specification["tasks"]),
        ("sockets ", _sockets, specification["open_files"]),
    ):
        if (number := count()) > most:
            return f"{number} {kind}at once, and {most} are allowed"
    memory_bytes = specification["memory_bytes"]
    used = sum(_memory_bytes(path, exactly=False) for path in processes)
    if used > memory_bytes:  # counts shared pages of forked processes for each; the exact number is slow
        until = time.monotonic() + _EXACT_SECONDS
        used = sum(_memory_bytes(path, exactly=time.monotonic() < until) for path in processes)
    return None if used <= memory_bytes else f"up to {used >> 20} MiB together, and {memory_bytes >> 20} are allowed"


def _threads(process: Path) -> int:
    try:
        return (process / "task").stat().st_nlink - 2
    except OSError:
        return 0  # it has ended


def _sockets() -> int:
    try:
        return int(Path("/proc/1/net/sockstat").read_text().split()[2])
    except OSError:
        return 0


def _memory_bytes(process: Path, *, exactly: bool) -> int:
    try:
        if exactly:
            with suppress(PermissionError):  # the process is not readable
                lines = (process / "smaps_rollup").read_text().splitlines()
                return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
        _, resident, shared, *_ = (process / "statm").read_text().split()
        return (int(resident) - int(shared)) * _PAGE_BYTES
    except OSError:
        return 0  # it has ended
