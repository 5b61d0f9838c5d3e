"""Handle on a job in a cluster: reads its record, its logs and its results, and requests its end from its owner."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from resources.backends.kubernetes.logs import moment_of, without_times
from resources.backends.kubernetes.manifests import ANNOUNCER, MAIN
from resources.backends.kubernetes.names import keeper_pod_name, logs_name, result_name, selector
from resources.backends.kubernetes.owner import TERMINATED, OwnedJob, end_attempt
from resources.backends.kubernetes.pods import pod_index
from resources.backends.kubernetes.records import Record, as_seen, read_record, request_stop, write_record
from resources.errors import JobTimeout
from resources.jobs.jobs import JobDetails, JobStatus
from resources.jobs.logs import PART_BYTES, LogPart, check_replica, part_of_hosts
from resources.jobs.waiting import BackendJob

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster

_TERMINATE_MARGIN_SECONDS = 180.0  # more than `end_attempt` waits for a lost node
_OWNER_POLL_SECONDS = 0.5
_LONGEST_LOG_BYTES = 1 << 20
_SHOWN_ATTEMPTS = 10


class KubernetesJob(BackendJob):
    """Handle on a job in a cluster, submitted by this process, which then owns it, or attached to."""

    def __init__(
        self, cluster: Cluster, record: Record, *, owned: OwnedJob | None = None, poll_seconds: float = 2.0
    ) -> None:
        self._cluster = cluster
        self._record = record
        self._owned = owned
        self.longest_pause_seconds = poll_seconds

    @property
    def job_id(self) -> str:
        """Returns the name of its record in the cluster, which is also the prefix of the names of its Jobs and pods."""
        return self._record.job_id

    def details(self) -> JobDetails:
        """Returns the job's state and reason; stopped if its owner has sent no heartbeat for two leases."""
        return self._now().details()

    def result_bytes(self, replica: int) -> bytes | None:
        """Returns what the owner has stored in a ConfigMap; lost if the pod was deleted at once."""
        record = self._read()
        kept = self._cluster.get("configmaps", result_name(record.job_id, record.attempts, replica))
        return base64.b64decode(kept["data"]["result"]) if kept is not None else None

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        """Returns the last lines; a replica on a slice of several VMs has a section per VM."""
        record = self._now()
        if replica is not None:
            check_replica(replica, record.replicas)
        replicas = range(record.replicas) if replica is None else [replica]
        sections: list[str] = []
        for index, vm in product(replicas, range(record.vms)):
            place = f"replica {index}" + (f" worker {vm}" if record.vms > 1 else "")
            text = _log_of(self._cluster, record, pod=index * record.vms + vm, max_lines=max_lines)
            if len(replicas) * record.vms == 1:
                return text
            sections.append(f"==> {place} <==\n{text}")
        return "\n".join(sections)

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        """Returns the next part of a log; of output between the last read and the pod's end, only the end is kept."""
        record = self._now()
        check_replica(replica, record.replicas)
        first = replica * record.vms
        return part_of_hosts(
            lambda host, position: part_of_log(self._cluster, record, pod=first + host, after=position),
            record.vms,
            after=after,
        )

    def announced(self, replica: int = 0) -> str | None:
        """Returns the announcement of a replica; of a slice of several VMs, that of its first VM."""
        record = self._now()
        pod = _pod_name_of(self._cluster, record, attempt=record.attempts, pod=replica * record.vms)
        text = pod and self._cluster.log(pod, ANNOUNCER, max_lines=1)
        line = json.loads(text.partition(" ")[2]) if text and text.strip() else None
        return line if isinstance(line, str) else None  # pieces of a result are not announcements

    def terminate(self) -> None:
        record = self._read()
        if record.finished:
            return
        if self._owned is not None:
            self._owned.terminate()
            return
        request_stop(self._cluster, self.job_id)
        deadline = time.monotonic() + record.grace_seconds + _TERMINATE_MARGIN_SECONDS
        while not (record := self._read()).finished:
            if record.is_silent or (record.outlives_parent and not self._keeper_pod_runs()):
                self._end_for_owner(record)
                return
            if time.monotonic() > deadline:
                raise JobTimeout(
                    expected=f"the owner of {self.job_id} to end it",
                    found=f"it is {record.status}: {record.reason}",
                    remedy=f"Delete it: kubectl delete {record.kind} -l assay-evals/job={self.job_id}",
                )
            time.sleep(min(_OWNER_POLL_SECONDS, self.longest_pause_seconds))

    @property
    def where(self) -> str:
        return f"run `kubectl --namespace {self._cluster.namespace} describe jobs -l assay-evals/job={self.job_id}`"

    def _keeper_pod_runs(self) -> bool:
        keeper_pods = self._cluster.list("pods", selector(job=self.job_id, part="keeper"))
        return any(pod.get("status", {}).get("phase") == "Running" for pod in keeper_pods)

    def _end_for_owner(self, record: Record) -> None:
        if record.outlives_parent:  # also prevents the start of a keeper pod
            self._cluster.delete("jobs", keeper_pod_name(self.job_id))
            until = time.monotonic() + record.grace_seconds + _TERMINATE_MARGIN_SECONDS
            while self._cluster.list("pods", selector(job=self.job_id, part="keeper")) and time.monotonic() < until:
                time.sleep(min(_OWNER_POLL_SECONDS, self.longest_pause_seconds))
            record = self._read()
        if record.finished:
            return
        if record.attempts:
            end_attempt(self._cluster, record)
        ended = replace(record, status=JobStatus.STOPPED, reason=TERMINATED, counted=record.attempts)
        write_record(self._cluster, ended)

    def _read(self) -> Record:
        if self._owned is not None:
            self._record = self._owned.record
        elif (stored := read_record(self._cluster, self.job_id)) is not None:
            self._record = stored[0]
        return self._record

    def _now(self) -> Record:
        record = self._read()
        if self._owned is not None or record.finished:
            return record
        if record.outlives_parent and record.is_silent:
            return self._without_keeper_pod(record)
        return as_seen(record)

    def _without_keeper_pod(self, record: Record) -> Record:
        name = keeper_pod_name(self.job_id)
        conditions = (self._cluster.get("jobs", name) or {}).get("status", {}).get("conditions") or ()
        if not any(condition["type"] == "Failed" and condition["status"] == "True" for condition in conditions):
            return record
        reason = f"its keeper pod failed, which needs an image with Assay: see `kubectl logs job/{name}`"
        return replace(record, status=JobStatus.FAILED, reason=reason)


