"""Attempts of hostile code to leave or reach something, each in a process of its own.

    python cage_attacks.py OUTPUT OUTSIDE PORT OWNER_PID READ_ONLY,… SCRATCH,… [ATTACK]

Writes into `outcomes.json` how far each attempt got: an error, or its result. Needs the standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUTPUT, OUTSIDE, PORT, OWNER, READ_ONLY, SCRATCH = (sys.argv[1:7] + [""] * 6)[:6]
LEFT = Path(OUTPUT or "/nowhere")
TARGET = f"{OUTSIDE}/site.pth"
LIBC = ctypes.CDLL(None, use_errno=True)
KEYCTL, ADD_KEY, MEMFD, IO_URING, SHMGET, BPF, INOTIFY, CLONE, SYSLOG, IO_SETUP, MQ_OPEN = (
    (250, 248, 319, 425, 29, 321, 294, 56, 103, 206, 240)
    if platform.machine() == "x86_64"
    else (219, 217, 279, 425, 194, 280, 26, 220, 116, 0, 180)
)


def call(number: int, *arguments: object) -> int:
    if (result := LIBC.syscall(number, *arguments)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def function(name: str, *arguments: object) -> int:
    if (result := getattr(LIBC, name)(*arguments)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def write(path: str | Path, text: str = "import os; os.system('id')\n") -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return str(path)


def link(name: str, target: str) -> None:
    path = LEFT / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def connect(family: int, address: Any) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(2)
        connection.connect(address)
    return "connected"


def daemon(action: Callable[[], None]) -> None:
    """Runs an action in a process that has left its parent and session."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            action()
        os._exit(0)


def toggle() -> None:
    """Exchanges a file for a link and back until the process ends."""
    while True:
        link("swapped.json", TARGET)
        (LEFT / "swapped.json").unlink()
        write(LEFT / "swapped.json", "{}")


def write_late() -> None:
    while True:
        write(LEFT / "late", str(time.time()))
        write(LEFT / "late.log", "late")


def keep(name: str, text: str, mode: int) -> None:
    os.chmod(write(LEFT / name, text), mode)


def deep(levels: int) -> None:
    os.chdir(LEFT)
    for _ in range(levels):
        os.mkdir("d")
        os.chdir("d")


def bound_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


def crash() -> int:
    if (pid := os.fork()) == 0:
        os.chdir(LEFT)
        os.kill(os.getpid(), signal.SIGSEGV)
    return int(os.WCOREDUMP(os.waitpid(pid, 0)[1]) or bool(list(LEFT.glob("core*")))) or fail()


def fail() -> int:
    raise PermissionError("nothing came of it")


def many(count: int) -> None:
    (LEFT / "many").mkdir()
    for number in range(count):
        os.close(os.open(LEFT / "many" / str(number), os.O_CREAT | os.O_WRONLY))


