"""An object store that speaks Google Cloud Storage's JSON API, with failures that a test injects.

The store is the package gcp-storage-emulator, in memory. The real client, gcsfs, calls it over HTTP; a layer between
them injects statuses and logs uploads and requests.

Plain listings come in pages, as from the real store; the emulator sends all of a bucket at once.
"""

from __future__ import annotations

import base64
import bisect
import hashlib
import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

import google_crc32c
import orjson
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage

from fakes.gcs_variables import VARIABLES

MESSAGES = {
    403: "robot@example.iam does not have storage.objects.create access to the Google Cloud Storage object.",
    429: "The project exceeded the rate limit for creating and deleting buckets.",
    503: "We encountered an internal error. Please try again.",
}


class MemoryStorage(Storage):
    """The emulator's storage, without the description of all objects that it rewrites after each change."""

    version = 0

    def __init__(self) -> None:
        super().__init__(use_memory_fs=True)
        self._named: dict[str, tuple[int, list[str]]] = {}

    def _write_config_to_file(self) -> None:
        self.version += 1

    def page(self, bucket: str, asked: dict[str, str]) -> dict[str, Any]:
        version, names = self._named.get(bucket, (-1, []))
        if version != self.version:
            names = sorted(self.objects.get(bucket, ()))
            self._named[bucket] = self.version, names
        prefix, most = asked.get("prefix", ""), min(1000, int(asked.get("maxResults", 1000)))
        first = bisect.bisect_left(names, max(prefix, asked.get("startOffset", "")))
        if "pageToken" in asked:
            first = bisect.bisect_right(names, asked["pageToken"])
        end = bisect.bisect_left(names, asked["endOffset"]) if "endOffset" in asked else len(names)
        end = min(end, bisect.bisect_left(names, f"{prefix}\U0010ffff")) if prefix else end
        held, objects = names[first : min(end, first + most)], self.objects.get(bucket, {})
        fields = re.search(r"items\(([^)]*)\)", asked.get("fields", ""))
        selected = fields[1].split(",") if fields else None
        items = [objects[name] if selected is None else _part(objects[name], selected) for name in held]
        more = {"nextPageToken": held[-1]} if first + most < end else {}
        return {"kind": "storage#objects", "items": items, **more}


def _part(described: dict[str, Any], names: list[str]) -> dict[str, Any]:
    return {name: described[name] for name in names if described.get(name) is not None}


@dataclass
class FakeGcs:
    """The store.

    `uploads` are the names of objects in the order of their completion, `requests` the targets of all attempted
    uploads, `gets` the requested names, `sign_ins` the token requests of service accounts.
    """

    address: str
    storage: MemoryStorage
    uploads: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    gets: list[str] = field(default_factory=list)
    sign_ins: list[str] = field(default_factory=list)
    refusals: dict[str, list[int]] = field(default_factory=dict)
    """Statuses of the next uploads, by part of their path; a negative last status repeats for ever."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def variables(self) -> dict[str, str]:
        """Variables of a process that reaches this store under gs://."""
        return {"STORAGE_EMULATOR_HOST": self.address, **VARIABLES}

    def refuse(self, part: str, *statuses: int, always: bool = False) -> None:
        """Answers uploads with `part` in their name with these statuses in turn; `always` repeats the last for ever."""
        self.refusals[part] = [*statuses[:-1], -statuses[-1] if always else statuses[-1]]

    def status_for(self, place: str) -> int | None:
        """Returns the status to answer an upload with, or None to accept it."""
        with self.lock:
            self.requests.append(place)
            for part, statuses in self.refusals.items():
                if part in place and statuses:
                    return -statuses[0] if statuses[0] < 0 else statuses.pop(0)
        return None

    def put(self, bucket: str, name: str, content: bytes, *, updated: str = "2026-01-02T03:04:05.000Z") -> None:
        """Stores an object without a request; `updated` is in ISO 8601."""
        md5 = base64.b64encode(hashlib.md5(content).digest()).decode()
        described = {"name": name, "bucket": bucket, "size": str(len(content)), "updated": updated, "md5Hash": md5}
        crc32c = base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()
        described |= {"kind": "storage#object", "generation": "1", "contentType": "text/plain", "crc32c": crc32c}
        self.storage.create_file(bucket, name, content, described)

    def content(self, bucket: str, name: str) -> bytes:
        return bytes(self.storage.get_file(bucket, name, False))

    def names(self, bucket: str) -> list[str]:
        if self.storage.get_bucket(bucket) is None:
            return []
        return sorted(entry["name"] for entry in self.storage.get_file_list(bucket)[0])


@contextmanager
def fake_gcs(*buckets: str) -> Iterator[FakeGcs]:
    storage = MemoryStorage()
    for bucket in buckets:
        storage.create_bucket(bucket, {"name": bucket, "kind": "storage#bucket", "id": bucket})
    store = FakeGcs("", storage)

    class Handler(RequestHandler):
        uploaded: str | None = None

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(storage, *args, **kwargs)

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            with store.lock:
                store.gets.append(self.path)
            listed = re.fullmatch("/storage/v1/b/([^/]+)/o", parts.path)
            asked = dict(parse_qsl(parts.query))
            if listed is None or "/" in asked.get("delimiter", "") or storage.get_bucket(listed[1]) is None:
                super().do_GET()
            else:
                self._answer(200, storage.page(listed[1], asked))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.rfile = io.BytesIO(body)
            parts = urlsplit(self.path)
            if parts.path == "/token":
                store.sign_ins.append(unquote(body.decode()))
                self._answer(200, {"access_token": "a-token", "expires_in": 3600, "token_type": "Bearer"})
                return
            if not parts.path.startswith("/upload/"):
                super().do_POST()
                return
            # A small object is named in its own body, a large object in the address.
            named = parse_qs(parts.query).get("name") or re.findall(r'"name": "([^"]+)"', body[:4096].decode("latin-1"))
            status = store.status_for(f"{parts.path}/{named[0]}")
            if status is not None:
                self._answer(status, {"error": {"code": status, "message": MESSAGES[status]}})
                return
            self.uploaded = named[0]
            super().do_POST()

        def send_response(self, code: int, message: str | None = None) -> None:
            if self.uploaded is not None:  # logged before the client receives the answer and sends its next object
                with store.lock:
                    store.uploads.append(self.uploaded)
                self.uploaded = None
            super().send_response(code, message)

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = orjson.dumps(content)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    store.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
