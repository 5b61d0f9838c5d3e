"""Runs a job as a batch job of Slurm: starts its replicas with srun, retries them, and writes its status.

    python -E -s -S slurm_batch.py <folder of the job, visible to all nodes>

Needs the standard library, and the other programs in the same folder. A single `srun` starts all replicas, each below
its own supervisor, which ends the replica in order when its standard input is closed: a pipe from this program, through
Slurm. Signals: SIGUSR1 reports that the time limit is near, SIGUSR2 requests the end of the job, SIGTERM reports that
Slurm takes the machines away. Slurm sends SIGTERM to all processes at once, and within a grace
time to those of replicas alone, so replicas may end before this program receives it: it queries Slurm to classify their
ends. Slurm requeues a job that has lost its machines, and this program then continues with the previous counts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from attempts import FINISHED, Attempts, Final, Outcome, outcome_of
from endings import classify_exit, outcome_of_supervised, wait_for, wake_pipe

_LATEST_CLOCK_SECONDS = 300.0  # munge rejects machines with a larger clock difference
_END_SECONDS = 45.0  # a supervisor takes 30 s to detect a process that survives SIGKILL
_WATCH_SECONDS = 0.5
_REQUEUE_SECONDS = 60.0
_TIME_LIMIT = "its time limit is near"
_TAKEN_AWAY = "Slurm takes its machines away"
_ASK_SECONDS = 60.0
_RUNS = {"RUNNING", "SUSPENDED", "CONFIGURING", "RESIZING", "SIGNALING"}
"""States of a batch job that still owns its machines; `scontrol` reports COMPLETING before the processes notice."""
_TASK = 'trap : TERM; "$1" -E -s -S "$2" "$3/task-$SLURM_PROCID"; echo "$? $(cat "$3/task-$SLURM_PROCID/status.json")"'
"""Command for srun: the supervisor; exit code and last status, which srun returns faster than a file system would."""
_REPORTED = re.compile(rb" *(\d+): (\d+) (\{.*\})?")
"""Output of the command: index of the replica, exit code, status."""


class Batch:
    """A job, from this start of its batch job on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._job: dict[str, Any] = json.loads((folder / "specification.json").read_text())
        self._status: dict[str, Any] = json.loads((folder / "status.json").read_text())
        self._attempts = Attempts(
            self._job["max_retries_failure"],
            self._job["max_retries_preemption"],
            *(self._status[name] for name in ("attempts", "failures", "preemptions")),
        )
        self._ended_by: str | None = None
        self._stop_reason: str | None = None
        self._taken_away: str | None = None
        self._all_ended = True
        self._lease = ""
        self._lease_seen_at = time.monotonic()
        self._looked_at = 0.0
        self._wake_fd, _ = wake_pipe()
        signal.signal(signal.SIGUSR1, lambda *_: self._lose(_TIME_LIMIT))
        signal.signal(signal.SIGTERM, lambda *_: self._lose(_TAKEN_AWAY))
        signal.signal(signal.SIGUSR2, lambda *_: self._stop("terminated"))

    def run(self) -> int:
        """Attempts the job until it has ended and its status is published, or until it loses its machines."""
        if self._status["status"] in FINISHED:
            return 0  # requeued after its end
        final: Final | None = None
        if self._status["status"] == "running":  # an earlier start of this batch job was cut off
            self._attempts, final = self._attempts.ended("preempted")
        if self._is_orphan():
            self._stop("the process that submitted it had ended before it began")
        while final is None and not self._stop_reason and not self._taken_away:
            self._attempts = self._attempts.begun()
            outcome = self._attempt()
            if not self._taken_away and _is_taken_away(_said_by_scontrol()):
                self._lose(_TAKEN_AWAY)
            if self._stop_reason and outcome != "succeeded":
                outcome = "stopped"
            if self._taken_away != _TAKEN_AWAY and (outcome == "succeeded" or not self._taken_away):
                self._attempts, final = self._attempts.ended(outcome, self._stop_reason or self._ended_by)
                if final is None:
                    self._stopped_within(self._attempts.pause_seconds)
        if final is None and self._stop_reason:
            final = Final("stopped", self._stop_reason)
        return self._publish(*final) if final else self._go_back_into_the_queue()

    def _attempt(self) -> Outcome:
        self._ended_by = None
        replicas: int = self._job["replicas"]
        for index in range(replicas):
            self._prepare(index, replicas)
        self._publish("running", None)
        ends: dict[int, Outcome] = {}
        unknown: deque[str] = deque(maxlen=5)
        srun = subprocess.Popen(
            [
                *("srun", "--label", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL"),
                *(f"--ntasks={replicas}", f"--cpus-per-task={self._job['cpus']}"),
                *("sh", "-c", _TASK, "sh", sys.executable, str(Path(__file__).with_name("supervise.py"))),
                str(self._folder),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert srun.stdin is not None and srun.stdout is not None
        deadline: float | None = None
        unfinished = b""
        while True:
            if deadline is None and (self._is_to_end() or any(outcome != "succeeded" for outcome in ends.values())):
                srun.stdin.close()
                deadline = time.monotonic() + self._job["grace_seconds"] + _END_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                srun.kill()
            if not wait_for(self._wake_fd, srun.stdout.fileno(), seconds=_WATCH_SECONDS):
                continue
            arrived = os.read(srun.stdout.fileno(), 65536)
            *lines, unfinished = (unfinished + arrived).split(b"\n")
            for line in lines:
                if match := _REPORTED.fullmatch(line):
                    status, code = json.loads(match[3] or "{}"), int(match[2])
                    index, stopping = int(match[1]), deadline is not None
                    ends[index] = outcome_of_supervised(status, supervisor_code=code, stopping=stopping)
                    self._ended_by = self._ended_by or status.get("ended_by")
                elif line.strip():
                    unknown.append(line.decode(errors="replace"))
                    print(unknown[-1], flush=True)
            if not arrived:
                break
        code = srun.wait()
        self._all_ended = all(index in ends or self._has_said_its_end(index) for index in range(replicas))
        if outcome := outcome_of(ends.get(index) for index in range(replicas)):
            return outcome
        if classify_exit(code) == "preempted":
            return "preempted"
        self._ended_by = f"its replicas could not be started: {unknown[-1] if unknown else ''}"
        return "failed"

    def _has_said_its_end(self, index: int) -> bool:
        content = _read(self._folder / f"task-{index}" / "status.json")
        return bool(content) and json.loads(content)["status"] in FINISHED

    def _prepare(self, index: int, replicas: int) -> None:
        task = self._folder / f"task-{index}"
        task.mkdir(exist_ok=True)
        for name in ("status.json", "announced-0", "result-0"):  # leftovers of the last attempt
            (task / name).unlink(missing_ok=True)
        if self._attempts.attempts > 1:
            with (task / "replica-0.log").open("ab") as log:
                log.write(f"--- attempt {self._attempts.attempts} ---\n".encode())
        specification = {
            "argv": self._job["argv"],
            "working_directory": self._job["working_directory"],
            "grace_seconds": self._job["grace_seconds"],
            "shielded": True,
            "parent_pid": None,
            "place": [index, replicas, 0, 1],
        }
        (task / "specification.json").write_text(json.dumps(specification))

    def _is_to_end(self) -> bool:
        if not self._stop_reason and time.monotonic() - self._looked_at > self._job["poll_seconds"]:
            self._looked_at = time.monotonic()
            if self._submitter_is_silent() or self._parent_has_ended():
                self._stop("the process that submitted it has ended")
        return bool(self._stop_reason or self._taken_away)

    def _submitter_is_silent(self) -> bool:
        if self._job["outlives_parent"]:
            return False
        lease = _read(self._folder / "lease")
        if lease != self._lease:
            self._lease, self._lease_seen_at = lease, time.monotonic()
        return time.monotonic() - self._lease_seen_at > self._job["lease_seconds"]

    def _parent_has_ended(self) -> bool:
        parent = None if self._job["outlives_parent"] else self._job["parent"]
        content = _read(self._folder.parent / parent / "status.json") if parent else ""
        return bool(content) and json.loads(content)["status"] in FINISHED

    def _is_orphan(self) -> bool:
        lease = _read(self._folder / "lease")
        if self._job["outlives_parent"] or not lease:
            return False
        return time.time() - float(lease) > self._job["lease_seconds"] + _LATEST_CLOCK_SECONDS

    def _go_back_into_the_queue(self) -> int:
        print(self._taken_away, flush=True)
        self._publish("running", None, left_machines=True)
        if self._taken_away == _TIME_LIMIT:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            requeued = subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=False)
            if requeued.returncode == 0:  # the requeue ends this process
                time.sleep(_REQUEUE_SECONDS)
        return 128 + signal.SIGTERM

    def _stopped_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_to_end() and (remaining := deadline - time.monotonic()) > 0:
            wait_for(self._wake_fd, seconds=remaining)

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason

    def _lose(self, reason: str) -> None:
        self._taken_away = self._taken_away or reason

    def _publish(self, status: str, reason: str | None, *, left_machines: bool = False) -> int:
        content = {
            "status": status,
            "reason": reason,
            **self._attempts.counts,
            "left_machines": left_machines,
            "all_ended": left_machines and self._all_ended,
        }
        unfinished = self._folder / "status.json.unfinished"
        unfinished.write_text(json.dumps(content))
        unfinished.replace(self._folder / "status.json")
        return 0


def _said_by_scontrol() -> str:
    command = ("scontrol", "--oneliner", "show", "job", os.environ["SLURM_JOB_ID"])
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False).stdout
    except subprocess.TimeoutExpired:
        return ""


def _is_taken_away(description: str) -> bool:
    fields = dict(re.findall(r"(?:^|\s)(JobState|PreemptTime)=(\S+)", description))
    return fields.get("JobState", "RUNNING") not in _RUNS or fields.get("PreemptTime", "None") != "None"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # a shared file system that is temporarily unavailable
        return ""


def main(arguments: list[str]) -> None:
    """Runs the job in the folder named by the first argument."""
    code = Batch(Path(arguments[0])).run()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