LEAVES: dict[str, Callable[[], object]] = {
    "log is a link": lambda: link("harness.log", TARGET),
    "log is a chain of links": lambda: (link("harness.log.1", TARGET), link("work/harness.log", "../harness.log.1")),
    "record is a link": lambda: link("record.json", f"{OUTSIDE}/record.json"),
    "samples are a link": lambda: link("samples.jsonl.gz", TARGET),
    "result is a link": lambda: link("result.json", f"{OUTSIDE}/id_rsa"),
    "relative link": lambda: link("up.json", "../" * 30 + f"{OUTSIDE}/id_rsa"),
    "link loop": lambda: (link("loop", "loop2"), link("loop2", "loop")),
    "folder is an absolute link": lambda: link("absolute", OUTSIDE),
    "folder is a relative link": lambda: link("relative", "../" * 30 + OUTSIDE),
    "link through /proc": lambda: link("proc", f"/proc/{OWNER}/cwd/id_rsa"),
    "link to own descriptor": lambda: link("fd", "/proc/self/fd/0"),
    "link to nothing": lambda: link("dangling", f"{OUTSIDE}/new"),
    "swapped while it runs": lambda: daemon(toggle),
    "hard links": lambda: [os.link(write(LEFT / "hard" / "0"), LEFT / "hard" / str(n)) for n in (1, 2)],
    "FIFO for the refusal": lambda: os.mkfifo(LEFT / "refused.json"),
    "FIFO for the plan": lambda: os.mkfifo(LEFT / "plan.json"),
    "FIFO for results": lambda: ((LEFT / "fifos").mkdir(), os.mkfifo(LEFT / "fifos" / "results_1.json")),
    "socket": lambda: bound_socket(LEFT / "socket"),
    "device 0:0": lambda: os.mknod(LEFT / "whiteout", stat.S_IFCHR | 0o666, 0),
    "folder for a result": lambda: (LEFT / "results.json" / "x").mkdir(parents=True),
    "setuid shell": lambda: keep("setuid", "#!/bin/sh\n", 0o6777),
    "sticky and open folder": lambda: (LEFT / "open").mkdir() or os.chmod(LEFT / "open", 0o1777),
    "file without rights": lambda: keep("closed", "x", 0),
    "folder without rights": lambda: keep("closed folder/x", "x", 0) or os.chmod(LEFT / "closed folder", 0),
    "sparse gigabyte": lambda: os.truncate(write(LEFT / "sparse"), (1 << 30)),
    "many names": lambda: many(20_000),
    "deep tree": lambda: deep(3000),
    "newline in a name": lambda: write(LEFT / "a\nb"),
    "escape in a name": lambda: write(LEFT / "\x1b]52;c;aWQ=\x07"),
    "name that is not UTF-8": lambda: os.close(os.open(os.fsencode(LEFT) + b"/\xff\xfe", os.O_CREAT)),
    "name of 255 bytes": lambda: write(LEFT / ("n" * 255)),
    "name like an option": lambda: write(LEFT / "-rf"),
    "specification of the cage": lambda: write(LEFT / "isolation.json", "{}"),
    "specification in capitals": lambda: write(LEFT / "ISOLATION.JSON", "{}"),
    "site and hooks": lambda: [write(LEFT / name) for name in ("x.pth", "sitecustomize.py", "conftest.py", ".bashrc")],
    "repository": lambda: [
        write(LEFT / "sub" / folder / name, f"[core]\n\tworktree = .\n\tfsmonitor = touch {OUTSIDE}/ran\n")
        for folder in (".git", ".GIT", "bare")
        for name in ("HEAD", "config", "objects/info/x", "refs/x")
    ],
    "extended attribute": lambda: os.setxattr(write(LEFT / "attributed"), "user.key", b"x"),
    "lock and lease": lambda: fcntl.flock(os.open(write(LEFT / "locked"), os.O_RDWR), fcntl.LOCK_EX),
    "write outside": lambda: write(f"{OUTSIDE}/written"),
    "write into a temporary folder": lambda: write("/tmp/left"),
    "write into shared memory": lambda: write(f"/dev/shm/assay-{OWNER}"),
    "cgroup": lambda: write("/sys/fs/cgroup/x/cgroup.procs", "0"),
    "end of the first process": lambda: os.kill(1, signal.SIGKILL),
    "daemon": lambda: daemon(write_late),
    "log that takes long to search": lambda: os.write(1, b"Requesting API:" * 20_000 + b"1" * 500_000 + b"\n"),
    "escapes in the log": lambda: os.write(1, b"\x1b]0;title\x07\x1b[2J\r\n"),
}
"""Attempts that may succeed inside the isolation and must have no effect outside."""
REACHES: dict[str, Callable[[], object]] = {
    "write next to the output": lambda: os.rename(LEFT, LEFT.with_name("moved")),
    "block device": lambda: os.mknod(LEFT / "disk", stat.S_IFBLK | 0o666, os.makedev(8, 0)),
    "memory device": lambda: os.mknod(LEFT / "mem", stat.S_IFCHR | 0o666, os.makedev(1, 1)),
    "file capability": lambda: os.setxattr(
        write(LEFT / "able"), "security.capability", bytes.fromhex("00000002" + "00" * 16)
    ),
    "immutable file": lambda: fcntl.ioctl(
        os.open(write(LEFT / "fixed"), os.O_RDONLY), 0x40086602, (16).to_bytes(8, "little")
    ),
    "huge file": lambda: os.truncate(write(LEFT / "huge"), 1 << 40),
    "log cut": lambda: os.ftruncate(1, 0),
    "log opened again": lambda: os.lseek(os.open("/proc/self/fd/1", os.O_RDWR), 0, 0),
    "mode of a device": lambda: os.chmod("/dev/null", 0o666),
    "mode of standard input": lambda: os.fchmod(0, 0o666),
    "mode of a hidden file": lambda: os.chmod("/proc/keys", 0o666),
    "mode of a hidden token": lambda: os.chmod(f"{SCRATCH.split(',')[0]}/token", 0o666),
    "hidden token": lambda: Path(f"{SCRATCH.split(',')[0]}/token").read_text() or fail(),
    "environment": lambda: [write(f"{path}/x.pth") for path in READ_ONLY.split(",")],
    "system": lambda: write("/usr/lib/x.pth"),
    "system's mode": lambda: os.chmod("/usr/bin/env", 0o6755),
    "configuration": lambda: write("/etc/passwd"),
    "kernel setting": lambda: write("/proc/sys/kernel/core_pattern", "|/bin/sh"),
    "sysrq": lambda: write("/proc/sysrq-trigger", "h"),
    "ptrace": lambda: function("ptrace", 16, int(OWNER), 0, 0),
    "ptrace of the first process": lambda: function("ptrace", 16, 1, 0, 0),
    "root of the owner": lambda: list((Path("/proc") / OWNER / "root").iterdir()),
    "root of the first process": lambda: list((Path("/proc/1") / "root").iterdir()),
    "descriptors of the first process": lambda: [os.open(path, os.O_RDONLY) for path in Path("/proc/1/fd").iterdir()],
    "variables of the first process": lambda: Path("/proc/1/environ").read_bytes() or fail(),
    "memory of the first process": lambda: os.open("/proc/1/mem", os.O_RDWR),
    "descriptor of a process": lambda: call(438, os.pidfd_open(1), 0, 0),
    "namespaces of the first process": lambda: function("setns", os.open("/proc/1/ns/mnt", os.O_RDONLY), 0),
    "memory of the owner": lambda: Path(f"/proc/{OWNER}/mem").read_bytes(),
    "signal to the owner": lambda: os.kill(int(OWNER), 0),
    "signal to the group 0 outside": lambda: os.killpg(int(OWNER), 0),
    "session keys": lambda: call(KEYCTL, 11, ctypes.c_int(-3), None, 0),
    "user's keys": lambda: call(KEYCTL, 8, ctypes.c_int(-4), ctypes.c_int(-3)),
    "key added": lambda: call(ADD_KEY, b"user", b"left", b"x", 1, ctypes.c_int(-4)),
    "names of keys": lambda: Path("/proc/keys").read_text() or fail(),
    "other port": lambda: connect(socket.AF_INET, ("127.0.0.1", int(PORT))),
    "other port by IPv6": lambda: connect(socket.AF_INET6, ("::1", int(PORT))),
    "network": lambda: connect(socket.AF_INET, ("192.0.2.1", 80)),
    "metadata server": lambda: connect(socket.AF_INET, ("169.254.169.254", 80)),
    "name": lambda: socket.getaddrinfo("example.com", 80),
    "datagram": lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 53)),
    "abstract socket": lambda: connect(socket.AF_UNIX, f"\0assay-{OWNER}"),
    "socket by path": lambda: connect(socket.AF_UNIX, f"{OUTSIDE}/socket"),
    "host of the virtual machine": lambda: socket.socket(40, socket.SOCK_STREAM).fileno(),
    "kernel's ciphers": lambda: socket.socket(38, socket.SOCK_SEQPACKET).fileno(),
    "packets": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).fileno(),
    "shared memory of the system": lambda: call(SHMGET, 7, 1 << 30, 0o1600),
    "memory of no process": lambda: call(MEMFD, b"x", 0),
    "memory of several processes": lambda: mmap.mmap(-1, 1 << 20),
    "memory of several processes by a device": lambda: mmap.mmap(os.open("/dev/zero", os.O_RDWR), 1 << 20),
    "lease on a file that others open": lambda: fcntl.fcntl(
        os.open(__file__, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK
    ),
    "kernel's log": lambda: call(SYSLOG, 3, ctypes.create_string_buffer(4096), 4096),
    "keys of the system": lambda: [list(Path(path).iterdir()) for path in ("/etc/ssl/private",)],
    "io_uring": lambda: call(IO_URING, 1, ctypes.create_string_buffer(200)),
    "bpf": lambda: call(BPF, 0, ctypes.create_string_buffer(128), 128),
    "watch of the user": lambda: call(INOTIFY, 0),
    "requests of the machine": lambda: call(IO_SETUP, 128, ctypes.byref(ctypes.c_long())),
    "queue of the user": lambda: call(MQ_OPEN, b"left", os.O_CREAT | os.O_RDWR, 0o600, None),
    "token of a later login": lambda: not os.path.exists(f"{SCRATCH.split(',')[0]}/stored_tokens") or fail(),
    "waiting signals of the user": lambda: resource.getrlimit(resource.RLIMIT_SIGPENDING)[1] > 4096 or fail(),
    "namespace of a clone": lambda: call(CLONE, 0x10000000 | int(signal.SIGCHLD), None, None, None, None) and 0,
    "limit raised": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)),
    "priority": lambda: os.nice(-10),
    "namespaces": lambda: function("unshare", 0x10000000 | 0x20000),
    "mount": lambda: function("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "unmount": lambda: function("umount2", os.fsencode(LEFT), 2),
    "remount": lambda: function("mount", None, b"/usr", None, 0x1020, None),
    "other root": lambda: os.chroot("/tmp"),
    "host name": lambda: socket.sethostname("x"),
    "clock": lambda: time.clock_settime(time.CLOCK_REALTIME, 0),
    "another user": lambda: os.setresuid(61234, 61234, 61234),
    "groups": lambda: os.setgroups([0]),
    "terminal": lambda: fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), 0x5412, b"x"),
    "input of a terminal": lambda: fcntl.ioctl(0, 0x5412, b"x"),
    "core dump": crash,
    "secrets of the first process": lambda: Path("/proc/1/maps").read_text() or fail(),
}
"""Attempts that fail inside."""


