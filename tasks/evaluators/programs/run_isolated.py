"""Runs a command that executes code which a model wrote, where that code can reach next to nothing.

    python -I -S -u run_isolated.py <specification file> COMMAND [ARGUMENT ...]

The command gets namespaces of its own: it sees its own processes, the folders that the specification names, and of
the network one address, whose connections a process outside passes on. What it writes anywhere but into the writable
folders is thrown away. Its output is a pipe, of which start and end are passed on. It has no capability, no kernel
keys, and bounds. First `prepare` is run as this process would, to fetch data. Needs Linux and the standard library.

Exit code 78 and a refusal, if the kernel allows no such namespaces and the specification wants them; 79 if all
processes were ended for having too many, or too much memory, together.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).parent))  # -I leaves it out
from isolation_bounds import bound_process, bound_tasks, excess, pass_log_on

_NEW_NS, _NEW_UTS, _NEW_IPC = 0x20000, 0x4000000, 0x8000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE, _DETACH = 1, 2, 4, 8, 4096, 16384, 1 << 18, 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_READ_ONLY, _DEVICE, _WRITABLE = 1 | 2 | 4, 1, 2 | 4  # attributes of mounts: read-only 1, no setuid 2, no devices 4
_SET_PDEATHSIG, _SET_DUMPABLE, _CAPBSET_DROP, _SET_NO_NEW_PRIVS = 1, 4, 24, 38
_SIOCSIFADDR, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8916, 0x8913, 0x8914, 1
_CAPABILITIES_VERSION = 0x20080522
_SET_SECCOMP, _FILTER, _ALLOW, _REFUSE = 22, 2, 0x7FFF0000, 0x50000 | errno.ENOSYS
_JOIN_SESSION_KEYRING = 1
# By machine: its number for the kernel, those of keyctl and socket, and of calls that are refused: kernel keys, which
# the user's other processes share; memory that is no process's (shmget, msgget, semget, memfd_create, memfd_secret);
# and io_uring_setup, userfaultfd, bpf, perf_event_open, which harnesses do not need and kernels often had holes in.
_CALLS = {
    "x86_64": (0xC000003E, 250, 41, (248, 249, 250, 29, 68, 64, 319, 447, 425, 323, 321, 298)),
    "aarch64": (0xC00000B7, 219, 198, (217, 218, 219, 194, 186, 190, 279, 447, 425, 282, 280, 241)),
}
_SOCKETS = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # not AF_VSOCK, which reaches a virtual machine's host
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_CONFIGURATION = (
    *("alternatives", "ca-certificates", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime"),
    *("mime.types", "nsswitch.conf", "passwd", "pki", "ssl"),
)
_TOKENS = ("token", "stored_tokens")  # in the folder of the hub's clients
_HIDDEN = ("keys", "key-users")  # in /proc, names of the user's kernel keys
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SCRATCH_BYTES = 1 << 30
_NOT_ALLOWED, _TOO_MUCH = 78, 79
_LARGEST_READ = 1 << 16
_LOOK_SECONDS = 0.2


class NotIsolated(Exception):
    """The kernel, or whoever runs this container, does not allow it."""


class Kernel:
    """System calls that Python 3.11 does not have."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls it.

        Raises:
            NotIsolated: it fails.
        """
        if getattr(self._libc, name)(*arguments) != 0:
            error = os.strerror(ctypes.get_errno())
            shown = " ".join(part.decode(errors="replace") for part in arguments if isinstance(part, bytes))
            raise NotIsolated(f"{name} {shown}: {error}")

    def mount(self, source: str, target: Path, *, kind: str = "", flags: int = 0, data: str = "") -> None:
        """Mounts something."""
        texts = (os.fsencode(source), os.fsencode(target), kind.encode() or None)
        self.call("mount", *texts, ctypes.c_ulong(flags), os.fsencode(data) or None)

    def show(self, path: str, root: Path, *, attributes: int = _READ_ONLY) -> None:
        """Shows a file or folder of the machine at the same place below the new root, read-only by default."""
        target = root / path.lstrip("/")
        if Path(path).is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        self.mount(os.path.realpath(path), target, flags=_BIND | _REC)
        given = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
        place = (_AT_FDCWD, os.fsencode(target), _AT_RECURSIVE)
        self.call("syscall", _MOUNT_SETATTR, *place, given, ctypes.c_size_t(ctypes.sizeof(given)))

    def show_with_scratch(self, path: str, root: Path, scratch: Path) -> None:
        """Shows a folder whose changes are thrown away."""
        target = root / path.lstrip("/")
        for folder in (target, scratch / "changed", scratch / "work"):
            folder.mkdir(parents=True, exist_ok=True)
        lower, upper, work = (
            str(folder).replace("\\", r"\\").replace(",", r"\,").replace(":", r"\:")
            for folder in (os.path.realpath(path), scratch / "changed", scratch / "work")
        )
        data = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
        self.mount("overlay", target, kind="overlay", flags=_NOSUID | _NODEV, data=data)

    def give_up_rights(self) -> None:
        """Gives up every capability, for this process and all that it starts."""
        self.call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        with suppress(NotIsolated):  # raised behind the last that this kernel knows
            for number in range(64):
                self.call("prctl", _CAPBSET_DROP, number, 0, 0, 0)
        self.call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)())
        self.call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)  # our own variables and memory, which the command could read

    def refuse_calls(self) -> None:
        """Leaves the user's session keyring, and has the kernel refuse some system calls from here on.

        Raises:
            NotIsolated: the calls of such a machine are not known, or the kernel has no such filter.
        """
        if platform.machine() not in _CALLS:
            raise NotIsolated(f"no list of system calls of {platform.machine()}")
        machine, keyctl, sockets, refused = _CALLS[platform.machine()]
        self._libc.syscall(keyctl, _JOIN_SESSION_KEYRING, None)  # fails where the kernel has no keys
        lines = [(0x20, 0, 0, 4), (0x15, 1, 0, machine), (0x06, 0, 0, _REFUSE), (0x20, 0, 0, 0)]  # of that machine
        lines += [(0x35, 0, 1, 1 << 30), (0x06, 0, 0, _REFUSE)]  # no second way to count calls, as x32's
        for number in refused:
            lines += [(0x15, 0, 1, number), (0x06, 0, 0, _REFUSE)]
        lines += [(0x15, 0, len(_SOCKETS) + 2, sockets), (0x20, 0, 0, 16)]
        lines += [(0x15, len(_SOCKETS) - place, 0, family) for place, family in enumerate(_SOCKETS)]
        lines += [(0x06, 0, 0, _REFUSE), (0x06, 0, 0, _ALLOW)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
        program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
        self.call("prctl", _SET_SECCOMP, _FILTER, program, 0, 0)


def main(arguments: list[str]) -> None:
    """Prepares, isolates, runs, and ends as the command ended."""
    specification = json.loads(Path(arguments[0]).read_text())
    command = arguments[1:]
    if specification["prepare"] and (code := subprocess.run(specification["prepare"], check=False).returncode):
        sys.exit(code if code > 0 else 128 - code)
    environment = {
        name: value for name, value in os.environ.items() if name in specification["variables"]
    } | specification["given"]
    ours, theirs = socket.socketpair()
    root = Path(specification["root"])
    root.mkdir(exist_ok=True)
    log, log_end = os.pipe()
    child = os.fork()
    if child == 0:
        ours.close()
        os.dup2(log_end, 1)
        os.dup2(log_end, 2)
        _in_child(lambda: _isolate(specification, command, environment, theirs, root))
    theirs.close()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    word, listeners, _, _ = socket.recv_fds(ours, 4096, 1)
    why = "" if listeners else word.decode(errors="replace") or "it was killed"
    if why:
        os.waitpid(child, 0)
        child = _without_namespaces(specification, command, environment, log_end, why=why)
    os.close(log_end)
    passing = threading.Thread(target=pass_log_on, args=(log,), daemon=True)
    passing.start()
    passed = None if why else _pass_on(socket.socket(fileno=listeners[0]), specification["endpoint"], until=child)
    status = asyncio.run(passed) if passed else os.waitpid(child, 0)[1]
    passing.join(1.0 if why else None)  # without namespaces a process that was left may hold the pipe
    _end_as(status)


def _in_child(action: Callable[[], None]) -> NoReturn:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - the boundary of a process
        print(f"isolation: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _without_namespaces(
    specification: dict[str, Any], command: list[str], environment: dict[str, str], log: int, *, why: str
) -> int:
    if specification["required"]:
        refusal = {
            "kind": "BadInput",
            "expected": "a kernel that lets this user make namespaces, to run code that the model wrote in them",
            "found": why,
            "remedy": "Allow them (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, the "
            "container's seccomp profile), or set ASSAY_CODE_ISOLATION=where_possible on a machine that may be put "
            "at risk",
        }
        Path(specification["refusal"]).write_text(json.dumps(refusal))
        print(f"refused: not isolated: {why}", file=sys.stderr)
        sys.exit(_NOT_ALLOWED)
    print(f"warning: code that the model wrote is NOT isolated: {why}", file=sys.stderr, flush=True)
    child = os.fork()
    if child == 0:
        os.dup2(log, 1)
        os.dup2(log, 2)
        _in_child(lambda: _execute(specification, command, environment))
    return child


def _execute(specification: dict[str, Any], command: list[str], environment: dict[str, str]) -> NoReturn:
    os.setsid()
    bound_process(specification)
    os.execvpe(command[0], command, environment)


def _isolate(
    specification: dict[str, Any],
    command: list[str],
    environment: dict[str, str],
    outside: socket.socket,
    root: Path,
) -> None:
    """Makes the namespaces, and tells the process outside the socket whose connections it is to pass on, or why not."""
    try:
        kernel = Kernel()
        user, group = os.getuid(), os.getgid()
        kernel.call("unshare", _NEW_USER | _NEW_NS | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_PID)
        kernel.call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        with suppress(OSError):  # /proc may be read-only; then namespaces can be made in there, with the same view
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
        listener = _listener(specification["endpoint"])
    except (NotIsolated, OSError, AttributeError) as error:
        outside.sendall(str(error).encode())
        return
    first = os.fork()
    if first == 0:
        _in_child(lambda: _be_first(kernel, specification, command, environment, outside, listener, root))
    listener.close()
    outside.close()
    _end_as(os.waitpid(first, 0)[1])


def _be_first(
    kernel: Kernel,
    specification: dict[str, Any],
    command: list[str],
    environment: dict[str, str],
    outside: socket.socket,
    listener: socket.socket,
    root: Path,
) -> None:
    """Is the first process in there: with it, all others end."""
    kernel.call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    folder = Path.cwd()
    try:
        _furnish(kernel, specification, root)
        os.chdir(folder)
        kernel.give_up_rights()
        kernel.refuse_calls()
    except (NotIsolated, OSError) as error:
        outside.sendall(str(error).encode())
        return
    socket.send_fds(outside, [b"+"], [listener.fileno()])
    outside.close()
    listener.close()
    child = os.fork()
    if child == 0:
        bound_tasks(specification["tasks"])
        _in_child(lambda: _execute(specification, command, environment))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    looked = 0.0
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            _end_as(status)
        if pid == 0:
            signal.sigtimedwait({signal.SIGCHLD}, _LOOK_SECONDS)
        if time.monotonic() > looked + _LOOK_SECONDS:
            if found := excess(specification["processes"], specification["memory_bytes"]):
                print(f"isolation: ended all processes: {found}", file=sys.stderr, flush=True)
                os._exit(_TOO_MUCH)
            looked = time.monotonic()


def _address(endpoint: str) -> tuple[str, int]:
    address = urlsplit(endpoint)
    return address.hostname or "", address.port or (443 if address.scheme == "https" else 80)


def _listener(endpoint: str) -> socket.socket:
    """Listens, in the new network, at the endpoint's own address; a name is one of this machine there."""
    host, port = _address(endpoint)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        up = struct.unpack("16sh14x", flags)[1] | _IFF_UP
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", up))
        own = "127.0.0.1"
        with suppress(OSError):
            number = socket.inet_aton(host)  # fails for a name
            if number[0] != 127:
                request = struct.pack("16sHH4s8x", b"lo:0", socket.AF_INET, 0, number)
                fcntl.ioctl(control, _SIOCSIFADDR, request)
            own = host
    return socket.create_server((own, port), backlog=256)