def _log_of(cluster: Cluster, record: Record, *, pod: int, max_lines: int) -> str:
    lines: list[str] = []
    for attempt in range(record.attempts, max(0, record.attempts - _SHOWN_ATTEMPTS), -1):
        remaining = max_lines - len(lines)
        if remaining <= 0:
            break
        heading = [f"--- attempt {attempt} ---"] if attempt > 1 else []
        content = _text_of(cluster, record, attempt=attempt, pod=pod, max_lines=remaining)
        lines = [*heading, *without_times(content).splitlines()[-remaining:], *lines]
    text = "\n".join(lines[-max_lines:] if max_lines > 0 else [])
    return text.encode()[-_LONGEST_LOG_BYTES:].decode(errors="ignore")


def part_of_log(cluster: Cluster, record: Record, *, pod: int, after: str) -> LogPart:
    """Returns the lines of a pod after a position, over all attempts.

    A position is an attempt, the time of the last line, and the number of lines at that time: a log has no offsets.
    Only complete lines are returned. A node removes the first lines of a log beyond 10 MB.
    """
    attempt, time_of_last, count = after.split("/") if after else ("1", "", "0")
    output, dropped = b"", False
    for number in range(int(attempt), record.attempts + 1):
        if number > int(attempt):
            output, time_of_last, count = output + b"--- attempt %d ---\n" % number, "", "0"
        content = _text_of(cluster, record, attempt=number, pod=pod, since=time_of_last)
        *lines, rest = content.encode().split(b"\n")
        lines += [rest] if rest and (record.finished or number < record.attempts) else []
        times = [line.partition(b" ")[0].decode() for line in lines]
        if time_of_last in times:
            start = times.index(time_of_last) + int(count)
        else:
            start = sum(moment_of(moment) <= moment_of(time_of_last) for moment in times)
            dropped = dropped or bool(time_of_last and start < len(times))
        end = start
        while end < len(lines) and len(output) < PART_BYTES:
            output += lines[end].partition(b" ")[2] + b"\n"
            end += 1
        if end > start:
            time_of_last, count = times[end - 1], str(times[:end].count(times[end - 1]))
        attempt = str(number)
        if end > start or number == record.attempts:
            break
    return LogPart(output, f"{attempt}/{time_of_last}/{count}", dropped)


def _pod_name_of(cluster: Cluster, record: Record, *, attempt: int, pod: int) -> str | None:
    for manifest in cluster.list("pods", selector(job=record.job_id, attempt=attempt)):
        if pod_index(manifest, vms=record.vms) == pod:
            return manifest["metadata"]["name"]
    return None


def _text_of(
    cluster: Cluster, record: Record, *, attempt: int, pod: int, since: str = "", max_lines: int | None = None
) -> str:
    # The end of an attempt deletes the pods before it stores the logs: in between, callers must read again.
    name = _pod_name_of(cluster, record, attempt=attempt, pod=pod)
    since_second = f"{since[:19]}Z" if since else None
    text = cluster.log(name, MAIN, since=since_second, max_lines=max_lines) if name else None
    if text is None:
        kept = cluster.get("configmaps", logs_name(record.job_id, attempt)) or {}
        text = kept.get("data", {}).get(f"pod-{pod}", "")
    return text
