"""Runs a program in a fork of a server that has imported it, and ends with the same exit code or signal.

    python -I -S -u run_forked.py [--wait SECONDS] SOCKET PROGRAM [ARGUMENT ...]

Represents the run: it passes its streams, environment and working directory to the child, forwards signals, and when it
is killed, the child is killed too. If `fork_server.py` does not answer at SOCKET, this process becomes the program
itself, which is slower and gives the same result. Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import NoReturn

READY, REFUSED, ENDED = b"+", b"!", b"="  # as in fork_server.py
_WAIT_SECONDS = 300.0  # for the first import of an engine, from a cold disk
_BIND_SECONDS = 20.0  # a server opens its socket before it imports anything; its folder exists before it starts
_SOCKET_POLL_SECONDS = 0.01
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Unavailable(Exception):
    """The server is gone, or cannot run this; nothing has been executed."""


def main(arguments: list[str]) -> None:
    """Requests a fork, or runs the program cold."""
    wait_seconds = _WAIT_SECONDS
    if arguments[0] == "--wait":
        wait_seconds = float(arguments[1])
        arguments = arguments[2:]
    path, program, *rest = arguments
    try:
        with connect(path, wait_seconds) as connection:
            returncode = run(connection, rest)
    except Unavailable as error:
        print(f"no warm start: {error}", file=sys.stderr, flush=True)
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-I", "-u", program, *rest])
    end_as(returncode)


def connect(path: str, wait_seconds: float) -> socket.socket:
    """Connects to a server that has finished its imports.

    Raises:
        Unavailable: there is no server, or it was not ready in time.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(wait_seconds)
        deadline = time.monotonic() + min(wait_seconds, _BIND_SECONDS)
        while not Path(path).exists() and Path(path).parent.exists() and time.monotonic() < deadline:
            time.sleep(_SOCKET_POLL_SECONDS)
        connection.connect(path)
        if connection.recv(len(READY)) != READY:
            raise Unavailable("the fork server ended before it was ready")
    except TimeoutError as error:
        connection.close()
        raise Unavailable(f"the fork server was not ready within {wait_seconds:g} s") from error
    except OSError as error:
        connection.close()
        raise Unavailable(f"the fork server does not answer ({error.strerror})") from error
    connection.settimeout(None)
    return connection


def run(connection: socket.socket, arguments: list[str]) -> int:
    """Runs the program in a fork; returns its exit code, or the negated number of the signal that ended it.

    Raises:
        Unavailable: the server refused the run.
    """

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # the run has ended, and `recv` returns
            connection.send(bytes([number]))

    for number in _FORWARDED:
        signal.signal(number, pass_on)
    mask = os.umask(0o077)
    os.umask(mask)
    request = {"argv": arguments, "env": dict(os.environ), "cwd": str(Path.cwd()), "umask": mask}
    content = json.dumps(request).encode()
    reply = b""
    try:
        socket.send_fds(connection, [struct.pack("!I", len(content))], [0, 1, 2])
        connection.sendall(content)
        while more := connection.recv(4096):
            reply += more
    except OSError:
        reply = b""
    if reply.startswith(REFUSED):
        raise Unavailable(reply[len(REFUSED) :].decode(errors="replace"))
    if len(reply) != len(ENDED) + 4:
        print("the fork server has ended, and this run with it", file=sys.stderr, flush=True)
        return -signal.SIGKILL
    return struct.unpack("!i", reply[len(ENDED) :])[0]


def end_as(returncode: int) -> NoReturn:
    """Ends this process with the exit code or signal of the child."""
    if returncode < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        number = -returncode
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pause()
    os._exit(returncode)


if __name__ == "__main__":
    main(sys.argv[1:])
