"""Records that the replicas of an Iris job and its submitting process exchange through the controller.

Iris stores addresses under names; each address is used as a small record. All records of a job share a name, so that a
single call lists them: a record per replica, the lease that the submitting process renews, and the stop request. Needs
the standard library only: it runs in the folder of `iris_replica.py`.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

NAME = "assay"
"""Last part of the name of a job's records; the job's id precedes it."""
LEASE, STOP = "lease", "stop"
MARK, GAVE_UP = "[assay] ", "gave up: "
"""Prefixes of the line in which a replica reports how it ended; Iris also keeps it as the attempt's error."""
WAITING, RUNNING, DONE, ENDING, STOPPED = "waiting", "running", "done", "ending", "stopped"
RESULTS = "/assay/results"
"""Key prefix in the controller's log for the results of tasks; the logs of a job do not include it."""
_CONTROLLER, _LOG = "iris.cluster.ControllerService", "finelog.logging.LogService"
_TIMEOUT_SECONDS = 10.0
_FAST_SECONDS = 0.2
_SUCCEEDED = "TASK_STATE_SUCCEEDED"
_LOST = {"TASK_STATE_WORKER_FAILED", "TASK_STATE_PREEMPTED", "TASK_STATE_COSCHED_FAILED"}
"""States of a task that Iris does not restart, and that do not end its job while another task of it runs."""


