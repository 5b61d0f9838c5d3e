"""Runs a local job: starts its replicas, retries them, and ends all of their processes.

    python -E -s -S supervise.py <job folder> [--outlives-parent]

Needs the standard library, `attempts.py` and `endings.py` in the same folder. Reads `specification.json`, receives the
job's environment as its own (so that no credential is written to disk), and updates `status.json` and
`replica-<i>.log`. Ends the job on SIGTERM and, unless it outlives its parent, when standard input, held open by the
submitting process, is closed. The option only marks this process for the supervisor of an enclosing job, which then
leaves it running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import endings
from attempts import Attempts, Final, Outcome, outcome_of

_WATCH_SECONDS = 0.5  # interval of the check for the parent; signals and a closed pipe wake the loop at once
_SWEEP_SECONDS = 0.02
_KILL_SECONDS = 30.0  # a process in an uninterruptible system call survives SIGKILL until that returns
OUTLIVES = "--outlives-parent"
_PLACE_VARIABLES = ("ASSAY_REPLICA_INDEX", "ASSAY_REPLICA_COUNT", "ASSAY_HOST_INDEX", "ASSAY_HOST_COUNT")
_DEFAULTS = {
    "replicas": 1,
    "max_retries_failure": 0,
    "max_retries_preemption": 0,
    "outlives_parent": False,
    "shielded": False,  # from signals to the process group: a further process receives them
    "place": None,  # values of the variables above for a replica of a job on several machines
}
"""Fields of `specification.json` that a submitter may omit."""
_NOT_STARTED = 127  # exit code of shells for a command that cannot be executed


class Supervisor:
    """A job, from its first attempt to its final status."""

    def __init__(self, folder: Path, specification: dict[str, Any]) -> None:
        self._folder = folder
        self._specification = specification
        self._replicas: list[subprocess.Popen[bytes] | None] = []
        self._groups: set[int] = set()  # substitute for child subreapers, which only Linux has
        self._exit_codes: dict[int, int] = {}
        self._attempts = Attempts(
            self._specification["max_retries_failure"], self._specification["max_retries_preemption"]
        )
        self._stop_reason: str | None = None
        self._ended_by: str | None = None
        self._oom = endings.OomWatch()
        self._watches_parent = not self._specification["outlives_parent"]
        self._parent_pid = os.getppid() if self._specification["shielded"] else self._specification["parent_pid"]
        self._wake_fd, _ = endings.wake_pipe()
        signal.signal(signal.SIGTERM, lambda *_: self._stop("terminated"))
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            # A handler that does nothing instead of SIG_IGN, which replicas would inherit.
            signal.signal(number, lambda *_: None)

    def run(self) -> None:
        """Attempts the job until it succeeds, is stopped, or has used up a budget."""
        final: Final | None = None
        try:
            while final is None:
                self._attempts = self._attempts.begun()
                outcome = self._attempt()
                reason = self._stop_reason if outcome == "stopped" else self._ended_by
                self._attempts, final = self._attempts.ended(outcome, reason)
                if final is None and self._stopped_within(self._attempts.pause_seconds):
                    final = Final("stopped", self._stop_reason)
        finally:
            self._end_everything()
            self._publish(*(final or Final("failed", "the supervisor failed")))

    def _attempt(self) -> Outcome:
        self._exit_codes = {}
        self._ended_by = None
        self._oom = endings.OomWatch()
        self._replicas = [self._start(index) for index in range(self._specification["replicas"])]
        if sys.platform != "linux":
            self._groups = {replica.pid for replica in self._replicas if replica}
        self._publish("running", None)
        while (outcome := self._outcome()) is None:
            self._pause(_WATCH_SECONDS)
        self._end_everything()
        return outcome

    def _outcome(self) -> Outcome | None:
        self._reap()
        starved = self._oom.has_struck()
        outcomes: list[Outcome | None] = []
        self._ended_by = None
        for code in self._codes():
            cause = None if code is None else endings.cause_of_exit(code, out_of_memory=starved)
            outcomes.append(cause and endings.ENDINGS[cause])
            if cause == "out of memory":
                self._ended_by = endings.OUT_OF_MEMORY
        return outcome_of(outcomes, stopping=self._stop_reason is not None)

    def _codes(self) -> list[int | None]:
        return [self._exit_codes.get(replica.pid) if replica else _NOT_STARTED for replica in self._replicas]

    def _start(self, index: int) -> subprocess.Popen[bytes] | None:
        specification = self._specification
        place = specification["place"] or (index, specification["replicas"], 0, 1)
        environment = {
            **os.environ,
            **dict(zip(_PLACE_VARIABLES, map(str, place), strict=True)),
            "ASSAY_ANNOUNCEMENT": str(self._folder / f"announced-{index}"),
            "ASSAY_RESULT": str(self._folder / f"result-{index}"),
        }
        for name in (f"announced-{index}", f"result-{index}"):  # leftovers of the last attempt
            (self._folder / name).unlink(missing_ok=True)
        with (self._folder / f"replica-{index}.log").open("ab", buffering=0) as log:
            if self._attempts.attempts > 1:
                log.write(f"--- attempt {self._attempts.attempts} ---\n".encode())
            try:
                return subprocess.Popen(
                    specification["argv"],
                    cwd=specification["working_directory"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    # Dies with this process; safe, as it has a single thread.
                    preexec_fn=lambda: endings.prctl(endings.PR_SET_PDEATHSIG, signal.SIGKILL),
                )
            except OSError as error:
                log.write(f"could not be started: {error}\n".encode())
                return None

    def _reap(self) -> None:
        for pid, code in endings.ended_children():
            self._exit_codes.setdefault(pid, code)

    def _end_everything(self) -> None:
        asked: set[int] = set()
        sweep_seconds = _SWEEP_SECONDS
        deadline = time.monotonic() + self._specification["grace_seconds"]
        while (left := self._left()) and time.monotonic() < deadline:
            for pid in left - asked:
                endings.send_signal(pid, signal.SIGTERM)
            asked |= left
            self._pause(sweep_seconds)  # increasing pauses: each sweep reads all of /proc
            sweep_seconds = min(sweep_seconds * 1.5, _WATCH_SECONDS)
        deadline = time.monotonic() + _KILL_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            for pid in left:
                endings.send_signal(pid, signal.SIGKILL)
            self._pause(_SWEEP_SECONDS)
        self._reap()  # the last processes may have ended since

    def _left(self) -> set[int]:
        self._reap()
        return endings.descendants(groups=self._groups, spared=_supervises_for_itself)

    def _pause(self, seconds: float) -> None:
        ready = endings.wait_for(self._wake_fd, *([0] if self._watches_parent else []), seconds=seconds)
        # A forked sibling may hold the pipe open after the parent's death; getppid() then differs.
        if self._watches_parent and (ready or os.getppid() != self._parent_pid):
            self._watches_parent = False
            self._stop("the process that submitted it has ended")

    def _stopped_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._stop_reason and (remaining := deadline - time.monotonic()) > 0:
            self._pause(remaining)
        return self._stop_reason is not None

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason

    def _publish(self, status: str, reason: str | None) -> None:
        codes = self._codes()
        content = {
            "status": status,
            "reason": reason,
            **self._attempts.counts,
            "ended_by": self._ended_by,
            "supervisor_pid": os.getpid(),
            "replicas": [
                {"pid": replica.pid if replica else None, "exit_code": code}
                for replica, code in zip(self._replicas, codes, strict=True)
            ],
        }
        unfinished = self._folder / "status.json.unfinished"
        try:
            unfinished.write_text(json.dumps(content))
            unfinished.replace(self._folder / "status.json")
        except OSError as error:
            print(f"status {status} could not be written: {error}", file=sys.stderr, flush=True)


def _supervises_for_itself(pid: int) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.fsencode(__file__) in arguments and OUTLIVES.encode() in arguments


def _step_aside() -> None:
    child = os.fork()
    if child == 0:
        return
    signal.signal(signal.SIGTERM, lambda *_: endings.send_signal(child, signal.SIGTERM))
    endings.prctl(endings.PR_SET_PDEATHSIG, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def main(arguments: list[str]) -> None:
    """Supervises the job in the folder named by the first argument."""
    folder = Path(arguments[0])
    specification = {**_DEFAULTS, **json.loads((folder / "specification.json").read_text())}
    if specification["shielded"]:
        _step_aside()
    endings.prctl(endings.PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(folder, specification).run()


if __name__ == "__main__":
    main(sys.argv[1:])
