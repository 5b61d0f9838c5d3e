"""A hub for data sets and models: the few addresses that the real clients request, over HTTP, from files in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from fakes.http_server import Answer, Request, http_server


@dataclass
class FakeHub:
    """Repositories by `datasets/<id>` or `models/<id>`; each has a single commit, derived from its files."""

    repositories: dict[str, dict[str, bytes]]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    addresses: dict[str, bytes] = field(default_factory=dict)
    """Content of other hosts by address, for clients that use this hub as their network proxy."""
    limited: int = 0
    """Number of the next requests that get 429, with `Retry-After: 1`."""

    def commit(self, repository: str) -> str:
        return hashlib.sha1(repr(sorted(self.repositories[repository].items())).encode()).hexdigest()

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        if self.limited > 0:
            self.limited -= 1
            return 429, {"Retry-After": "1"}, b"{}"
        if path in self.addresses:
            return 200, {}, self.addresses[path]
        path = unquote(urlsplit(path).path).strip("/")
        if path.startswith("api/"):
            return self._api(path.removeprefix("api/"), body)
        for name, files in self.repositories.items():
            prefix = f"{name.removeprefix('models/')}/resolve/"
            if path.startswith(prefix):
                revision, _, file = path.removeprefix(prefix).partition("/")
                return self._file(name, files, revision, file)
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _file(self, name: str, files: dict[str, bytes], revision: str, file: str) -> Answer:
        commit = self.commit(name)
        if revision not in ("main", commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"{}"
        etag = hashlib.sha1(files[file]).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, files[file]

    def _api(self, path: str, body: bytes) -> Answer:
        for name, files in self.repositories.items():
            if path != name and not path.startswith(f"{name}/"):
                continue
            operation, _, rest = path[len(name) :].strip("/").partition("/")
            commit = self.commit(name)
            revision, _, folder = rest.partition("/")
            if operation in ("revision", "tree", "paths-info") and revision not in ("main", commit):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            if operation in ("", "revision"):
                siblings = [{"rfilename": file} for file in files]
                content: Any = {"id": name.partition("/")[2], "sha": commit, "siblings": siblings, "tags": []}
            elif operation == "tree":
                content = [self._entry(file, files) for file in files if not folder or file.startswith(f"{folder}/")]
            elif operation == "paths-info":
                asked = json.loads(body)["paths"] if body.startswith(b"{") else [body.decode()]
                content = [self._entry(file, files) for file in asked if file in files]
            else:
                break
            return 200, {"X-Repo-Commit": commit}, json.dumps(content).encode()
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _entry(self, file: str, files: dict[str, bytes]) -> dict[str, Any]:
        return {"type": "file", "path": file, "size": len(files[file]), "oid": hashlib.sha1(files[file]).hexdigest()}


@contextmanager
def running_hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    hub = FakeHub(repositories)

    def answer(request: Request) -> Answer:
        hub.requests.append(f"{request.method} {request.path}")
        status, headers, content = hub.answer(request.method, request.path, request.body)
        if (span := request.headers.get("Range")) and status == 200:
            first, _, last = span.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            headers = {**headers, "Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"}
            status, content = 206, part
        return status, headers, content

    with http_server(answer) as hub.url:
        yield hub
