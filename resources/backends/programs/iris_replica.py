"""Runs a replica of a job as a task of Iris, and adds the features that Iris lacks.

    python -S -u iris_replica.py <folder with job.json and the other programs; for a call, assay.zip too>

Needs the standard library only. `supervise.py` owns the replica's process tree and ends all of it in order, also if
this program is killed. This program forwards the output, retries after an end from outside, restarts multi-host
replicas together, and stops on request or when the submitting process is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError

import iris_records
from attempts import FINISHED, Attempts, Outcome
from endings import end_marked, outcome_of_supervised
from iris_records import (
    DONE,
    ENDING,
    GAVE_UP,
    MARK,
    RUNNING,
    STOPPED,
    WAITING,
    Records,
    call_controller,
    hand_over,
    push_lines,
)

_AGAIN = "another attempt"
_REPLICA_POLL_SECONDS = 0.05
_WAIT_SECONDS = 0.2
_DRAIN_SECONDS = 0.05  # longest wait for the reader of our output; after it, a slow reader gets several lines at once
_LONGEST_LINE_BYTES = 1 << 16
_PEERS_END_SECONDS = 15.0
_UNASKED_SECONDS = 20.0  # the requester of a stop also ends the job at the controller; after this time the replica does
_SEEN_SECONDS = 10.0
_RESULT_SECONDS = 60.0  # a restart of the controller takes a few seconds
_BUILD_FAILED = 1


class Replica:
    """An attempt of an Iris task."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._job: dict[str, Any] = json.loads((folder / "job.json").read_text())
        self._task, _, attempt = os.environ["IRIS_TASK_ID"].partition(":")
        self._job_id, _, index = self._task.rpartition("/")
        self._index = int(index)
        self._attempt = int(attempt or 0)
        self._count = int(os.environ.get("IRIS_NUM_TASKS", "1"))
        self._workspace = Path(os.environ["IRIS_WORKDIR"]).absolute()
        self._run_folder = Path(tempfile.mkdtemp(prefix="assay-"))
        self._restarts = Attempts(0, self._job["max_retries_preemption"])  # without attempts that Iris started
        self._result: bytes | None = None  # of the call's last run
        self._unfinished = b""
        self._terminated = False
        self._controller = os.environ["IRIS_CONTROLLER_ADDRESS"]
        self._records = Records(
            controller=self._controller,
            job_id=self._job_id,
            index=self._index,
            count=self._count,
            attempt=self._attempt,
            poll_seconds=self._job["poll_seconds"],
            lease_seconds=None if self._job["outlives_parent"] else self._job["lease_seconds"],
        )
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_terminated", True))
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Runs the replica and returns the exit code for Iris, which counts any code but 0 as the task's failure."""
        earlier_preemptions, gave_up = self._earlier()
        if gave_up:
            return self._end(1, gave_up)
        self._restarts = self._restarts._replace(preemptions=earlier_preemptions)
        self._records.start()
        try:
            argv = self._argv()
        except (OSError, subprocess.SubprocessError) as error:
            return self._end(_BUILD_FAILED, f"its environment could not be built: {error}")
        while True:
            if self._count > 1 and not self._joined():
                lost = None if self._to_end() == "stopped" else self._records.lost
                return self._end(1, f"{GAVE_UP}{lost}") if lost else self._stopped()
            self._records.say(state=RUNNING)
            outcome, code, reason = self._run_once(argv)
            if outcome == "stopped":
                return self._stopped()
            if outcome == "succeeded" and self._all_done():
                return self._end(0, "succeeded")
            if outcome == "failed":
                self._let_peers_end()
                return self._end(code if 0 < code < 128 else 1, reason)
            if outcome == "preempted":
                self._restarts, final = self._restarts.begun().ended(outcome)
                if final is not None:
                    self._let_peers_end()
                    return self._end(1, f"{GAVE_UP}{final.reason}")
                self._records.say(state=WAITING, restarts=self._restarts.attempts, announcement=None)
                if self._stop_within(self._restarts.pause_seconds):
                    return self._stopped()
                self._show([f"{MARK}{_AGAIN}".encode()])

    def _earlier(self) -> tuple[int, str | None]:
        if not self._attempt:
            return 0, None
        try:
            attempts = call_controller(self._controller, "GetTaskStatus", taskId=self._task)["task"]["attempts"]
        except (OSError, ValueError, KeyError):
            return 0, None
        count, gave_up = 0, None
        for attempt in attempts[: self._attempt]:
            error = str(attempt.get("error", ""))
            if attempt.get("state") in ("TASK_STATE_WORKER_FAILED", "TASK_STATE_PREEMPTED", "TASK_STATE_KILLED"):
                count += 1
            elif MARK in error:
                reason = error.rpartition(MARK)[2]
                restarts = reason.rpartition("; restarted here: ")[2]
                count += int(restarts) if restarts.isdigit() else 0
                gave_up = reason.partition("; restarted here: ")[0] if reason.startswith(GAVE_UP) else gave_up
        return count, gave_up

    def _run_once(self, argv: list[str]) -> tuple[Outcome | Literal["rejoin"], int, str]:
        folder = Path(tempfile.mkdtemp(dir=self._run_folder))
        os.mkfifo(folder / "replica-0.log")
        # Open for writing too: otherwise the first writer's end would be the end of the output.
        log = os.open(folder / "replica-0.log", os.O_RDWR | os.O_NONBLOCK)
        hosts = self._job["hosts"]
        specification = {
            "argv": argv,
            "working_directory": str(self._working_directory()),
            "grace_seconds": self._job["grace_seconds"],
            "parent_pid": os.getpid(),
            "place": [self._index // hosts, self._count // hosts, self._index % hosts, hosts],
        }
        (folder / "specification.json").write_text(json.dumps(specification))
        supervisor = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", str(self._folder / "supervise.py"), str(folder)],
            env=self._variables(),
            cwd=folder,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        asked: Outcome | Literal["rejoin"] | None = None
        listens = False
        try:
            while (ended := supervisor.poll()) is None:
                self._pass_on(log, wait_seconds=_REPLICA_POLL_SECONDS)
                self._records.say(announcement=_read(folder / "announced-0"))
                listens = listens or (folder / "status.json").exists()
                if asked is None and listens and (asked := self._to_end()):
                    supervisor.terminate()
            self._pass_on(log, wait_seconds=0)
        finally:
            os.close(log)
        status = json.loads(_read(folder / "status.json") or '{"status": "pending", "replicas": [{}]}')
        outcome = outcome_of_supervised(status, supervisor_code=ended, stopping=asked is not None)
        if status["status"] not in FINISHED:  # the supervisor was killed
            end_marked(ASSAY_JOB_ID=self._job_id, IRIS_TASK_ID=os.environ["IRIS_TASK_ID"])
        code = status["replicas"][0].get("exit_code")
        code = ended if code is None else int(code)
        self._records.say(announcement=_read(folder / "announced-0"))
        left = folder / "result-0"
        self._result = left.read_bytes() if left.exists() else None
        shutil.rmtree(folder, ignore_errors=True)
        if outcome == "succeeded":
            return outcome, 0, ""
        return asked or outcome, code, status.get("ended_by") or f"exit code {code}"

    def _to_end(self) -> Literal["stopped", "rejoin"] | None:
        if self._terminated or self._records.stop_reason:
            return "stopped"
        return "rejoin" if self._count > 1 and self._records.out_of_step() else None

    def _stop_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._to_end() != "stopped" and (remaining := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining, _REPLICA_POLL_SECONDS))
        return self._to_end() == "stopped"

    def _joined(self) -> bool:
        self._records.say(state=WAITING, announcement=None)
        while not self._records.all_ready():
            if self._records.lost or self._stop_within(_WAIT_SECONDS):
                return False
        return True

    def _all_done(self) -> bool:
        self._records.say(state=DONE)
        while self._count > 1 and not self._records.all_done():
            if self._records.out_of_step() or self._stop_within(_WAIT_SECONDS):
                return False
        return True

    def _let_peers_end(self) -> None:
        self._records.say(state=ENDING)
        deadline = time.monotonic() + self._job["grace_seconds"] + _PEERS_END_SECONDS
        while self._count > 1 and self._records.others_run() and time.monotonic() < deadline:
            time.sleep(_WAIT_SECONDS)

    def _stopped(self) -> int:
        self._write(f"{MARK}{self._records.stop_reason or 'terminated'}\n".encode())
        shutil.rmtree(self._run_folder, ignore_errors=True)
        if self._terminated:
            return 128 + signal.SIGTERM
        self._records.say(state=STOPPED, announcement=None)
        if self._records.asked_to_stop:
            deadline = time.monotonic() + _UNASKED_SECONDS
            while not self._terminated and time.monotonic() < deadline:
                time.sleep(_WAIT_SECONDS)
        while not self._terminated:  # repeated: the controller may be unreachable
            with suppress(OSError, ValueError):
                call_controller(self._controller, "TerminateJob", jobId=self._job_id)
            time.sleep(1.0)
        return 128 + signal.SIGTERM

    def _end(self, code: int, reason: str) -> int:
        self._hand_over_result()
        self._write(f"{MARK}{reason}; restarted here: {self._restarts.attempts}\n".encode())
        shutil.rmtree(self._run_folder, ignore_errors=True)
        deadline = time.monotonic() + _SEEN_SECONDS
        while code and not iris_records.seen_running(self._controller, self._task) and time.monotonic() < deadline:
            time.sleep(_WAIT_SECONDS)
        return code

    def _hand_over_result(self) -> None:
        if self._result is None or self._index % self._job["hosts"]:
            return
        deadline = time.monotonic() + _RESULT_SECONDS
        while True:
            try:
                return hand_over(self._controller, self._task, attempt=self._attempt, result=self._result)
            except (OSError, ValueError) as error:
                refused = isinstance(error, HTTPError) and error.code < 500
                if refused or time.monotonic() > deadline:
                    return self._write(f"the result is lost, the controller did not take it: {error}\n".encode())
                time.sleep(1.0)

    def _argv(self) -> list[str]:
        self._python = self._interpreter()
        if self._job["argv"] is not None:
            return self._job["argv"]
        code = self._run_folder / "code"
        with zipfile.ZipFile(self._folder / "assay.zip") as ours:
            ours.extractall(code)
        folders = [*(self._workspace / name for name in self._job["import_folders"]), code]
        return [self._python, str(self._folder / "run_call.py"), str(self._folder / "call.pickle"), *map(str, folders)]

    def _interpreter(self) -> str:
        if self._job["python"]:
            return self._job["python"]
        packages: list[str] = self._job["pip_packages"]
        if self._job["extras"]:
            packages = [*packages, f"{self._workspace}[{','.join(self._job['extras'])}]"]
        # In containers, Iris has installed the packages; its worker processes have no packages of the job.
        if not packages or os.environ.get("ASSAY_IRIS_SETUP"):
            return (os.environ.get("ASSAY_IRIS_SETUP") and shutil.which("python")) or sys.executable
        folder = self._run_folder / "environment"
        uv = [uv_path] if (uv_path := shutil.which("uv")) else [sys.executable, "-m", "uv"]
        python = folder / "bin" / "python"
        self._build([*uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(folder)])
        self._build([*uv, "pip", "install", "--quiet", "--python", str(python), "cloudpickle", *packages])
        return str(python)

    def _build(self, argv: list[str]) -> None:
        built = subprocess.run(argv, env=self._clean(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        self._write(built.stdout)
        built.check_returncode()

    def _working_directory(self) -> Path:
        named = Path(self._job["working_directory"])
        if named.is_absolute():
            return named
        folder = self._workspace / named
        folder.mkdir(parents=True, exist_ok=True)  # empty folders are not in the package
        return folder

    def _clean(self) -> dict[str, str]:
        job_variables = json.loads(os.environ.get("IRIS_JOB_ENV") or "{}")
        leaking = {"PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__"} - set(job_variables)
        return {name: value for name, value in os.environ.items() if name not in leaking}

    def _variables_of_its_tpu(self) -> dict[str, str]:
        known: dict[str, dict[str, str]] = self._job["variables_by_tpu_type"]
        if len(known) < 2:
            return next(iter(known.values()), {})
        tpu_type = iris_records.accelerator_of(self._controller, self._task) or os.environ.get(
            "TPU_ACCELERATOR_TYPE", ""
        )
        return known.get(tpu_type.lower(), {})

    def _variables(self) -> dict[str, str]:
        variables = {**self._variables_of_its_tpu(), **self._clean()}
        return {
            **variables,
            "PYTHONUNBUFFERED": "1",
            "ASSAY_JOB_ID": self._job_id,
            "ASSAY_JOBS": f"iris://{self._controller.partition('://')[2] or self._controller}",
            "PATH": os.pathsep.join([str(Path(self._python).parent), variables.get("PATH", os.defpath)]),
        }

    def _pass_on(self, log: int, *, wait_seconds: float) -> None:
        select.select([log], [], [], wait_seconds)
        while True:
            try:
                arrived = os.read(log, 65536)
            except BlockingIOError:
                break
            *lines, self._unfinished = (self._unfinished + arrived).split(b"\n")
            self._show(lines)
        if self._unfinished and (not wait_seconds or len(self._unfinished) > _LONGEST_LINE_BYTES):
            self._show([self._unfinished])
            self._unfinished = b""

    def _show(self, lines: Sequence[bytes]) -> None:
        texts = [line.decode(errors="replace") for line in lines]
        try:
            if texts:
                push_lines(self._controller, self._task, attempt=self._attempt, lines=texts)
        except (OSError, ValueError):
            for text in texts:
                self._write(f"{text}\n".encode())

    def _write(self, line: bytes) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while _unread(sys.stderr.fileno()) and time.monotonic() < deadline:
            time.sleep(0.0002)
        sys.stderr.buffer.write(line.decode(errors="replace").encode())
        sys.stderr.buffer.flush()


def _unread(descriptor: int) -> int:
    try:
        return struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))[0]
    except OSError:
        return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def main(arguments: list[str]) -> None:
    """Runs the replica described in the folder named by the first argument."""
    code = Replica(Path(arguments[0]).absolute()).run()
    sys.stderr.flush()
    os._exit(code)  # a thread may be blocked on an unreachable controller


if __name__ == "__main__":
    main(sys.argv[1:])
