"""The owner's side of a Kubernetes job: starts attempts and counts their ends, with a budget for each kind of end.

Each step reads the cluster's state and takes at most a single action. All persistent state is in the record, written
before each action, so that a restarted owner continues where the last owner stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resources.backends.kubernetes.endings import end_attempt, keep_results
from resources.backends.kubernetes.manifests import Submission, attempt_manifest, secret_manifest, service_manifest
from resources.backends.kubernetes.names import attempt_name, selector
from resources.backends.kubernetes.pods import (
    GONE,
    PodState,
    attempt_outcome,
    given_up,
    states_by_index,
    without_collateral,
)
from resources.backends.kubernetes.records import Record, read_record, write_record
from resources.backends.programs.attempts import Attempts
from resources.backends.programs.run_in_pod import ORPHANED
from resources.jobs.jobs import JobStatus

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster

TERMINATED = "terminated"


class OwnedJob:
    """A job that this process owns and advances."""

    def __init__(self, cluster: Cluster, record: Record, submission: Submission) -> None:
        self._cluster = cluster
        self._record = record
        self._submission = submission
        self._lock = threading.Lock()
        self._ends = False  # pods that disappear from now on are not preempted
        self._started: set[int] = set()
        self._begin_at = 0.0  # monotonic start time of the next attempt
        self._since: dict[str, float] = {}

    @property
    def record(self) -> Record:
        return self._record

    def step(self) -> Record:
        """Advances the job by a step; does nothing once it has finished or is being ended."""
        with self._lock:
            if not self._record.finished and not self._ends:
                self._step()
            return self._record

    def begin_to_end(self) -> None:
        """Deletes the current attempt without waiting for its end; call `abandon` next."""
        with self._lock:
            self._ends = True
            if not self._record.finished and self._record.attempts:
                self._cluster.delete(self._record.kind, attempt_name(self._record.job_id, self._record.attempts))

    def abandon(self) -> None:
        """Ends the job because its parent ends; unlike `step` after a stop request, it keeps no logs."""
        self._give_up(JobStatus.STOPPED, ORPHANED)

    def fail(self, reason: str) -> None:
        """Ends a job that cannot be advanced any more, and marks it failed."""
        self._give_up(JobStatus.FAILED, reason)

    def _give_up(self, status: JobStatus, reason: str) -> None:
        with self._lock:
            if not self._record.finished:
                if self._record.attempts:
                    end_attempt(self._cluster, self._record, keep_logs=False)
                self._write(status=status, reason=reason, counted=self._record.attempts)

    def _step(self) -> None:
        stored = read_record(self._cluster, self._record.job_id)
        if stored is None or stored[1]:
            if self._record.attempts > self._record.counted:
                end_attempt(self._cluster, self._record)
            self._write(status=JobStatus.STOPPED, reason=TERMINATED, counted=self._record.attempts)
        elif self._record.attempts > self._record.counted:
            self._watch()
        elif time.monotonic() >= self._begin_at:
            self._write(attempts=self._record.attempts + 1)
            self._start()

    def _start(self) -> None:
        record = self._record
        manifest = attempt_manifest(self._submission, record.attempts)
        job = self._cluster.create(record.kind, manifest)
        self._cluster.create("secrets", secret_manifest(self._submission.files, job=job))
        if record.pods > 1 and record.kind == "jobs":  # a JobSet creates its own
            self._cluster.create("services", service_manifest(job=job))
        if self._submission.owner.queue is None:
            self._cluster.patch(record.kind, attempt_name(record.job_id, record.attempts), {"spec": {"suspend": False}})
        self._started.add(record.attempts)
        self._since = {}

    def _watch(self) -> None:
        record = self._record
        mine = selector(job=record.job_id, attempt=record.attempts)
        pods = self._cluster.list("pods", mine)  # before the Job: Kueue may admit it in between
        job = self._cluster.get(record.kind, attempt_name(record.job_id, record.attempts))
        if record.attempts not in self._started and (job is None or job["spec"].get("suspend")):
            self._start()  # an earlier owner died during the start
            return
        self._started.add(record.attempts)
        if job is None:
            outcome: PodState | None = replace(GONE, reason="its Job was deleted")
        elif self._submission.owner.queue is not None and job["spec"].get("suspend"):
            outcome = self._queued(pods)
        else:
            outcome = self._outcome(job, pods, mine)
        if outcome is not None:
            self._conclude(outcome, job)

    def _queued(self, pods: list[dict[str, Any]]) -> PodState | None:
        queue = self._submission.owner.queue
        if pods or self._record.status == JobStatus.RUNNING:
            return replace(GONE, reason=f"Kueue has given its place in the queue {queue} to another")
        self._write(status=JobStatus.PENDING, reason=f"waits in the queue {queue}: Kueue has not admitted it yet")
        return None

    def _outcome(self, job: dict[str, Any], pods: list[dict[str, Any]], mine: str) -> PodState | None:
        states = self._states(job, pods, mine)
        outcome = attempt_outcome(states)
        if outcome is None and (failure := given_up(job)):  # the pods have ended since the listing
            outcome = attempt_outcome(self._states(job, self._cluster.list("pods", mine), mine)) or failure
        outcome = outcome or self._overdue(states)
        if outcome is None:
            self._write(**_progress(states))
        return outcome

    def _states(self, job: dict[str, Any], pods: list[dict[str, Any]], mine: str) -> list[PodState]:
        record, jobs = self._record, [job]
        if record.kind == "jobsets":
            jobs, pods = (without_collateral(objects, job) for objects in (self._cluster.list("jobs", mine), pods))
        return states_by_index(pods, count=record.pods, vms=record.vms, jobs=jobs)

    def _conclude(self, outcome: PodState, job: dict[str, Any] | None) -> None:
        record = self._record
        if record.returns and outcome.standing != "preempted":
            keep_results(self._cluster, record)
        # Kueue would admit a suspended Job again, and it would run in parallel to the next attempt.
        if (job is not None and job["spec"].get("suspend")) or not self._all_ended():
            end_attempt(self._cluster, record)
        request = self._submission.request
        before = Attempts(
            request.max_retries_failure,
            request.max_retries_preemption,
            record.attempts,
            record.failures,
            record.preemptions,
        )
        assert outcome.outcome is not None
        after, final = before.ended(outcome.outcome, outcome.reason)
        if final is None:
            self._begin_at = time.monotonic() + after.pause_seconds
            final = JobStatus.PENDING, f"to be tried again after: {outcome.reason}"
        self._write(**after.counts, counted=record.attempts, status=JobStatus(final[0]), reason=final[1])

    def _all_ended(self) -> bool:
        pods = self._cluster.list("pods", selector(job=self._record.job_id, attempt=self._record.attempts))
        return len(pods) == self._record.pods and all(
            pod.get("status", {}).get("phase") in {"Succeeded", "Failed"} for pod in pods
        )

    def _overdue(self, states: Sequence[PodState]) -> PodState | None:
        stuck = [state for state in states if state.standing == "stuck"]
        waiting = [state for state in states if state.standing in {"pending", "stuck"}]
        if self._lasts("stuck", bool(stuck), self._submission.bounds.stuck_seconds):
            return PodState("failed", stuck[0].reason)
        if self._lasts("partial", 0 < len(waiting) < len(states), self._submission.bounds.gang_seconds):
            running = len(states) - len(waiting)
            return PodState("preempted", f"only {running} of {len(states)} pods could start: {waiting[0].reason}")
        return None

    def _lasts(self, condition: str, holds: bool, seconds: float) -> bool:
        if not holds:
            self._since.pop(condition, None)
            return False
        return time.monotonic() - self._since.setdefault(condition, time.monotonic()) >= seconds

    def _write(self, **changes: Any) -> None:
        changed = replace(self._record, **changes)
        if changed != self._record:
            write_record(self._cluster, changed)
            self._record = changed


def _progress(states: Sequence[PodState]) -> dict[str, Any]:
    waiting = [state for state in states if state.standing in {"pending", "stuck"}]
    if not waiting:
        return {"status": JobStatus.RUNNING, "reason": None}
    place = f"{len(states) - len(waiting)} of {len(states)} pods run; " if len(states) > 1 else ""
    return {"status": JobStatus.PENDING, "reason": f"{place}{waiting[0].reason}"}