def fork_many() -> None:
    for _ in range(3000):
        try:
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
        except OSError:
            break
    time.sleep(600)


def take_memory() -> None:
    """Takes a quarter of the memory limit in each of 6 processes."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    for _ in range(6):
        if os.fork() == 0:
            held = bytearray(limit // 4)
            time.sleep(600)
            os._exit(len(held) & 1)
    time.sleep(600)


def blind() -> None:
    """Limits and slows down the first process, then starts processes."""
    os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))
    resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1))
    fork_many()


def start_threads() -> None:
    """Starts threads until no more can be started; root's limit of processes does not count them."""
    threading.stack_size(1 << 16)
    try:
        for _ in range(3000):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    except RuntimeError as error:
        print(f"threads: {error}", flush=True)
        os._exit(79)
    time.sleep(600)


def open_sockets() -> None:
    """Opens sockets in several processes; the kernel counts their memory to no process."""
    for _ in range(8):
        if os.fork() == 0:
            held = [socket.socket(socket.AF_UNIX) for _ in range(2000)]
            time.sleep(600)
            os._exit(len(held) & 1)
    time.sleep(600)


def connect_often() -> None:
    """Opens more connections than the limit to an endpoint that sends a byte on each."""
    held = [socket.create_connection(("127.0.0.1", int(PORT))) for _ in range(540)]
    answers = b""
    for several in (held[:512], held[512:]):
        answers += b"".join(connection.recv(1) for connection in several)
        for connection in several:
            connection.close()
    print(f"answered: {len(answers)}", flush=True)


