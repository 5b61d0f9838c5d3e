"""Logs of a Job in Google's Cloud Logging, which outlive its pods; the only module that imports its client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from google.api_core.exceptions import GoogleAPIError
from google.auth.exceptions import GoogleAuthError
from google.cloud import logging

from resources.backends.kubernetes.logs import LogLine
from resources.errors import BackendUnavailable

_PAGE = 1000


def cloud_lines(
    job: str,
    since: datetime | None,
    *,
    namespace: str,
    project: str | None = None,
    options: dict[str, Any] | None = None,
) -> Iterator[LogLine]:
    """Yields the lines of a Job's containers, oldest first; see `ReadLog`.

    `options` are further arguments of Cloud Logging's client; the project is by default that of the credentials.
    """
    try:
        # Over HTTP: gRPC's threads do not survive a fork.
        client = logging.Client(project=project, _use_grpc=False, **(options or {}))
        expression = _filter(job, namespace=namespace, since=since)
        for entry in client.list_entries(filter_=expression, order_by=logging.ASCENDING, page_size=_PAGE):
            yield _line(entry)
    except (GoogleAPIError, GoogleAuthError, OSError) as error:
        raise BackendUnavailable(
            expected=f"Cloud Logging to give the log of {job}",
            found=" ".join(str(error).split()) or type(error).__name__,
            remedy="log in with `gcloud auth application-default login`, name the cluster's project with "
            "--project, and ask an administrator for roles/logging.viewer there",
        ) from error


def _filter(job: str, *, namespace: str, since: datetime | None) -> str:
    parts = [
        'resource.type="k8s_container"',
        f"resource.labels.namespace_name={json.dumps(namespace)}",
        f'labels."k8s-pod/job-name"={json.dumps(job)}',
    ]
    # Without a time Cloud Logging searches the last day only.
    moment = (since or datetime.fromtimestamp(0, UTC)).astimezone(UTC)
    return " AND ".join([*parts, f'timestamp>="{moment:%Y-%m-%dT%H:%M:%SZ}"'])


def _line(entry: Any) -> LogLine:
    payload, labels = entry.payload, dict(entry.resource.labels) if entry.resource else {}
    text = payload if isinstance(payload, str) else str((payload or {}).get("message") or json.dumps(payload))
    at = entry.timestamp.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return LogLine(at, labels.get("pod_name", ""), labels.get("container_name", ""), text.rstrip("\n"))
