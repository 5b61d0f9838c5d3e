"""A hub for data sets and models: the few addresses that the real clients request, over HTTP, from files in memory."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import pytest

from fakes.http_server import Answer, Request, http_server

LARGE = (".safetensors", ".bin", ".model")
"""Ends of the names of files in large storage: listed with their SHA-256, and redirected to another host."""


@dataclass
class FakeHub:
    """Repositories by `datasets/<id>` or `models/<id>`; each has a single commit, derived from its files."""

    repositories: dict[str, dict[str, bytes]]
    revisions: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Files by repository and branch, for repositories with several; a name that begins with `refs/tags/` is a tag."""
    url: str = ""
    requests: list[str] = field(default_factory=list)
    addresses: dict[str, bytes] = field(default_factory=dict)
    """Content of other hosts by address, for clients that use this hub as their network proxy."""
    limited: int = 0
    """Number of the next requests that get 429, with `Retry-After`."""
    retry_after: int = 1
    gated: set[str] = field(default_factory=set)
    """Repositories with terms: their files need the token."""
    private: set[str] = field(default_factory=set)
    """Repositories that are there only for requests with the token."""
    token: str = "hf_token_of_an_account"
    page: int = 1000
    """Entries in a page of a tree."""
    leaked: list[str] = field(default_factory=list)
    """Requests to the other host that carried a token."""
    delay_seconds: float = 0
    """Time before each answer, as of a network."""
    large_bytes: int = 0
    """Bytes sent of files in large storage."""
    _commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)

    def commit(self, repository: str, branch: str = "main") -> str:
        files = self._branches(repository)[branch]
        commit = hashlib.sha1(repr(sorted((name, _blob(files[name])) for name in files)).encode()).hexdigest()
        self._commits[repository, commit] = dict(files)
        return commit

    def answer(self, method: str, path: str, body: bytes, token: str = "") -> Answer:
        if self.limited > 0:
            self.limited -= 1
            return 429, {"Retry-After": str(self.retry_after)}, b"{}"
        if path in self.addresses:
            return 200, {}, self.addresses[path]
        split = urlsplit(path)
        path, asked = unquote(split.path).strip("/"), dict(parse_qsl(split.query))
        if path.startswith("large/"):
            return self._large(path.removeprefix("large/"), token)
        if token and token != self.token:
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b"{}"
        if path.startswith("api/"):
            return self._api(path.removeprefix("api/"), body, asked, token, split.path)
        for name in (*self.repositories, *self.revisions):
            prefix = f"{name.removeprefix('models/')}/resolve/"
            if path.startswith(prefix) and (name not in self.private or token):
                revision, _, file = path.removeprefix(prefix).partition("/")
                if name in self.gated and not token:
                    return 401, {"X-Error-Code": "GatedRepo"}, b"{}"
                return self._file(name, revision, file)
        return self._no_repository(token)

    def _branches(self, name: str) -> dict[str, dict[str, bytes]]:
        return self.revisions.get(name) or {"main": self.repositories[name]}

    def _held(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        branches = self._branches(name)
        for ref in (revision, f"refs/tags/{revision}"):
            if ref in branches:
                return self.commit(name, ref), branches[ref]
        if files := self._commits.get((name, revision)):
            return revision, files
        return None

    def _no_repository(self, token: str) -> Answer:
        return 404 if token else 401, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _file(self, name: str, revision: str, file: str) -> Answer:
        held = self._held(name, revision)
        if held is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        commit, files = held
        if file not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"{}"
        if not file.endswith(LARGE):
            return 200, {"ETag": f'"{_blob(files[file])}"', "X-Repo-Commit": commit}, files[file]
        content = _sha256(files[file])
        linked = {"X-Linked-ETag": f'"{content}"', "X-Linked-Size": str(len(files[file])), "X-Repo-Commit": commit}
        elsewhere = self.url.replace("127.0.0.1", "localhost")  # another host, for clients
        return 302, {**linked, "Location": f"{elsewhere}/large/{content}?signature=secret"}, b""

    def _large(self, content: str, token: str) -> Answer:
        if token:
            self.leaked.append(content)
        every = (file for name in (*self.repositories, *self.revisions) for files in self._branches(name).values()
                 for file in files.items())  # fmt: skip
        large = next((held for name, held in every if name.endswith(LARGE) and _sha256(held) == content), None)
        if large is None:
            return 404, {}, b""
        return 200, {"ETag": f'"{content}"', "Accept-Ranges": "bytes"}, large

    def _api(self, path: str, body: bytes, asked: dict[str, str], token: str, raw: str) -> Answer:
        for name in (*self.repositories, *self.revisions):
            if (path != name and not path.startswith(f"{name}/")) or (name in self.private and not token):
                continue
            operation, _, rest = path[len(name) :].strip("/").partition("/")
            if operation == "refs":
                return 200, {}, json.dumps(self._refs(name)).encode()
            # A branch may have a slash in its name, which is quoted in the address.
            quoted = raw.partition(f"/{operation}/")[2].strip("/").partition("/")[0] if rest else "main"
            revision, folder = unquote(quoted), rest[len(unquote(quoted)) :].strip("/")
            held = self._held(name, revision)
            if held is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            commit, files = held
            headers = {"X-Repo-Commit": commit}
            if operation in ("", "revision"):
                siblings = [{"rfilename": file} for file in files]
                content: Any = {"id": name.partition("/")[2], "sha": commit, "siblings": siblings, "tags": []}
            elif operation == "tree":
                entries = [_entry(file, files) for file in files if not folder or file.startswith(f"{folder}/")]
                if asked.get("recursive", "").lower() == "true":
                    folders = sorted({file.rpartition("/")[0] for file in files} - {""})
                    entries += [{"type": "directory", "path": each, "size": 0, "oid": "0" * 40} for each in folders]
                first = int(asked.get("cursor", 0))
                content = entries[first : first + self.page]
                if first + self.page < len(entries):
                    following = urlencode({**asked, "cursor": first + self.page})
                    headers["Link"] = f'<{self.url}{raw}?{following}>; rel="next"'
            elif operation == "paths-info":
                named = json.loads(body)["paths"] if body.startswith(b"{") else [body.decode()]
                content = [_entry(file, files) for file in named if file in files]
            else:
                break
            return 200, headers, json.dumps(content).encode()
        return self._no_repository(token)

    def _refs(self, name: str) -> dict[str, list[dict[str, str]]]:
        refs: dict[str, list[dict[str, str]]] = {"branches": [], "tags": [], "converts": []}
        for ref in self._branches(name):
            short = ref.removeprefix("refs/tags/")
            full = ref if ref != short else f"refs/heads/{ref}"
            kind = "tags" if ref != short else "branches"
            refs[kind].append({"name": short, "ref": full, "targetCommit": self.commit(name, ref)})
        return refs


@cache
def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@cache
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _entry(file: str, files: dict[str, bytes]) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": file, "size": len(files[file]), "oid": _blob(files[file])}
    if file.endswith(LARGE):
        entry["lfs"] = {"oid": _sha256(files[file]), "size": len(files[file]), "pointerSize": 134}
    return entry


@contextmanager
def running_hub(
    repositories: dict[str, dict[str, bytes]], revisions: dict[str, dict[str, dict[str, bytes]]] | None = None
) -> Iterator[FakeHub]:
    hub = FakeHub(repositories, revisions or {})

    def answer(request: Request) -> Answer:
        hub.requests.append(f"{request.method} {request.path}")
        token = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        time.sleep(hub.delay_seconds)
        status, headers, content = hub.answer(request.method, request.path, request.body, token)
        if (span := request.headers.get("Range")) and status == 200:
            first, _, last = span.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            headers = {**headers, "Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"}
            status, content = 206, part
        if request.path.startswith("/large/") and request.method == "GET":
            hub.large_bytes += len(content)
        return status, headers, content

    with http_server(answer) as hub.url:
        yield hub


def use_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, *, home: Path, token: str | None = None) -> None:
    """Lets the real client of this process and its children use the hub, with its cache below `home`."""
    from huggingface_hub import constants

    forget_hub()
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    if token:
        monkeypatch.setenv("HF_TOKEN", token)


def forget_hub() -> None:
    """Forgets all that this process has read, as in a new process."""
    from resources.storage import hub_files

    for known in (hub_files._refs, hub_files._trees, hub_files._contents):
        known.clear()
