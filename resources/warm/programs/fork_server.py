"""Imports a program once, then forks a child for every run of it. Executed by the interpreter of an environment.

    python -I -u fork_server.py SOCKET PROGRAM [PRELOAD ARGUMENT ...]

PROGRAM is a file with `preload(arguments)` and `main(arguments) -> exit code or None`. Its optional `READ_AT_IMPORT`
lists prefixes of variables that its libraries read at import: a run with other values than the server's is refused.
`run_forked.py` requests runs. Needs only the standard library.

Connections queue up in the socket during `preload`. For each connection, the server forks a subreaper, which forks the
child and inherits all orphaned processes of the child. So it can end all of them when the child has ended or its
requester is gone. The server itself only accepts and forks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# -I leaves the script's folder out of the path.
sys.path.insert(0, str(Path(__file__).parents[2] / "backends" / "programs"))
sys.path.insert(0, str(Path(__file__).parent))
import endings
from run_forked import ENDED, READY, REFUSED, Program, become_fresh

del sys.path[:2]

_BACKLOG = 512
_PARENT_POLL_SECONDS = 1.0  # interval of checks for the parent; the kernel may not signal its death
_REQUEST_SECONDS = 30.0  # a requester sends its request at once
_LARGEST_REQUEST = 64 << 20
_SWEEP_SECONDS = 0.005
_KILL_SECONDS = 30.0  # a process in an uninterruptible system call survives SIGKILL until the call returns


class ForkServer:
    """Accepts connections and forks a subreaper for each."""

    def __init__(self, program: Program, listener: socket.socket) -> None:
        self._program = program
        self._listener = listener
        self._subreapers: set[int] = set()
        self._parent = os.getppid()
        self._stopping = False
        self._wake_fd, self._wake_write_fd = endings.wake_pipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)

    def serve(self) -> None:
        """Forks until a stop signal, or until its parent is gone; then ends every run."""
        while not self._stopping and os.getppid() == self._parent:
            ready = endings.wait_for(self._wake_fd, self._listener, seconds=_PARENT_POLL_SECONDS)
            self._reap()
            if ready:
                connection, _ = self._listener.accept()
                with connection:
                    if _is_of_this_user(connection):
                        self._fork_subreaper(connection)
        self._listener.close()
        deadline = time.monotonic() + _KILL_SECONDS
        while self._subreapers and time.monotonic() < deadline:
            for subreaper in self._subreapers:
                endings.send_signal(subreaper, signal.SIGTERM)
            endings.wait_for(self._wake_fd, seconds=_SWEEP_SECONDS)
            self._reap()

    def _fork_subreaper(self, connection: socket.socket) -> None:
        server = os.getpid()
        try:
            subreaper = os.fork()
        except OSError as error:  # too many processes, or no memory: this run starts cold
            print(f"no fork: {error}", file=sys.stderr, flush=True)
            return
        if subreaper:
            self._subreapers.add(subreaper)
            return
        try:
            endings.prctl(endings.PR_SET_PDEATHSIG, signal.SIGTERM)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            self._listener.close()
            for descriptor in (self._wake_fd, self._wake_write_fd):
                os.close(descriptor)
            if os.getppid() == server:
                Subreaper(self._program, connection).keep()
        except BaseException:  # noqa: BLE001 - the boundary of a process
            traceback.print_exc()
        finally:
            os._exit(0)

    def _reap(self) -> None:
        killed = False
        for pid, returncode in endings.ended_children():
            self._subreapers.discard(pid)
            killed = killed or returncode != 0
        if killed:
            for pid in [pid for pid, (parent, _) in endings.living_processes().items() if parent == os.getpid()]:
                if pid not in self._subreapers:
                    endings.send_signal(pid, signal.SIGKILL)

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True


class Subreaper:
    """Runs a child for a requester, and ends all processes that the child leaves behind."""

    def __init__(self, program: Program, connection: socket.socket) -> None:
        self._program = program
        self._connection = connection
        self._child = 0
        self._returncode: int | None = None
        self._wake_fd, self._wake_write_fd = endings.wake_pipe()
        self._told_to_end = False

    def keep(self) -> None:
        """Forks the child, forwards signals to it, and reports its exit code."""
        endings.prctl(endings.PR_SET_CHILD_SUBREAPER, 1)
        self._connection.sendall(READY)
        self._connection.settimeout(_REQUEST_SECONDS)
        request, descriptors = _receive_request(self._connection)
        if request is None:
            return
        self._connection.settimeout(None)
        if unlike := self._program.unlike(request["env"]):
            self._connection.sendall(REFUSED + f"it was imported with other values of {', '.join(unlike)}".encode())
            return
        # Blocked until the child exists, so that no signal is lost.
        blocked = {signal.SIGTERM, signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        subreaper = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            self._become_child(request, descriptors, subreaper)
        for descriptor in descriptors:
            os.close(descriptor)
        signal.signal(signal.SIGTERM, self._end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        self._watch()
        self._end_everything()
        returncode = -signal.SIGKILL if self._returncode is None else self._returncode
        with suppress(OSError):
            self._connection.sendall(ENDED + struct.pack("!i", returncode))

    def _watch(self) -> None:
        self._reap()
        while self._returncode is None and not self._told_to_end:
            ready = endings.wait_for(self._wake_fd, self._connection, seconds=None)
            self._reap()
            if ready:
                try:
                    numbers = self._connection.recv(64)
                except OSError:
                    numbers = b""
                if not numbers:
                    return
                for number in numbers:
                    self._signal(number)

    def _signal(self, number: int) -> None:
        if self._returncode is None:
            try:
                os.killpg(self._child, number)
            except (ProcessLookupError, PermissionError):
                endings.send_signal(self._child, number)  # the child has not created its process group yet

    def _end_everything(self) -> None:
        deadline = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < deadline:
            left = endings.descendants()
            self._reap()  # after the listing: a process that ended before it, and so is not listed, is reaped too
            if not left:
                return
            for pid in left:
                endings.send_signal(pid, signal.SIGKILL)
            endings.wait_for(self._wake_fd, seconds=_SWEEP_SECONDS)

    def _reap(self) -> None:
        for pid, returncode in endings.ended_children():
            if pid == self._child:
                self._returncode = returncode

    def _end(self, number: int, frame: object) -> None:
        self._told_to_end = True

    def _become_child(self, request: dict[str, Any], descriptors: list[int], subreaper: int) -> NoReturn:
        try:
            os.setsid()
            endings.prctl(endings.PR_SET_CHILD_SUBREAPER, 0)
            endings.prctl(endings.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != subreaper:
                os._exit(1)
            self._connection.close()
            os.close(self._wake_fd)
            os.close(self._wake_write_fd)
            become_fresh(request, descriptors)
        except BaseException:  # noqa: BLE001 - the boundary of a process
            traceback.print_exc()
            os._exit(127)
        self._program.run(request["argv"])


def _receive_request(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    try:
        received, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        (length,) = struct.unpack("!I", _received(connection, 4, received))
        if length > _LARGEST_REQUEST or len(descriptors) != 3:
            return None, []
        return json.loads(_received(connection, length)), descriptors
    except OSError:
        return None, []


def _received(connection: socket.socket, length: int, start: bytes = b"") -> bytearray:
    content = bytearray(start)
    while len(content) < length:
        if not (more := connection.recv(min(length - len(content), 1 << 20))):
            raise ConnectionError("the requester is gone")
        content += more
    return content


def _is_of_this_user(connection: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):  # not Linux: the socket's folder has to do
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


def main(arguments: list[str]) -> None:
    """Listens, preloads, serves."""
    path, program_path = Path(arguments[0]), Path(arguments[1])
    endings.prctl(endings.PR_SET_CHILD_SUBREAPER, 1)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        mask = os.umask(0o177)
        listener.bind(str(unfinished))
        os.umask(mask)
        listener.listen(_BACKLOG)
        unfinished.replace(path)  # also replaces the socket of a killed server
        began = time.monotonic()
        program = Program.load(program_path, arguments[2:])
        print(f"{program_path.name} preloaded in {time.monotonic() - began:.2f} s", file=sys.stderr, flush=True)
        ForkServer(program, listener).serve()
        with suppress(OSError):  # the requester of the server may have been killed
            path.unlink()
            path.parent.rmdir()


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # a normal exit would tear down an engine's modules for half a second
