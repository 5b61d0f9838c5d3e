"""A process of a job on its node: prepares it, runs it under its own supervisor, and reports to the controller.

The supervisor holds the reading end of a pipe into this worker: when the worker ends (by its node's raylet, the end of
the driver, or the kernel), the supervisor ends all processes of the job on this node.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from resources.backends.processes import argv_of, interpreter_of, moved, start_supervisor, variables_of
from resources.backends.programs.endings import outcome_of_supervised
from resources.backends.ray.orders import Output, ProcessEnd, ProcessOrder, refusal_text
from resources.config import TpuConfig
from resources.errors import AssayError, BadInput
from resources.jobs.jobs import growing_pauses
from resources.jobs.logs import PART_BYTES

_LONGEST_PAUSE_SECONDS = 0.3
_UNTIL_END_SECONDS = 30.0
_PREPARING_SECONDS = 2.0  # how long a stop waits for a build of packages, which cannot be interrupted
_LOST_CONTROLLER_SECONDS = 60.0

# By IP address: other networks cannot resolve the name, and a lookup has no timeout.
_NOTICE_URL = "http://169.254.169.254/computeMetadata/v1/instance/preempted"
TPU_LOCKFILE = Path("/tmp/libtpu_lockfile")
"""With a left-behind lock file, later processes report the TPU as in use by a dead process."""
_SUDO_SECONDS = 20.0

_log = logging.getLogger(__name__)
Ask = Callable[..., Any]


def run_process(order: ProcessOrder, *, ask: Ask, fetch: Callable[[str], bytes]) -> ProcessEnd:
    """Runs a process of a job, and returns when it and all of its children have ended.

    `ask` calls a method of the controller by name. `fetch` gets an object from Ray's object store by name: `workspace`
    (the package) or `call` (a large pickled call).
    """
    run = _Run(order, ask)
    # The whole TPU host belongs to the job, so a lockfile is a leftover of an ended process.
    with remove_tpu_lockfile_on_exit() if run.is_tpu else nullcontext():
        threading.Thread(target=run.end_on_request, daemon=True).start()
        folder = Path(tempfile.mkdtemp(prefix=f"assay-{order.job.job_id}-"))
        try:
            try:
                variables, specification = _prepare(order, folder, fetch)
            except AssayError as error:
                return ProcessEnd(outcome="refused", reason=refusal_text(error))
            if not run.start(folder, specification, variables):
                return ProcessEnd(outcome="stopped")
            return run.report_until_ended()
        finally:
            run.close()
            shutil.rmtree(folder, ignore_errors=True)


def _prepare(order: ProcessOrder, folder: Path, fetch: Callable[[str], bytes]) -> tuple[dict[str, str], dict[str, Any]]:
    job, environment = order.job, order.job.request.environment
    workspace = job.workspace.brought_here(lambda: fetch("workspace"))
    paths = map(Path, (job.working_directory, *job.imports))
    working_directory, *imports = (str(moved(path, job.workspace.path, to=workspace)) for path in paths)
    if not Path(working_directory).is_dir():
        raise BadInput(
            expected=f"the working directory {job.working_directory} on the node, or inside the workspace",
            found="no such folder there",
            remedy="Choose a folder inside the workspace, which is sent along.",
        )
    python = interpreter_of(environment, workspace=workspace)
    entrypoint = job.entrypoint
    if isinstance(entrypoint, bytes):
        (folder / "call.pickle").write_bytes(entrypoint or fetch("call"))
        entrypoint = folder / "call.pickle"
        imports = [str(workspace), *imports, str(Path(__file__).parents[3])]
    specification = {
        "argv": argv_of(entrypoint, python=python, imports=imports),
        "working_directory": working_directory,
        "grace_seconds": job.grace_seconds,
        "parent_pid": os.getpid(),
        "shielded": True,
        "place": [order.replica, job.request.replica_count, order.host, job.hosts],
    }
    given = {"ASSAY_JOB_ID": job.job_id, "ASSAY_JOBS": "ray://auto", "RAY_ADDRESS": job.address}
    defaults = order.device_variables
    return variables_of(environment, python=python, defaults=defaults, given=given), specification


class _Run:
    def __init__(self, order: ProcessOrder, ask: Ask) -> None:
        self._attempt = {"job_id": order.job.job_id, "attempt": order.attempt}
        self._process = (order.replica, order.host)
        self._ask = ask
        self.is_tpu = isinstance(order.job.request.resources.device, TpuConfig)
        self._lock = threading.Lock()
        self._told_to_end = False
        self._closed = threading.Event()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self._read_bytes = 0
        self._reported: tuple[str | None, bool] = (None, False)

    def start(self, folder: Path, specification: dict[str, Any], variables: dict[str, str]) -> bool:
        (folder / "specification.json").write_text(json.dumps(specification))
        with self._lock:
            if self._told_to_end:
                return False
            self._folder = folder
            self._supervisor = start_supervisor(folder, variables=variables)
        return True

    def end_on_request(self) -> None:
        lost_at: float | None = None
        while True:
            try:
                # The answer is an error if the controller has forgotten the job.
                ended = self._ask("ends_within", **self._attempt, seconds=_UNTIL_END_SECONDS) is not False
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
        status, code = self._status(), self._supervisor.returncode
        outcome = outcome_of_supervised(status, supervisor_code=code, stopping=self._told_to_end)
        if outcome == "failed" and self.is_tpu and preemption_announced():
            outcome = "preempted"
        code = next((replica["exit_code"] for replica in status.get("replicas", [])), None)
        return ProcessEnd(
            outcome=outcome,
            reason=status.get("ended_by") or (None if code is None else f"exit code {code}"),
            output=self._new_output(),
            announcement=self._announcement(),
            result=self._written("result-0"),
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
            self._ask(
                "report", **self._attempt, process=self._process, output=output, announcement=now[0], started=now[1]
            )
            self._reported = now
        except Exception:  # noqa: BLE001 ray's: the controller is unreachable for now; the thread detects its death
            self._read_bytes = before
            return False
        return bool(output.content)

    def _new_output(self) -> Output:
        with suppress(FileNotFoundError), (self._folder / "replica-0.log").open("rb") as log:
            start = log.seek(self._read_bytes)
            content = log.read(PART_BYTES)
            self._read_bytes += len(content)
            return Output(content, start)
        return Output(start=self._read_bytes)

    def _announcement(self) -> str | None:
        text = self._written("announced-0")
        return None if text is None else text.decode()

    def _written(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return (self._folder / name).read_bytes()
        return None

    def _status(self) -> dict[str, Any]:
        text = self._written("status.json")
        return {} if text is None else json.loads(text)


def preemption_announced(*, url: str = _NOTICE_URL, timeout_seconds: float = 2.0) -> bool:
    """Returns True if this machine is being preempted; False on machines outside of Google Cloud.

    A program on a TPU fails with an unrelated error and exit code when its chips, or chips of another host of its
    slice, disappear, up to 30 s before the machine does. Without a metadata server, the query runs into the timeout.
    """
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            return answer.read(16).strip() == b"TRUE"
    except (OSError, HTTPException):
        return False


@contextmanager
def remove_tpu_lockfile_on_exit(*, path: Path = TPU_LOCKFILE) -> Iterator[None]:
    """Removes the lock file before and after a `with` block, or each call of a function that it decorates.

    Only for the holder of all chips of the host: it would also remove the lock of a living process.
    """
    _remove(path)
    try:
        yield
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        try:
            subprocess.run(
                ["sudo", "-n", "rm", "-f", str(path)], check=True, capture_output=True, timeout=_SUDO_SECONDS
            )
        except (OSError, subprocess.SubprocessError) as error:
            _log.warning("%s belongs to another user and could not be removed: %s", path, error)
