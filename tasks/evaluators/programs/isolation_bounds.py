"""The kernel's part in isolating model-written code, for `run_isolated.py`. Standard library only.

System calls that Python lacks, and resource limits of processes, each and all together.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

NEW_USER = 0x10000000
NOSUID, NODEV, BIND, REC = 2, 4, 4096, 16384
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
READ_ONLY, DEVICE, WRITABLE = 1 | 2 | 4, 1, 2 | 4  # attributes of mounts: read-only 1, no setuid 2, no devices 4
_SET_DUMPABLE, _CAPBSET_DROP, _SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITIES_VERSION = 0x20080522
_SET_SECCOMP, _FILTER, _ALLOW, _REFUSE = 22, 2, 0x7FFF0000, 0x50000 | errno.ENOSYS
_JOIN_SESSION_KEYRING = 1
# By machine: its number in the kernel, and the numbers of keyctl, socket, clone, fcntl and mmap.
_CALLS = {"x86_64": (0xC000003E, 250, 41, 56, 72, 9), "aarch64": (0xC00000B7, 219, 198, 220, 25, 222)}
# Kernel keys, which the user's other processes share (add_key, request_key, keyctl); memory outside all processes
# (shmget, msgget, semget, memfd_create, memfd_secret); watches, limited per user (inotify_init1, fanotify_init);
# new namespaces (unshare, clone3); io_uring_setup, userfaultfd, bpf, perf_event_open, often vulnerable;
# syslog, the machine's log; io_setup and mq_open, limited per machine and per user.
_REFUSED = {
    "x86_64": (248, 249, 250, 29, 68, 64, 319, 447, 253, 294, 300, 272, 435, 425, 323, 321, 298, 103, 206, 240),
    "aarch64": (217, 218, 219, 194, 186, 190, 279, 447, 26, 262, 97, 435, 425, 282, 280, 241, 116, 0, 180),
}
_SOCKETS = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # not AF_VSOCK, which reaches a virtual machine's host
_EXHAUSTED = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETOOMANYREFS}


class NotIsolated(Exception):
    """The kernel or the container's configuration does not allow isolation."""


def is_lasting(error: Exception) -> bool:
    """Returns False for an error of a machine or user that has too many resources open at the moment."""
    return not isinstance(error, OSError) or error.errno not in _EXHAUSTED


class Kernel:
    """System calls that Python 3.11 lacks."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the C library; on a failure raises NotIsolated, or OSError if that may pass."""
        if getattr(self._libc, name)(*arguments) != 0:
            error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            shown = " ".join(part.decode(errors="replace") for part in arguments if isinstance(part, bytes))
            raise NotIsolated(f"{name} {shown}: {error.strerror}") if is_lasting(error) else error

    def mount(self, source: str, target: Path, *, kind: str = "", flags: int = 0, data: str = "") -> None:
        texts = (os.fsencode(source), os.fsencode(target), kind.encode() or None)
        self.call("mount", *texts, ctypes.c_ulong(flags), os.fsencode(data) or None)

    def show(self, path: str, root: Path, *, attributes: int = READ_ONLY) -> None:
        """Mounts a file or folder of the machine at the same path below the new root, read-only by default."""
        target = root / path.lstrip("/")
        if Path(path).is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        self.bind(path, target, attributes=attributes)

    def bind(self, path: str, target: Path, *, attributes: int) -> None:
        """Bind-mounts a file or folder over another, with attributes that may differ from those of its own mount."""
        self.mount(os.path.realpath(path), target, flags=BIND | REC)
        given = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
        place = (_AT_FDCWD, os.fsencode(target), _AT_RECURSIVE)
        self.call("syscall", _MOUNT_SETATTR, *place, given, ctypes.c_size_t(ctypes.sizeof(given)))

    def show_with_scratch(self, path: str, root: Path, scratch: Path) -> None:
        """Mounts a folder so that changes to it are discarded."""
        target = root / path.lstrip("/")
        for folder in (target, scratch / "changed", scratch / "work"):
            folder.mkdir(parents=True, exist_ok=True)
        lower, upper, work = (
            str(folder).replace("\\", r"\\").replace(",", r"\,").replace(":", r"\:")
            for folder in (os.path.realpath(path), scratch / "changed", scratch / "work")
        )
        data = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
        self.mount("overlay", target, kind="overlay", flags=NOSUID | NODEV, data=data)

    def give_up_rights(self) -> None:
        self.call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        with suppress(NotIsolated):  # raised after the last capability of this kernel
            for number in range(64):
                self.call("prctl", _CAPBSET_DROP, number, 0, 0, 0)
        self.call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)())
        self.call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)  # hides our variables and memory from the command

    def refuse_calls(self) -> None:
        """Leaves the user's session keyring, and makes the kernel refuse some system calls from now on.

        Raises NotIsolated if the system calls of this machine are unknown, or the kernel has no such filter.
        """
        if platform.machine() not in _CALLS:
            raise NotIsolated(f"no list of system calls of {platform.machine()}")
        machine, keyctl, sockets, clone, fcntl, mmap = _CALLS[platform.machine()]
        self._libc.syscall(keyctl, _JOIN_SESSION_KEYRING, None)  # fails where the kernel has no keys
        # First refuses calls of other machine types, and of a second numbering such as x32's.
        lines = [(0x20, 0, 0, 4), (0x15, 1, 0, machine), (0x06, 0, 0, _REFUSE), (0x20, 0, 0, 0)]
        lines += [(0x35, 0, 1, 1 << 30), (0x06, 0, 0, _REFUSE)]
        for number in _REFUSED[platform.machine()]:
            lines += [(0x15, 0, 1, number), (0x06, 0, 0, _REFUSE)]
        for number, place, mask, value in (
            (clone, 16, NEW_USER, NEW_USER),
            (fcntl, 24, ~2 & 0xFFFFFFFF, 1024),  # leases, which block others that open the file, and watches (1026)
            (mmap, 40, 0x21, 0x21),  # shared anonymous memory, which counts for no process
        ):
            lines += [(0x15, 0, 5, number), (0x20, 0, 0, place), (0x54, 0, 0, mask), (0x15, 0, 1, value)]
            lines += [(0x06, 0, 0, _REFUSE), (0x06, 0, 0, _ALLOW)]
        lines += [(0x15, 0, len(_SOCKETS) + 2, sockets), (0x20, 0, 0, 16)]
        lines += [(0x15, len(_SOCKETS) - place, 0, family) for place, family in enumerate(_SOCKETS)]
        lines += [(0x06, 0, 0, _REFUSE), (0x06, 0, 0, _ALLOW)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
        program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
        self.call("prctl", _SET_SECCOMP, _FILTER, program, 0, 0)


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
