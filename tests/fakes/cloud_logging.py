"""Fake of Cloud Logging's `entries:list`, for the real client over real HTTP: recorded entries in pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from google.auth.credentials import AnonymousCredentials

from fakes.http_server import Answer, Request, http_server

PAGE = 2
_CONDITION = re.compile(r'(?P<field>[\w.]+|labels\."[^"]+")(?P<operator>>?=)"(?P<value>[^"]*)"')


@dataclass
class CloudLogging:
    """The entries of a project, as its API returns them."""

    entries: list[dict[str, Any]]
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    status: int = 200

    @property
    def options(self) -> dict[str, Any]:
        return {"credentials": AnonymousCredentials(), "client_options": {"api_endpoint": self.url}}

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        conditions = [match.groupdict() for match in _CONDITION.finditer(body["filter"])]
        assert len(conditions) == body["filter"].count(" AND ") + 1, "a condition that the fake does not support"
        entries = [entry for entry in self.entries if all(_meets(entry, condition) for condition in conditions)]
        start = int(body.get("pageToken") or 0)
        more = {"nextPageToken": str(start + PAGE)} if start + PAGE < len(entries) else {}
        return {"entries": entries[start : start + PAGE], **more}


def entry(job: str, at: str, text: str, *, payload: str = "textPayload") -> dict[str, Any]:
    """Returns an entry as GKE's agent writes it."""
    content: Any = text if payload == "textPayload" else {"message": text, "levelname": "INFO"}
    place = {"project_id": "team", "cluster_name": "c", "namespace_name": "default", "location": "europe-west4"}
    return {
        payload: content,
        "insertId": f"{job}{at}",
        "timestamp": at,
        "severity": "INFO",
        "logName": "projects/team/logs/stdout",
        "labels": {"k8s-pod/job-name": job, "compute.googleapis.com/resource_name": "gk3-pool-1"},
        "resource": {"type": "k8s_container", "labels": {**place, "pod_name": f"{job}-x1", "container_name": "eval"}},
    }


@contextmanager
def cloud_logging(*entries: dict[str, Any]) -> Iterator[CloudLogging]:
    project = CloudLogging(list(entries))

    def answer(request: Request) -> Answer:
        known = request.path.split("?")[0] == "/v2/entries:list"
        refused = {"error": {"code": project.status, "message": "The caller does not have permission"}}
        content = project.answer(json.loads(request.body)) if known and project.status == 200 else refused
        headers = {"Content-Type": "application/json"}
        return project.status if known else 404, headers, json.dumps(content).encode()

    with http_server(answer) as project.url:
        yield project


def _meets(entry: dict[str, Any], condition: dict[str, str]) -> bool:
    name, quoted, label = condition["field"].partition('."')
    if quoted:
        value: Any = entry[name][label.removesuffix('"')]
    else:
        value = entry
        for part in condition["field"].split("."):
            value = value[part]
    return value >= condition["value"] if condition["operator"] == ">=" else value == condition["value"]
