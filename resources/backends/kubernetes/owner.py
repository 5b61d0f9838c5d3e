"""The owner's side of a Kubernetes job: starts attempts, counts their ends, and keeps their logs and results.

Each step reads the cluster's state and takes at most a single action. All persistent state is in the record, written
before each action, so that a restarted owner continues where the last owner stopped. Kubernetes deletes logs and
results together with the pods, so the end of an attempt stores them in ConfigMaps.

The owner is a thread of the submitting process, or this module as the program of a keeper pod, which needs an image
with Assay and its `kubernetes` extra, and a service account with the rights of the submitting user:
`python -m resources.backends.kubernetes.owner <file with the pickled submission>`.
"""

from __future__ import annotations

import base64
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cloudpickle

from resources.backends.kubernetes.cluster import Cluster, connect
from resources.backends.kubernetes.logs import stamp_of, without_times
from resources.backends.kubernetes.manifests import (
    ANNOUNCER,
    MAIN,
    Submission,
    attempt_manifest,
    config_map_manifest,
    secret_manifest,
    service_manifest,
)
from resources.backends.kubernetes.names import attempt_name, labels, logs_name, result_name, selector
from resources.backends.kubernetes.pods import (
    GONE,
    PodState,
    attempt_outcome,
    given_up,
    pod_index,
    states_by_index,
    without_collateral,
)
from resources.backends.kubernetes.records import Record, beat, read_record, write_record
from resources.backends.programs.attempts import Attempts
from resources.errors import AssayError, BackendUnavailable, JobTimeout
from resources.jobs.jobs import JobStatus, growing_pauses
from resources.jobs.waiting import no_such_job

TERMINATED = "terminated"
_KEPT_LOGS_BYTES = 900_000  # over all pods of an attempt: a ConfigMap holds 1 MiB
_KEPT_LINES = 20_000
_RESULT_LINES = 100  # the largest result has 87 lines, plus the last announcement
_LAST_WORDS_SECONDS = 1.0
_KEEPER_POLL_SECONDS = 0.5
_BEATS_PER_LEASE = 10
_NODE_SECONDS = 60.0  # a kubelet that has not ended a pod this long after its grace time is gone


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
        self._beaten_at = -inf

    @property
    def record(self) -> Record:
        return self._record

    def step(self) -> Record:
        """Renews the heartbeat and advances the job by a step; does nothing once it has finished or is being ended."""
        with self._lock:
            if not self._record.finished and not self._ends:
                self._step()
            return self._record

    def terminate(self) -> None:
        """Ends the job on request, and returns when none of its pods is left."""
        with self._lock:
            if not self._record.finished:
                self._stop()

    def begin_to_end(self) -> None:
        """Deletes the current attempt without waiting for its end; call `give_up` next."""
        with self._lock:
            self._ends = True
            if not self._record.finished and self._record.attempts:
                self._cluster.delete(self._record.kind, attempt_name(self._record.job_id, self._record.attempts))

    def give_up(self, status: JobStatus, reason: str) -> None:
        """Ends a job that is not advanced any more; unlike `step` after a stop request, it keeps no logs."""
        with self._lock:
            if not self._record.finished:
                if self._record.attempts:
                    end_attempt(self._cluster, self._record, keep_logs=False)
                self._write(status=status, reason=reason, counted=self._record.attempts)

    def _step(self) -> None:
        if time.monotonic() - self._beaten_at >= self._record.lease_seconds / _BEATS_PER_LEASE:
            beat(self._cluster, self._record.job_id)
            self._beaten_at = time.monotonic()
        stored = read_record(self._cluster, self._record.job_id)
        if stored is None or stored[1]:
            self._stop()
        elif self._record.attempts > self._record.counted:
            self._watch()
        elif time.monotonic() >= self._begin_at:
            self._write(attempts=self._record.attempts + 1)
            self._start()

    def _stop(self) -> None:
        if self._record.attempts > self._record.counted:
            end_attempt(self._cluster, self._record)
        self._write(status=JobStatus.STOPPED, reason=TERMINATED, counted=self._record.attempts)

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
            _keep_results(self._cluster, record)
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
        if self._lasts("stuck", bool(stuck), self._submission.owner.stuck_seconds):
            return PodState("failed", stuck[0].reason)
        if self._lasts("partial", 0 < len(waiting) < len(states), self._submission.owner.gang_seconds):
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


