"""A program in a fork of a server that has imported it: its import, its start in a fork, and the command that runs it.

    python -I -S -u run_forked.py [--wait SECONDS] SOCKET PROGRAM [ARGUMENT ...]

The command represents the run, and ends with its exit code or signal: it passes its streams, environment and working
directory to the child, forwards signals, and when it is killed, the child is killed too. If `fork_server.py` does not
answer at SOCKET, this process becomes the program itself, which is slower and gives the same result. `fork_server.py`
uses the class `Program` and `become_fresh`. Needs only the standard library.

A fork has only the thread that forked: locks and work of other threads are lost, so threads of an import are reported.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.util
import json
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

READY, REFUSED, ENDED = b"+", b"!", b"="
_WAIT_SECONDS = 300.0  # for the first import of an engine, from a cold disk
_BIND_SECONDS = 20.0  # a server opens its socket before it imports anything; its folder exists before it starts
_SOCKET_POLL_SECONDS = 0.01
# Settings that keep libraries from starting threads at import.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
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
    except OSError as error:
        connection.close()
        late = isinstance(error, TimeoutError)
        reason = f"was not ready within {wait_seconds:g} s" if late else f"does not answer ({error.strerror})"
        raise Unavailable(f"the fork server {reason}") from error
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


class Program:
    """An imported program, ready to run in forks of this process."""

    def __init__(self, path: Path, module: ModuleType, variables: dict[str, str]) -> None:
        self.path = path
        self._module = module
        self._read_at_import = tuple(getattr(module, "READ_AT_IMPORT", ()))
        self._variables = self._read(variables)

    @classmethod
    def load(cls, path: Path, arguments: list[str]) -> Program:
        """Imports the file under its own name, and calls its `preload`.

        Memory that it allocates is shared by all runs until it is written to.
        """
        for name, value in _NO_THREADS.items():
            os.environ.setdefault(name, value)
        variables = dict(os.environ)  # before libraries add variables
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"expected a Python file, found {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        gc.disable()  # imports leave almost no garbage, and collections took a quarter of vLLM's import
        spec.loader.exec_module(module)
        module.preload(arguments)
        gc.collect()
        gc.freeze()  # a collection in a run would write to all shared pages
        gc.enable()
        _warn_of_threads()
        return cls(path, module, variables)

    def _read(self, variables: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in variables.items() if name.startswith(self._read_at_import)}

    def unlike(self, variables: dict[str, str]) -> list[str]:
        """Returns the names of variables that were read at import and differ now."""
        values = self._read(variables)
        names = values.keys() | self._variables.keys()
        return sorted(name for name in names if values.get(name) != self._variables.get(name))

    def run(self, arguments: list[str]) -> NoReturn:
        """Runs the program as a new interpreter would, and ends this process without tearing down modules."""
        sys.argv = [str(self.path), *arguments]
        code = 1
        try:
            try:
                code = exit_code(self._module.main(arguments))
            except SystemExit as end:
                code = exit_code(end.code)
            threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as the interpreter does at its end
            atexit._run_exitfuncs()
        except KeyboardInterrupt:
            traceback.print_exc()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:  # noqa: BLE001 - the boundary of a process
            traceback.print_exc()
            code = code or 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError):
                    code = code or 1
            os._exit(code)


def exit_code(result: object) -> int:
    """Returns the exit code that the interpreter derives from the argument of `sys.exit`."""
    if result is None:
        return 0
    if isinstance(result, int):
        return result & 0xFF
    print(result, file=sys.stderr)
    return 1


def become_fresh(request: dict[str, Any], descriptors: list[int]) -> None:
    """Resets this process to the state of a new interpreter, except modules: streams, environment, signals, seeds."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    for descriptor in descriptors:
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lasts as long as the process
    os.environ.clear()
    os.environ.update(request["env"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # Python reseeds itself after a fork, and torch starts from a constant in every process
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _warn_of_threads() -> None:
    tasks = Path("/proc/self/task")
    count = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()
    if count > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        print(f"warning: {count} threads run after preloading (in Python: {names})", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
