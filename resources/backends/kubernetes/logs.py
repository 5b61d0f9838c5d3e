"""Logs of a Job by its name, from the kubelets of its cluster while the pods exist; and times in log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster

_OVERLAP = timedelta(minutes=1)


@dataclass(frozen=True)
class LogLine:
    """A line that a container wrote."""

    at: str
    """RFC 3339 time in UTC."""
    pod: str
    container: str
    text: str


ReadLog = Callable[[datetime | None], Iterable[LogLine]]
"""Reads the lines that the pods of a Job have written so far, since a time, container by container or by time."""


def pods_of(cluster: Cluster, job: str) -> list[dict[str, Any]]:
    """Returns the existing pods of a Job, the oldest first."""
    pods = cluster.list("pods", f"batch.kubernetes.io/job-name={job}")
    return sorted(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))


def pod_lines(cluster: Cluster, job: str, since: datetime | None) -> Iterator[LogLine]:
    """Yields the lines of a Job from the kubelets, container by container; see `ReadLog`."""
    for pod in pods_of(cluster, job):
        name, spec = pod["metadata"]["name"], pod["spec"]
        for container in (part["name"] for part in [*spec.get("initContainers", ()), *spec["containers"]]):
            text = cluster.log(name, container, since=stamp_of(since) if since else None)
            for line in (text or "").splitlines():
                at, _, words = line.partition(" ")
                yield LogLine(at, name, container, words)


def followed(
    read: ReadLog, *, since: datetime | None, has_ended: Callable[[], bool], pause_seconds: float = 2.0
) -> Iterator[LogLine]:
    """Yields new lines, each once, until the job has ended and its last line was yielded."""
    seen: set[LogLine] = set()
    while True:
        ended = has_ended()
        lines = [line for line in read(since) if line not in seen]
        yield from sorted(lines, key=lambda line: (moment_of(line.at), line.pod, line.container))
        if ended:
            return
        if lines:
            # Clocks of nodes differ: lines of the last minute are read again.
            newest = datetime.fromisoformat(max(moment_of(line.at) for line in lines)[:19] + "+00:00")
            since = max(since or newest - _OVERLAP, newest - _OVERLAP)
            seen = {line for line in seen.union(lines) if moment_of(line.at) >= moment_of(stamp_of(since))}
        time.sleep(pause_seconds)


def stamp_of(moment: datetime) -> str:
    """Returns a time in the format of log lines, in whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_of(stamp: str) -> str:
    """Returns a time of a log line without its Z, so that times with and without fractions compare in order."""
    return stamp.removesuffix("Z")


def without_times(text: str) -> str:
    """Returns lines of a log without the time that each begins with."""
    return "\n".join(line.partition(" ")[2] for line in text.split("\n"))