def end_attempt(cluster: Cluster, record: Record, *, keep_logs: bool = True) -> None:
    """Ends the current attempt, stores the last lines of its logs, and returns when none of its pods is left."""
    name = attempt_name(record.job_id, record.attempts)
    pods = selector(job=record.job_id, attempt=record.attempts)
    present = cluster.list("pods", pods) if keep_logs else []
    followers = [_Follower(cluster, pod["metadata"]["name"], pod_index(pod, vms=record.vms)) for pod in present]
    cluster.delete(record.kind, name)
    force_at = time.monotonic() + record.grace_seconds + _NODE_SECONDS
    give_up_at = force_at + _NODE_SECONDS
    pauses = growing_pauses()
    while (left := cluster.list("pods", pods)) or cluster.get(record.kind, name):
        if time.monotonic() > give_up_at:
            raise JobTimeout(
                expected=f"the pods of {name} to be gone, {2 * _NODE_SECONDS + record.grace_seconds:g} s after the end",
                found=f"{len(left)} left: {', '.join(pod['metadata']['name'] for pod in left)}",
                remedy="See `kubectl describe pod` for a finalizer, or for a node that is gone.",
            )
        if time.monotonic() > force_at:
            for pod in left:
                cluster.delete("pods", pod["metadata"]["name"], grace_seconds=0)
        time.sleep(next(pauses))
    share = _KEPT_LOGS_BYTES // max(1, len(followers))
    kept = {f"pod-{follower.index}": follower.text(share) for follower in followers}
    if kept:
        tags = labels(record.job_id, "logs", attempt=record.attempts)
        cluster.create("configmaps", config_map_manifest(logs_name(record.job_id, record.attempts), tags, kept))


def _keep_results(cluster: Cluster, record: Record) -> None:
    for pod in cluster.list("pods", selector(job=record.job_id, attempt=record.attempts)):
        replica, vm = divmod(pod_index(pod, vms=record.vms), record.vms)
        with suppress(BackendUnavailable):  # a job must end even if its result is rejected
            if vm == 0 and (text := _result_in(cluster, pod["metadata"]["name"])):
                tags = labels(record.job_id, "result", attempt=record.attempts)
                name = result_name(record.job_id, record.attempts, replica)
                cluster.create("configmaps", config_map_manifest(name, tags, {"result": text}))


def _result_in(cluster: Cluster, pod: str) -> str | None:
    lines = without_times(cluster.log(pod, ANNOUNCER, max_lines=_RESULT_LINES) or "")
    pieces: dict[int, bytes] = {}
    expected = 0
    for line in lines.splitlines():
        with suppress(ValueError, TypeError, KeyError):  # announcements, or the traceback of a killed program
            piece = json.loads(line)
            pieces[piece["piece"]] = base64.b64decode(piece["result"])
            expected = piece["pieces"]
    whole = b"".join(pieces[index] for index in sorted(pieces))
    return base64.b64encode(whole).decode() if pieces and len(pieces) == expected else None


class _Follower:
    def __init__(self, cluster: Cluster, pod: str, index: int) -> None:
        self.index = index
        self._cluster, self._pod = cluster, pod
        self._content = b""
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        self._connected.wait(_NODE_SECONDS)  # otherwise the pod might be deleted before its last lines are read

    def text(self, max_bytes: int) -> str:
        self._thread.join(_LAST_WORDS_SECONDS)
        content = self._content  # the thread keeps running if the pod's node is gone, and its connection stays open
        is_whole = len(content) <= max_bytes and content.count(b"\n") < _KEPT_LINES
        if len(content) > max_bytes:
            content = content[-max_bytes:].partition(b"\n")[2]
        text = content.decode(errors="replace").replace("\0", "")
        return text if is_whole else f"{text.partition(' ')[0]} (earlier lines of this log are not kept)\n{text}"

    def _follow(self) -> None:
        try:
            for chunk in self._cluster.follow_log(self._pod, MAIN, max_lines=_KEPT_LINES, connected=self._connected):
                self._content = (self._content + chunk)[-_KEPT_LOGS_BYTES - 1 :]  # a byte more: the log was longer
        except BackendUnavailable as error:
            now = stamp_of(datetime.now(UTC))
            self._content += f"{now} (the rest of this log could not be read: {error.found})\n".encode()
        finally:
            self._connected.set()


def keep(arguments: list[str]) -> None:
    """Reads the submission, and advances the job from its recorded state until it has finished."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise the first process of a pod ignores SIGTERM
    submission: Submission = cloudpickle.loads(Path(arguments[0]).read_bytes())
    job_id = submission.job_id
    cluster = connect("", urlsplit(submission.owner.jobs_url).path.strip("/"))
    stored = read_record(cluster, job_id)
    if stored is None:
        raise no_such_job(f"in {cluster.namespace}", job_id, "Its record is gone: submit it again.")
    job = OwnedJob(cluster, stored[0], submission)
    while not job.record.finished:
        with suppress(AssayError):  # a cluster that is temporarily unavailable does not end the job
            job.step()
        time.sleep(_KEEPER_POLL_SECONDS)


if __name__ == "__main__":
    keep(sys.argv[1:])