def call_controller(controller: str, method: str, /, *, service: str = _CONTROLLER, **fields: Any) -> dict[str, Any]:
    """Calls Iris' controller by JSON over HTTP and returns the decoded answer.

    Raises:
        OSError: the controller is unreachable or refuses.
        ValueError: the answer is not JSON.
    """
    base = controller if "://" in controller else f"http://{controller}"
    request = urllib.request.Request(
        f"{base}/{service}/{method}", data=json.dumps(fields).encode(), headers={"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy inside a cluster
    try:
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            return json.load(answer)
    except HTTPException as error:  # a truncated answer; HTTPException is not an OSError
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def hand_over(controller: str, task: str, *, attempt: int, result: bytes) -> None:
    """Writes the result of a task's attempt to the controller's log for job handles; raises as `call_controller`."""
    entry = {"data": base64.b64encode(result).decode()}
    call_controller(controller, "PushLogs", service=_LOG, key=f"{RESULTS}{task}:{attempt}", entries=[entry])


def push_lines(controller: str, task: str, *, attempt: int, lines: Sequence[str]) -> None:
    """Appends lines of a task's attempt to the controller's log, all in a single call; raises as `call_controller`."""
    now = {"epochMs": str(int(time.time() * 1000))}
    entries = [{"timestamp": now, "source": "stdout", "data": line, "attemptId": attempt} for line in lines]
    call_controller(controller, "PushLogs", service=_LOG, key=f"{task}:{attempt}", entries=entries)


def seen_running(controller: str, task: str) -> bool:
    """Returns True if the controller has recorded the current attempt of a task as running.

    Iris attributes earlier failures to the machine, and after ten of them gives up the machine with everything on it.
    """
    try:
        seen = call_controller(controller, "GetTaskStatus", taskId=task)["task"]
    except (OSError, ValueError, KeyError):
        return False
    return seen["state"] not in ("TASK_STATE_ASSIGNED", "TASK_STATE_BUILDING")


def accelerator_of(controller: str, task: str) -> str | None:
    """Returns the accelerator type of a task's worker, or None if the controller does not report it."""
    try:
        worker_id = call_controller(controller, "GetTaskStatus", taskId=task)["task"]["workerId"]
        worker = call_controller(controller, "GetWorkerStatus", id=worker_id)["worker"]
        return worker["metadata"]["attributes"]["device-variant"]["stringValue"]
    except (OSError, ValueError, KeyError):
        return None


@dataclass(kw_only=True)
class Records:
    """Publishes this replica's record and polls those of the others in a background thread."""

    controller: str
    job_id: str
    index: int
    count: int
    attempt: int
    poll_seconds: float
    lease_seconds: float | None

    def __post_init__(self) -> None:
        self.stop_reason: str | None = None
        self.asked_to_stop = False
        self.lost: str | None = None  # error of a replica that Iris lets the others wait for, but will not restart
        self._beat: str | None = None
        self._beat_at = time.monotonic()
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._mine: dict[str, Any] = {"state": WAITING, "restarts": 0, "announcement": None, "round": ""}
        self._published: dict[str, Any] | None = None
        self._others: dict[int, dict[str, str]] = {}

    def start(self) -> None:
        """Starts the background thread."""
        self._changed.set()
        threading.Thread(target=self._keep, daemon=True).start()

    def say(self, **changes: Any) -> None:
        """Changes this replica's published record."""
        with self._lock:
            if any(self._mine[name] != value for name, value in changes.items()):
                self._mine.update(changes)
                self._changed.set()

    def all_ready(self) -> bool:
        """Publishes the current round for this replica, and returns True once all replicas have published the same."""
        if (current := self._current_round()) is None:
            self.say(round="")
            return False
        self.say(round=current)
        return (
            self._published is not None
            and self._published["round"] == current
            and self._others_say((WAITING, RUNNING, DONE), current)
        )

    def all_done(self) -> bool:
        """Returns True if every other replica of this round has succeeded."""
        return self._others_say((DONE,), self._mine["round"])

    def out_of_step(self) -> bool:
        """Returns True if another replica is gone, is ending, or has restarted: then all replicas restart."""
        others = dict(self._others)
        gone = len(others) < self.count - 1
        return gone or self._current_round() != self._mine["round"]

    def others_run(self) -> bool:
        """Returns True if the record of another replica has the state "running"."""
        return any(record.get("state") == RUNNING for record in dict(self._others).values())

    def _others_say(self, states: tuple[str, ...], current: str) -> bool:
        others = list(dict(self._others).values())
        return len(others) == self.count - 1 and all(
            record.get("finished") or (record.get("state") in states and record.get("round") == current)
            for record in others
        )

    def _current_round(self) -> str | None:
        others = dict(self._others)
        if len(others) < self.count - 1 or any(record.get("state") == ENDING for record in others.values()):
            return None
        if any(record.get("finished") for record in others.values()):
            return self._mine["round"]
        versions = {index: record.get("version", "") for index, record in others.items()}
        versions[self.index] = f"{self.attempt}.{self._mine['restarts']}"
        return " ".join(versions[index] for index in sorted(versions))

    def _keep(self) -> None:
        while True:
            in_step = self.count == 1 or self._mine["state"] == RUNNING
            calm = in_step and self._published is not None
            self._changed.wait(self.poll_seconds if calm else min(_FAST_SECONDS, self.poll_seconds))
            self._changed.clear()
            try:
                with suppress(urllib.error.HTTPError):  # Iris refuses records of an attempt that it has given up
                    self._publish()
                self._look()
            except (OSError, ValueError):
                self._beat_at = time.monotonic()  # the submitter may not have reached it either
                self._changed.wait(_FAST_SECONDS)

    def _publish(self) -> None:
        with self._lock:
            mine = dict(self._mine)
        if mine == self._published:
            return
        metadata = {name: str(value) for name, value in mine.items() if value is not None}
        call_controller(
            self.controller,
            "RegisterEndpoint",
            name=f"{self.job_id}/{NAME}",
            endpointId=f"{self.job_id}#{self.index}",
            address=f"replica {self.index}",
            taskId=f"{self.job_id}/{self.index}",
            attemptId=self.attempt,
            metadata={**metadata, "version": f"{self.attempt}.{mine['restarts']}"},
        )
        self._published = mine

    def _look(self) -> None:
        answer = call_controller(self.controller, "ListEndpoints", prefix=f"{self.job_id}/{NAME}", exact=True)
        records = {
            record["endpointId"].rpartition("#")[2]: record.get("metadata", {})
            for record in answer.get("endpoints", [])
        }
        if str(self.index) not in records:
            self._published = None  # lost by a restart of the controller, or the attempt was given up
        others = {int(key): record for key, record in records.items() if key.isdigit() and int(key) != self.index}
        for index in range(self.count) if self.count > 1 else ():
            if index in others or index == self.index:
                continue
            task = call_controller(self.controller, "GetTaskStatus", taskId=f"{self.job_id}/{index}").get("task", {})
            if task.get("state") == _SUCCEEDED:
                others[index] = {"state": DONE, "finished": "yes"}
            elif task.get("state") in _LOST:
                self.lost = f"replica {index} is lost: {task.get('error') or task['state']}"
        self._others = others
        if STOP in records and not self.stop_reason:
            self.asked_to_stop = True
            self.stop_reason = records[STOP].get("reason") or "terminated"
        if (beat := records.get(LEASE, {}).get("beat")) is not None and beat != self._beat:
            self._beat, self._beat_at = beat, time.monotonic()
        if self.lease_seconds is not None and time.monotonic() - self._beat_at > self.lease_seconds:
            self.stop_reason = self.stop_reason or "the process that submitted it has ended"