def show_descriptors() -> None:
    held = [number for number in range(3, 1000) if os.path.lexists(f"/proc/self/fd/{number}")]
    print(f"open: {held}, {resource.getrlimit(resource.RLIMIT_NOFILE)[1]} at most", flush=True)


def files_in_memory() -> None:
    """Fills temporary files; their pages count to no process."""
    with Path("/tmp/large").open("wb") as file:
        for _ in range(900):
            file.write(bytes(1 << 20))
    time.sleep(60)


def flood() -> None:
    for _ in range(40):
        os.write(1, b"flood\n" * 200_000)
    print("the last line", flush=True)


def stay() -> None:
    """Leaves links and a FIFO, and ignores SIGTERM."""
    leave()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    daemon(write_late)
    time.sleep(600)


def leave() -> None:
    """Leaves links and a FIFO; harmless on a machine without isolation."""
    write(LEFT / "good.json", "{}")
    for name in ("log is a link", "samples are a link", "folder is an absolute link", "FIFO for the refusal"):
        LEAVES[name]()


ALONE: dict[str, Callable[[], None]] = {
    "processes": fork_many,
    "memory": take_memory,
    "files_in_memory": files_in_memory,
    "blind": blind,
    "threads": start_threads,
    "sockets": open_sockets,
    "connections": connect_often,
    "descriptors": show_descriptors,
    "flood": flood,
    "stay": stay,
    "leave": leave,
}


def outcome(action: Callable[[], object]) -> str:
    """Runs an attempt in a process of its own and returns its result or error as text."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            word = f"done: {action()!r}"
        except BaseException as error:  # noqa: BLE001 - the boundary of a process
            word = f"{type(error).__name__}: {error}"
        os.write(writing, word.encode(errors="replace")[:500])
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    word = os.read(reading, 500).decode()  # a single read: a daemon may hold the other end
    os.close(reading)
    return word


def main() -> None:
    if sys.argv[7:]:
        ALONE[sys.argv[7]]()
        return
    (LEFT / "good.json").write_text('{"good": true}')
    outcomes = {name: outcome(action) for name, action in (REACHES | LEAVES).items()}
    for path in SCRATCH.split(","):
        outcomes[f"scratch {path}"] = outcome(lambda path=path: write(f"{path}/x.pth"))
    (LEFT / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
