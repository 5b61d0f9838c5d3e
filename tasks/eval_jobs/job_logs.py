"""The log of an evaluation job: from its pods while they exist, from Cloud Logging afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from resources.backends.kubernetes.logs import JobLogs, LogLine, PodLogs, followed
from resources.errors import BackendUnavailable, BadInput
from tasks.eval_jobs.submission import submitted_jobs

if TYPE_CHECKING:
    from resources.backends.kubernetes.cluster import Cluster

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def log_lines(
    cluster: Cluster | None,
    name: str,
    *,
    since: str | None,
    follow: bool,
    note: Callable[[str], None],
    kept: JobLogs,
) -> Iterator[LogLine]:
    """Yields the log lines of a job; `kept` has the logs of deleted pods."""
    began = moment(since, now=datetime.now(UTC)) if since is not None else None
    pods = _pods(cluster, name, note=note) if cluster is not None else None
    note(f"the log of {name} from {'its pods' if pods else 'Cloud Logging: no pods of it are known'}")
    if follow and cluster is not None and pods is not None:
        yield from followed(pods, name, since=began, has_ended=lambda: _has_ended(cluster, name))
        return
    logs: JobLogs = pods or kept
    none = True
    for line in logs.read(name, since=began):
        none = False
        yield line
    if none and pods is None:
        raise BadInput(
            expected=f"lines of a job {name}" + (f" of the last {since}" if since else ""),
            found="none, neither in the cluster nor in Cloud Logging",
            remedy="check the name with assay eval-job list, the namespace, and --project; or look further back",
        )


def write_lines(lines: Iterable[LogLine], output: Path) -> int:
    """Writes lines as a JSON list and returns their number."""
    values = [line.as_values() for line in lines]
    output.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n")
    return len(values)


def moment(since: str, *, now: datetime) -> datetime:
    """Returns the time `30m`, `12h`, `3d` or `2w` before `now`."""
    match = re.fullmatch(r"(\d{1,5})([mhdw])", since.strip())
    if match is None:
        raise BadInput(expected="--since 30m, 12h, 3d or 2w", found=since, remedy="write it in this way")
    return now - timedelta(**{_UNITS[match[2]]: int(match[1])})


def _pods(cluster: Cluster, name: str, *, note: Callable[[str], None]) -> PodLogs | None:
    pods = PodLogs(cluster)
    try:
        # A new job has no pod yet; an ended job may have lost its pods.
        return pods if pods.has(name) or not _has_ended(cluster, name) else None
    except BackendUnavailable as error:
        note(f"the cluster does not answer: {error.found}")
        return None


def _has_ended(cluster: Cluster, name: str) -> bool:
    return all(job.ended for job in submitted_jobs(cluster) if job.name == name)