def _furnish(kernel: Kernel, specification: dict[str, Any], root: Path) -> None:
    """Builds a root that holds the system, what may be read, and the writable folders; then nothing else is there."""
    kernel.mount("none", Path("/"), flags=_REC | _PRIVATE)
    kernel.mount("tmpfs", root, kind="tmpfs", flags=_NOSUID | _NODEV, data=f"size={_SCRATCH_BYTES},mode=755")
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            (root / path.name).symlink_to(path.readlink())
        elif path.is_dir():
            kernel.show(name, root)
    for path in (Path("/etc") / name for name in _CONFIGURATION):
        if path.exists():
            kernel.show(str(path), root)
    host, _ = _address(specification["endpoint"])
    (root / "etc" / "hosts").write_text(f"127.0.0.1 localhost {host}\n")
    for folder in ("dev/shm", "proc", "tmp"):
        (root / folder).mkdir(parents=True)
        (root / folder).chmod(0o1777)
    for name in _DEVICES:
        kernel.show(f"/dev/{name}", root, attributes=_DEVICE)  # read-only: root could change its mode
    (root / "dev" / "fd").symlink_to("/proc/self/fd")
    # Read-only: to root's files below /proc/sys, whoever is root outside is root in here.
    kernel.mount("proc", root / "proc", kind="proc", flags=_RDONLY | _NOSUID | _NODEV | _NOEXEC)
    for path in (root / "proc" / name for name in _HIDDEN):
        if path.exists():
            kernel.mount("/dev/null", path, flags=_BIND)
    for path in specification["reads"]:
        if not path.startswith(tuple(f"{name}/" for name in _SYSTEM)):  # as an interpreter of the system is
            kernel.show(path, root)
    for number, path in enumerate(specification["scratch"]):
        kernel.show_with_scratch(path, root, root / ".scratch" / str(number))
        for token in (root / path.lstrip("/") / name for name in _TOKENS):
            if token.is_file():
                kernel.mount("/dev/null", token, flags=_BIND)
    for path in specification["writes"]:
        kernel.show(path, root, attributes=_WRITABLE)
    os.chdir(root)
    kernel.call("pivot_root", b".", b".")
    kernel.call("umount2", b".", _DETACH)


def _end_as(status: int) -> NoReturn:
    """Ends as a child has, a signal as shells write it: the first process of a namespace cannot die of its own."""
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


async def _pass_on(listener: socket.socket, endpoint: str, *, until: int) -> int:
    """Passes connections on to the endpoint until the child has ended; returns its status."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*_address(endpoint))
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        for end in (writer, far_writer):
            end.close()

    await asyncio.start_server(connected, sock=listener)
    return (await asyncio.to_thread(os.waitpid, until, 0))[1]


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while content := await reader.read(_LARGEST_READ):
            writer.write(content)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


if __name__ == "__main__":
    main(sys.argv[1:])
