"""A process of a job on its node: prepares it, runs it under its own supervisor, and reports to the controller.

The supervisor holds the reading end of a pipe into this worker: when the worker ends (by its node's raylet, the end of
the driver, or the kernel), the supervisor ends all processes of the job on this node.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from resources.backends.processes import PROGRAMS, argv_of, interpreter_of, variables_of
from resources.backends.ray.orders import KEPT_LOG_BYTES, Output, ProcessEnd, ProcessOrder
from resources.errors import AssayError, BadInput
from resources.jobs.logs import PART_BYTES
from resources.jobs.preemption_notice import preemption_announced
from resources.jobs.tpu_lockfile import remove_tpu_lockfile_on_exit
from resources.jobs.waiting import growing_pauses

_LONGEST_PAUSE_SECONDS = 0.3
_UNTIL_END_SECONDS = 30.0
_PREPARING_SECONDS = 2.0  # how long a stop waits for a build of packages, which cannot be interrupted
_LOST_CONTROLLER_SECONDS = 60.0

Ask = Callable[..., Any]


def run_process(order: ProcessOrder, *, ask: Ask, fetch: Callable[[str], bytes]) -> ProcessEnd:
    """Runs a process of a job, and returns when it and all of its children have ended.

    `ask` calls a method of the controller by name. `fetch` gets an object from Ray's object store by name: `workspace`
    (the package) or `call` (a large pickled call).
    """
    # The whole TPU host belongs to the job, so a lockfile is a leftover of an ended process.
    with remove_tpu_lockfile_on_exit() if order.is_tpu else nullcontext():
        return _run_process(order, ask=ask, fetch=fetch)


def _run_process(order: ProcessOrder, *, ask: Ask, fetch: Callable[[str], bytes]) -> ProcessEnd:
    run = _Run(order, ask)
    threading.Thread(target=run.end_on_request, daemon=True).start()
    folder = Path(tempfile.mkdtemp(prefix=f"assay-{order.job_id}-"))
    try:
        try:
            variables, specification = _prepare(order, folder, fetch)
        except AssayError as error:
            return ProcessEnd(outcome="refused", refusal=error)
        if not run.start(folder, specification, variables):
            return ProcessEnd(outcome="stopped")
        return run.report_until_ended()
    finally:
        run.close()
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(order: ProcessOrder, folder: Path, fetch: Callable[[str], bytes]) -> tuple[dict[str, str], dict[str, Any]]:
    workspace = order.workspace.brought_here(lambda: fetch("workspace"))
    moved = [order.working_directory, *order.imports]
    if workspace != order.workspace.path:
        moved = order.workspace.moved(moved, to=workspace)
    working_directory, *imports = moved
    if not Path(working_directory).is_dir():
        raise BadInput(
            expected=f"the working directory {order.working_directory} on the node, or inside the workspace",
            found="no such folder there",
            remedy="Choose a folder inside the workspace, which is sent along.",
        )
    python = interpreter_of(order.environment, workspace=workspace)
    entrypoint = order.entrypoint
    if isinstance(entrypoint, bytes):
        (folder / "call.pickle").write_bytes(entrypoint or fetch("call"))
        entrypoint = folder / "call.pickle"
        imports = [str(workspace), *imports, str(Path(__file__).parents[3])]
    specification = {
        "argv": argv_of(entrypoint, python=python, imports=imports),
        "working_directory": working_directory,
        "grace_seconds": order.grace_seconds,
        "parent_pid": os.getpid(),
        "shielded": True,
        "place": [order.replica, order.replicas, order.host, order.hosts],
    }
    environment = replace(order.environment, env_vars={**order.device_variables, **order.environment.env_vars})
    return variables_of(environment, python=python, given=order.given), specification


class _Run:
    def __init__(self, order: ProcessOrder, ask: Ask) -> None:
        self._who = {
            "job_id": order.job_id,
            "attempt": order.attempt,
            "replica": order.replica,
            "host": order.host,
        }
        self._ask = ask
        self._is_tpu = order.is_tpu
        self._lock = threading.Lock()
        self._told_to_end = False
        self._closed = threading.Event()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._read_bytes = 0
        self._reported: tuple[str | None, bool] = (None, False)

    def start(self, folder: Path, specification: dict[str, Any], variables: dict[str, str]) -> bool:
        (folder / "specification.json").write_text(json.dumps(specification))
        with self._lock, (folder / "supervisor.log").open("wb") as log:
            if self._told_to_end:
                return False
            self._folder = folder
            self._supervisor = subprocess.Popen(
                [sys.executable, "-E", "-s", "-S", str(PROGRAMS / "supervise.py"), str(folder)],
                env=variables,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return True

    def end_on_request(self) -> None:
        lost_at: float | None = None
        while True:
            try:
                ended = self._ask("until_end", **self._who, seconds=_UNTIL_END_SECONDS)
                lost_at = None
            except Exception as error:  # noqa: BLE001 ray's errors, when the controller is gone or unreachable
                verdict = type(error).__name__
                lost_at = lost_at or time.monotonic()
                ended = verdict == "ActorDiedError" or time.monotonic() - lost_at > _LOST_CONTROLLER_SECONDS
                time.sleep(0 if ended else 1.0)
            if ended:
                return self._end()

    def _end(self) -> None:
        with self._lock:
            self._told_to_end = True
            supervisor = self._supervisor
        if supervisor is not None and supervisor.stdin is not None:
            supervisor.stdin.close()  # a signal would kill a starting supervisor, which counts as preempted
            return
        self._closed.wait(_PREPARING_SECONDS)
        with self._lock:
            if not self._closed.is_set():
                os._exit(1)  # still building: only the worker process must end

    def report_until_ended(self) -> ProcessEnd:
        assert self._supervisor is not None
        for pause_seconds in growing_pauses(_LONGEST_PAUSE_SECONDS):
            try:
                self._supervisor.wait(pause_seconds)
                break
            except subprocess.TimeoutExpired:
                while self._report():
                    pass
        while self._report():
            pass
        status = self._status()
        outcome = status.get("status")
        match outcome:
            case "succeeded":
                pass
            case "stopped" if self._told_to_end:
                pass
            case "failed" if status["failures"] and self._is_tpu and preemption_announced():
                outcome = "preempted"
            case "failed" if status["failures"]:
                pass
            case _:  # the process or its supervisor was ended from outside
                outcome = "preempted"
        code = next((replica["exit_code"] for replica in status.get("replicas", [])), None)
        return ProcessEnd(
            outcome=outcome,
            reason=status.get("ended_by") or (None if code is None else f"exit code {code}"),
            output=self._new_output(),
            announcement=self._announcement(),
            result=self._result(),
        )

    def close(self) -> None:
        with self._lock:
            self._closed.set()
        if self._supervisor is not None and self._supervisor.stdin is not None:
            self._supervisor.stdin.close()
            self._supervisor.wait()

    def _report(self) -> bool:
        before = self._read_bytes
        now = (self._announcement(), self._status().get("status") not in (None, "pending"))
        output = self._new_output()
        if not output.content and now == self._reported:
            return False
        try:
            self._ask("report", **self._who, output=output, announcement=now[0], started=now[1])
            self._reported = now
        except Exception:  # noqa: BLE001 ray's: the controller is unreachable for now; the thread detects its death
            self._read_bytes = before
            return False
        return bool(output.content)

    def _new_output(self) -> Output:
        with suppress(FileNotFoundError), (self._folder / "replica-0.log").open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(self._read_bytes)
            skipped = 0
            while size - log.tell() > KEPT_LOG_BYTES:
                skipped += log.read(PART_BYTES).count(b"\n")
            skipped += bool(skipped and log.readline())
            start, content = log.tell(), log.read(PART_BYTES)
            self._read_bytes = log.tell()
            return Output(content, start, skipped)
        return Output(start=self._read_bytes)

    def _announcement(self) -> str | None:
        with suppress(FileNotFoundError):
            return (self._folder / "announced-0").read_text()
        return None

    def _result(self) -> bytes | None:
        with suppress(FileNotFoundError):
            return (self._folder / "result-0").read_bytes()
        return None

    def _status(self) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            return json.loads((self._folder / "status.json").read_text())
        return {}
