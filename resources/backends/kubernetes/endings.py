"""End of an attempt, with its logs and results, which Kubernetes deletes together with the pods."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from resources.backends.kubernetes.logs import moment_of, stamp_of
from resources.backends.kubernetes.manifests import ANNOUNCER, MAIN, config_map_manifest
from resources.backends.kubernetes.names import attempt_name, labels, logs_name, result_name, selector
from resources.backends.kubernetes.pods import pod_index
from resources.backends.kubernetes.records import Record
from resources.errors import BackendUnavailable, JobTimeout
from resources.jobs.logs import PART_BYTES, LogPart
from resources.jobs.waiting import growing_pauses

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster

LONGEST_LOG_BYTES = 1 << 20
_KEPT_LOGS_BYTES = 900_000  # over all pods of an attempt: a ConfigMap holds 1 MiB
_KEPT_LINES = 20_000
_RESULT_LINES = 100  # the largest result has 87 lines, plus the last announcement
_LAST_WORDS_SECONDS = 1.0
_NODE_SECONDS = 60.0  # a kubelet that has not ended a pod this long after its grace time is gone
_SHOWN_ATTEMPTS = 10


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


def keep_results(cluster: Cluster, record: Record) -> None:
    """Stores the results of the current attempt's replicas, while their pods still exist."""
    for pod in cluster.list("pods", selector(job=record.job_id, attempt=record.attempts)):
        replica, vm = divmod(pod_index(pod, vms=record.vms), record.vms)
        with suppress(BackendUnavailable):  # a job must end even if its result is rejected
            if vm == 0 and (text := _result_in(cluster, pod["metadata"]["name"])):
                tags = labels(record.job_id, "result", attempt=record.attempts)
                name = result_name(record.job_id, record.attempts, replica)
                cluster.create("configmaps", config_map_manifest(name, tags, {"result": text}))


def result_of_replica(cluster: Cluster, record: Record, replica: int) -> bytes | None:
    """Returns the stored result of a replica in the last attempt, or None."""
    kept = cluster.get("configmaps", result_name(record.job_id, record.attempts, replica))
    return base64.b64decode(kept["data"]["result"]) if kept is not None else None


def log_of(cluster: Cluster, record: Record, *, pod: int, max_lines: int) -> str:
    """Returns a pod's last lines over the last 10 attempts, at most 1 MiB, with headings from the second attempt on."""
    lines: list[str] = []
    for attempt in range(record.attempts, max(0, record.attempts - _SHOWN_ATTEMPTS), -1):
        remaining = max_lines - len(lines)
        if remaining <= 0:
            break
        heading = [f"--- attempt {attempt} ---"] if attempt > 1 else []
        content = _text_of(cluster, record, attempt=attempt, pod=pod, max_lines=remaining)
        lines = [*heading, *_without_times(content).splitlines()[-remaining:], *lines]
    text = "\n".join(lines[-max_lines:] if max_lines > 0 else [])
    return text.encode()[-LONGEST_LOG_BYTES:].decode(errors="ignore")


def part_of_log(cluster: Cluster, record: Record, *, pod: int, after: str) -> LogPart:
    """Returns the lines of a pod after a position, over all attempts.

    A position is an attempt, the time of the last line, and the number of lines at that time: a log has no offsets.
    Only complete lines are returned. The number of lines that a node has removed, beyond 10 MB, is unknown.
    """
    attempt, time_of_last, count = after.split("/") if after else ("1", "", "0")
    output, dropped = b"", 0
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
            dropped = None if time_of_last and start < len(times) else dropped
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


def pod_name_of(cluster: Cluster, record: Record, *, attempt: int, pod: int) -> str | None:
    """Returns the name of an existing pod, or None."""
    for manifest in cluster.list("pods", selector(job=record.job_id, attempt=attempt)):
        if pod_index(manifest, vms=record.vms) == pod:
            return manifest["metadata"]["name"]
    return None


def _result_in(cluster: Cluster, pod: str) -> str | None:
    lines = _without_times(cluster.log(pod, ANNOUNCER, max_lines=_RESULT_LINES) or "")
    pieces: dict[int, bytes] = {}
    expected = 0
    for line in lines.splitlines():
        with suppress(ValueError, TypeError, KeyError):  # announcements, or the traceback of a killed program
            piece = json.loads(line)
            pieces[piece["piece"]] = base64.b64decode(piece["result"])
            expected = piece["pieces"]
    whole = b"".join(pieces[index] for index in sorted(pieces))
    return base64.b64encode(whole).decode() if pieces and len(pieces) == expected else None


def _text_of(
    cluster: Cluster, record: Record, *, attempt: int, pod: int, since: str = "", max_lines: int | None = None
) -> str:
    # The end of an attempt deletes the pods before it stores the logs: in between, callers must read again.
    name = pod_name_of(cluster, record, attempt=attempt, pod=pod)
    since_second = f"{since[:19]}Z" if since else None
    text = cluster.log(name, MAIN, since=since_second, max_lines=max_lines) if name else None
    if text is None:
        kept = cluster.get("configmaps", logs_name(record.job_id, attempt)) or {}
        text = kept.get("data", {}).get(f"pod-{pod}", "")
    return text


def _without_times(text: str) -> str:
    return "\n".join(line.partition(" ")[2] for line in text.split("\n"))


class _Follower:
    def __init__(self, cluster: Cluster, pod: str, index: int) -> None:
        self.index = index
        self._cluster, self._pod = cluster, pod
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._lock = threading.Lock()
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        self._connected.wait(_NODE_SECONDS)  # otherwise the pod might be deleted before its last lines are read

    def text(self, max_bytes: int) -> str:
        self._thread.join(_LAST_WORDS_SECONDS)
        with self._lock:  # the thread keeps running if the pod's node is gone, and its connection stays open
            content = b"".join(self._chunks)
        is_whole = len(content) <= max_bytes and content.count(b"\n") < _KEPT_LINES
        if len(content) > max_bytes:
            content = content[-max_bytes:].partition(b"\n")[2]
        text = content.decode(errors="replace").replace("\0", "")
        return text if is_whole else f"{text.partition(' ')[0]} (earlier lines of this log are not kept)\n{text}"

    def _follow(self) -> None:
        try:
            for chunk in self._cluster.follow_log(self._pod, MAIN, max_lines=_KEPT_LINES, connected=self._connected):
                with self._lock:
                    self._chunks.append(chunk)
                    self._size += len(chunk)
                    while self._size - len(self._chunks[0]) > _KEPT_LOGS_BYTES:
                        self._size -= len(self._chunks.popleft())
        except BackendUnavailable as error:
            with self._lock:
                self._chunks.append(
                    f"{stamp_of(datetime.now(UTC))} (the rest of this log could not be read: {error.found})\n".encode()
                )
        finally:
            self._connected.set()
