"""Runs a command that executes model-written code, with almost no access to the machine.

    python -I -S -u run_isolated.py <specification file> COMMAND [ARGUMENT ...]

In its own namespaces it sees its own processes, the folders that the specification names, and a single network address,
to which an outside process forwards connections. Writes outside the writable folders are discarded; its output is a
pipe, of which start and end are passed on. It has no capability, no kernel keys, and resource limits. First `prepare`
runs without isolation, to fetch data. Needs Linux and the standard library.

Exit code 78 and a refusal, if the kernel allows no such namespaces and the specification requires them; 79 if all
processes were ended because together they were too many, or used too much memory.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).parent))  # -I leaves it out
from isolation_bounds import (
    DEVICE,
    NEW_USER,
    NODEV,
    NOSUID,
    REC,
    WRITABLE,
    Kernel,
    NotIsolated,
    bound_process,
    bound_tasks,
    enter,
    excess,
    is_lasting,
    make_group,
    pass_log_on,
    remove_group,
)

_NEW_NS, _NEW_UTS, _NEW_IPC = 0x20000, 0x4000000, 0x8000000
_NEW_PID, _NEW_NET = 0x20000000, 0x40000000
_RDONLY, _NOEXEC, _PRIVATE, _DETACH = 1, 8, 1 << 18, 2
_SET_PDEATHSIG = 1
_SIOCSIFADDR, _SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8916, 0x8913, 0x8914, 1
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_CONFIGURATION = (
    *("alternatives", "ca-certificates", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime"),
    *("mime.types", "nsswitch.conf", "passwd", "pki/ca-trust", "pki/tls/cert.pem", "pki/tls/certs"),
    *("ssl/cert.pem", "ssl/certs", "ssl/openssl.cnf"),  # not ssl/private, which root can read
)
_TOKENS = ("token", "stored_tokens")  # in the folder of the hub's clients
_HIDDEN = (  # in /proc: names of the user's kernel keys; memory and processes of the machine
    *("keys", "key-users", "kcore", "kpagecount", "kpageflags", "sched_debug", "slabinfo", "timer_list"),
)
_DEVICES = ("null", "full", "random", "urandom")
_SOCKET_BYTES = "4096 16384 65536"  # the kernel's default limit is per machine, and isolated code could exhaust it
_SCRATCH = "size=1g,nr_inodes=256k,mode=755"
_NOT_ALLOWED, _TOO_MUCH = 78, 79
_LARGEST_READ = 1 << 16
_LOOK_SECONDS = 0.2
_CONNECTIONS = 512  # to the endpoint at once; their buffers use the machine's memory


def main(arguments: list[str]) -> None:
    """Prepares, isolates and runs the command, and exits with its exit code."""
    specification = json.loads(Path(arguments[0]).read_text())
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # also limits descriptors in flight of the whole user
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if specification["prepare"] and (code := subprocess.run(specification["prepare"], check=False).returncode):
        sys.exit(code if code > 0 else 128 - code)
    environment = {name: value for name, value in os.environ.items() if name in specification["variables"]}
    specification |= {"command": arguments[1:], "environment": environment | specification["given"]}
    ours, theirs = socket.socketpair()
    Path(specification["root"]).mkdir(exist_ok=True)
    group = make_group(specification["memory_bytes"])
    log, log_end = os.pipe()
    child = os.fork()
    if child == 0:
        ours.close()
        os.dup2(log_end, 1)
        os.dup2(log_end, 2)
        _in_child(lambda: _isolate(specification, theirs, group))
    theirs.close()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    word, listeners, _, _ = socket.recv_fds(ours, 4096, 1)
    why = "" if listeners else word.decode(errors="replace")
    if not listeners:
        os.waitpid(child, 0)
        if not why:  # perhaps caused by another user, or by another isolated command
            os.close(log_end)
            pass_log_on(log)
            remove_group(group)
            sys.exit("isolation: its first process ended before the command began; see the line above")
        child = _without_namespaces(specification, log_end, group, why=why)
    os.close(log_end)
    passing = threading.Thread(target=pass_log_on, args=(log,), daemon=True)
    passing.start()
    passed = None if why else _pass_on(socket.socket(fileno=listeners[0]), specification["endpoint"], until=child)
    status = asyncio.run(passed) if passed else os.waitpid(child, 0)[1]
    passing.join(1.0 if why else None)  # without namespaces a leftover process may hold the pipe
    if remove_group(group):
        memory = specification["memory_bytes"] >> 20
        print(f"isolation: ended all processes: more than {memory} MiB together", flush=True)
        os._exit(_TOO_MUCH)
    _end_as(status)


def _in_child(action: Callable[[], None]) -> NoReturn:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - the boundary of a process
        print(f"isolation: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _without_namespaces(specification: dict[str, Any], log: int, group: Path | None, *, why: str) -> int:
    if specification["required"]:
        remove_group(group)
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
        enter(group)
        _in_child(lambda: _execute(specification))
    return child


def _execute(specification: dict[str, Any]) -> NoReturn:
    os.setsid()
    # The device of this mount namespace: root could change the mode of the machine's.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    bound_process(specification)
    os.closerange(3, 1 << 20)  # descriptors that parent processes left open
    command = specification["command"]
    os.execvpe(command[0], command, specification["environment"])


def _isolate(specification: dict[str, Any], outside: socket.socket, group: Path | None) -> None:
    try:
        kernel = Kernel()
        user, users = os.getuid(), os.getgid()
        kernel.call("unshare", NEW_USER | _NEW_NS | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_PID)
        kernel.call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{users} {users} 1")
        with suppress(OSError):  # /proc may be read-only; then the command can make namespaces, with the same view
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
            for name in ("tcp_rmem", "tcp_wmem"):
                Path("/proc/sys/net/ipv4", name).write_text(_SOCKET_BYTES)
        listener = _listener(specification["endpoint"])
    except (NotIsolated, OSError, AttributeError) as error:
        if not is_lasting(error):
            raise
        outside.sendall(str(error).encode())
        return
    ready, begun = os.pipe()
    first = os.fork()
    if first == 0:
        enter(group)
        _in_child(lambda: _be_first(kernel, specification, outside, listener, begun))
    for end in (listener.detach(), outside.detach(), begun):
        os.close(end)
    if os.read(ready, 1):  # from here on /proc shows the isolated processes
        _watch(first, specification)
    _end_as(os.waitpid(first, 0)[1])


def _watch(first: int, specification: dict[str, Any]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while not (ended := os.waitpid(first, os.WNOHANG))[0]:
        if problem := excess(specification):
            print(f"isolation: ended all processes: {problem}", file=sys.stderr, flush=True)
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            os._exit(_TOO_MUCH)
        signal.sigtimedwait({signal.SIGCHLD}, _LOOK_SECONDS)
    _end_as(ended[1])


def _be_first(
    kernel: Kernel, specification: dict[str, Any], outside: socket.socket, listener: socket.socket, begun: int
) -> None:
    kernel.call("prctl", _SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    folder = Path.cwd()
    try:
        _furnish(kernel, specification)
        os.chdir(folder)
        kernel.give_up_rights()
        kernel.refuse_calls()
    except (NotIsolated, OSError) as error:
        if not is_lasting(error):
            raise
        outside.sendall(str(error).encode())
        return
    os.write(begun, b"+")
    socket.send_fds(outside, [b"+"], [listener.fileno()])
    outside.close()
    listener.close()
    child = os.fork()
    if child == 0:
        bound_tasks(specification["tasks"])
        _in_child(lambda: _execute(specification))
    while (ended := os.wait())[0] != child:
        pass
    _end_as(ended[1])


def _address(endpoint: str) -> tuple[str, int]:
    address = urlsplit(endpoint)
    return address.hostname or "", address.port or (443 if address.scheme == "https" else 80)


def _listener(endpoint: str) -> socket.socket:
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


def _furnish(kernel: Kernel, specification: dict[str, Any]) -> None:
    root = Path(specification["root"])
    kernel.mount("none", Path("/"), flags=REC | _PRIVATE)
    kernel.mount("tmpfs", root, kind="tmpfs", flags=NOSUID | NODEV, data=_SCRATCH)
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
        kernel.show(f"/dev/{name}", root, attributes=DEVICE)  # read-only: root could change its mode
    (root / "dev" / "zero").symlink_to("full")  # reads alike; memory of a shared /dev/zero counts for no process
    (root / "dev" / "fd").symlink_to("/proc/self/fd")
    # Read-only: a user that is root outside counts as root for the files below /proc/sys.
    kernel.mount("proc", root / "proc", kind="proc", flags=_RDONLY | NOSUID | NODEV | _NOEXEC)
    for path in (root / "proc" / name for name in _HIDDEN):
        if path.exists():
            kernel.bind("/dev/null", path, attributes=DEVICE)
    for path in specification["reads"]:
        if not path.startswith(tuple(f"{name}/" for name in _SYSTEM)):  # else it is mounted already
            kernel.show(path, root)
    for number, path in enumerate(specification["scratch"]):
        kernel.show_with_scratch(path, root, root / ".scratch" / str(number))
        for token in (root / path.lstrip("/") / name for name in _TOKENS):
            if not token.is_dir():  # else a login in the meantime would create it
                token.touch()
                kernel.bind("/dev/null", token, attributes=DEVICE)
    for path in specification["writes"]:
        kernel.show(path, root, attributes=WRITABLE)
    os.chdir(root)
    kernel.call("pivot_root", b".", b".")
    kernel.call("umount2", b".", _DETACH)


def _end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


async def _pass_on(listener: socket.socket, endpoint: str, *, until: int) -> int:
    room = asyncio.Semaphore(_CONNECTIONS)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with room:
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
