"""The part of a Weights & Biases server that its client needs to keep runs and artifacts."""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fakes.http_server import Answer, Request, http_server

_RUN_STREAM = re.compile(r"/files/[^/]+/[^/]+/([^/]+)/file_stream")


@dataclass
class KeptRun:
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    history: dict[int, dict[str, Any]] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [self.history[number] for number in sorted(self.history)]


@dataclass
class FakeWandb:
    """The server. `artifacts` maps names to the digests of their versions, `asked` lists the operations in order."""

    address: str = ""
    runs: dict[str, KeptRun] = field(default_factory=dict)
    artifacts: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.asked.append(operation)
            method = getattr(self, f"_{operation}", None)
            return method(given) if method else {}

    def _Viewer(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "1", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}}}

    def _RunResumeStatus(self, given: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(given["name"])
        bucket = None if run is None else self._bucket(given["name"], run)
        return {"model": {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "team"}, "bucket": bucket}}

    def _bucket(self, id_: str, run: KeptRun) -> dict[str, Any]:
        return {
            "id": id_,
            "name": id_,
            "displayName": run.name,
            "config": json.dumps(run.config),
            "tags": run.tags,
            "summaryMetrics": json.dumps(run.summary),
            "historyLineCount": len(run.history),
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(line) for line in run.lines[-1:]]),
            "eventsTail": "[]",
            # The W&B client takes a run without this as never begun, and does not resume it.
            "wandbConfig": json.dumps({"t": run.config.get("_wandb", {}).get("value", {}).get("t", {})}),
            "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "team"}},
        }

    def _UpsertBucket(self, given: dict[str, Any]) -> dict[str, Any]:
        id_ = given["name"] or given["id"]
        inserted = id_ not in self.runs
        run = self.runs.setdefault(id_, KeptRun(given.get("displayName") or id_))
        run.config |= json.loads(given.get("config") or "{}")
        run.tags = given.get("tags") or run.tags
        return {"upsertBucket": {"bucket": self._bucket(id_, run), "inserted": inserted}}

    def _ArtifactType(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"artifact": None}}

    def _CreateArtifact(self, given: dict[str, Any]) -> dict[str, Any]:
        # reports the content as present, so that nothing more is uploaded
        name, digest = given["input"]["artifactCollectionName"], given["input"]["digest"]
        versions = self.artifacts.setdefault(name, [])
        if digest not in versions:
            versions.append(digest)
        artifact = {"id": digest, "state": "COMMITTED", "artifactSequence": {"id": name, "latestArtifact": None}}
        return {"createArtifact": {"artifact": artifact}}

    def _ArtifactByID(self, given: dict[str, Any]) -> dict[str, Any]:
        (name,) = (name for name, versions in self.artifacts.items() if given["id"] in versions)
        project = {"id": "p", "internalId": "1", "name": "p", "entity": {"name": "team"}}
        artifact = {
            "__typename": "Artifact",
            "id": given["id"],
            "artifactSequence": {"__typename": "ArtifactSequence", "id": name, "name": name, "project": project},
            "versionIndex": self.artifacts[name].index(given["id"]),
            "artifactType": {"name": "record"},
            "ttlDurationSeconds": -2,
            "ttlIsInherited": True,
            "tags": [],
            "state": "COMMITTED",
            "size": 1,
            "digest": given["id"],
            "fileCount": 1,
            "createdAt": "2026-01-02T03:04:05",
            "aliases": [],
        }
        unset = ("description", "metadata", "historyStep", "commitHash", "updatedAt")
        return {"artifact": {**dict.fromkeys(unset), **artifact}}

    def _CreateRunFiles(self, given: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.address}/up/{name}"} for name in given["files"]]
        return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}

    def take_stream(self, id_: str, content: dict[str, Any]) -> None:
        """Stores lines of a run's history by their number, and its summary."""
        with self.lock:
            run = self.runs[id_]
            for name, chunk in (content.get("files") or {}).items():
                for number, line in enumerate(chunk["content"], start=chunk["offset"]):
                    if name == "wandb-history.jsonl":
                        run.history[number] = json.loads(line)
                    elif name == "wandb-summary.json":
                        run.summary = json.loads(line)


@contextmanager
def fake_wandb() -> Iterator[FakeWandb]:
    kept = FakeWandb()

    def answer(request: Request) -> Answer:
        body = request.body
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        content: dict[str, Any] = {}
        if request.path == "/graphql":
            _, _, signed = request.headers.get("Authorization", "").partition(" ")
            kept.keys.add(base64.b64decode(signed).decode().partition(":")[2])
            asked = json.loads(body)
            operation = re.match(r"\s*(?:query|mutation)\s+(\w+)", asked["query"])
            content = {"data": kept.answer(operation[1] if operation else "", asked.get("variables") or {})}
        elif stream := _RUN_STREAM.fullmatch(request.path):
            kept.take_stream(stream[1], json.loads(body))
        elif request.path.startswith("/up/"):
            kept.files[request.path.removeprefix("/up/")] = body
        return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()

    with http_server(answer) as kept.address:
        yield kept
