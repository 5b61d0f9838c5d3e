"""A program imported by `fork_server.py`, and the steps that make a fork of it equivalent to a new process.

A fork has only the thread that forked: locks and work of other threads are lost, so threads of an import are reported.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

# Settings that keep libraries from starting threads at import.
_NO_THREADS = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


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
