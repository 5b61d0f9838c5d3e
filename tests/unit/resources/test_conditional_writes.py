"""Conditional replacement of a file, in each kind of store; and records, which rely on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.registry import _registry
from fsspec.spec import AbstractFileSystem

from fakes.conditional_store import conditional_store
from fakes.records import cell_of, make_record
from resources.storage import storage
from resources.storage.conditional_writes import creates_exclusively, delete_version, read_version, replace_bytes
from tasks.records.record import read_record, write_record


class Versioned(AbstractFileSystem):
    """Fake of the used parts of Google's and Amazon's store clients; each write is a new version."""

    cachable = False
    _location = "https://storage.test"
    objects: ClassVar[dict[str, tuple[int, bytes]]] = {}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        version, content = self.objects[path]
        version_fields = {"generation": str(version), "ETag": f'"{version}"'}
        return {"name": path, "type": "file", "size": len(content), **version_fields}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self.objects[path][1][start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        version = self.objects.get(path, (0, b""))[0]
        if mode == "create" and version:
            raise FileExistsError(path)
        self.objects[path] = (version + 1, value)

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = str(self._strip_protocol(path)).partition("/")
        return bucket, key, None


class Google(Versioned):
    protocol = "gs"

    def call(
        self, method: str, path: str, *, ifGenerationMatch: str, name: str = "file", data: bytes = b"", **_: Any
    ) -> None:
        posted = ("POST", "https://storage.test/upload/storage/v1/b/bucket/o")
        assert (method, path) in (posted, ("DELETE", "https://storage.test/storage/v1/b/bucket/o/file"))
        if ifGenerationMatch != str(self.objects.get(f"bucket/{name}", (0,))[0]):
            raise FileExistsError(path)  # gcsfs's error for status 412
        if method == "DELETE":
            del self.objects[f"bucket/{name}"]
        else:
            self.pipe_file(f"bucket/{name}", data)


class Amazon(Versioned):
    protocol = "s3"

    def call_s3(self, method: str, *, Bucket: str, Key: str, IfMatch: str, Body: bytes = b"") -> None:
        assert method in ("put_object", "delete_object")
        if IfMatch != f'"{self.objects.get(f"{Bucket}/{Key}", (0,))[0]}"':
            raise OSError(22, "At least one of the pre-conditions you specified did not hold")  # s3fs's error for 412
        if method == "delete_object":
            del self.objects[f"{Bucket}/{Key}"]
        else:
            self.pipe_file(f"{Bucket}/{Key}", Body)


@pytest.fixture(params=["disk", "memory", "gs", "s3", "cond"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    before = {name: _registry.get(name) for name in ("gs", "s3")}
    for kind in (Google, Amazon):
        kind.objects.clear()
        fsspec.register_implementation(str(kind.protocol), kind, clobber=True)
    try:
        with conditional_store():
            place = {"disk": str(tmp_path), "memory": f"memory://{tmp_path.name}"}
            yield f"{place.get(request.param, f'{request.param}://bucket')}/file"
    finally:
        for name, kind in before.items():
            _registry.pop(name, None)
            if kind is not None:
                _registry[name] = kind


def test_file_is_replaced_only_if_it_is_what_was_read(uri: str):
    assert read_version(uri) is None
    storage.write_bytes(uri, b"first")
    mine, theirs = read_version(uri), read_version(uri)
    assert mine is not None and theirs is not None
    assert replace_bytes(uri, b"theirs", standing=theirs)
    assert not replace_bytes(uri, b"mine", standing=mine)
    assert storage.read_bytes(uri) == b"theirs"
    again = read_version(uri)
    assert again is not None and replace_bytes(uri, b"mine", standing=again)
    assert storage.read_bytes(uri) == b"mine"


def test_file_is_deleted_only_if_it_is_what_was_read(uri: str):
    storage.write_bytes(uri, b"first")
    first = read_version(uri)
    storage.write_bytes(uri, b"second")
    second = read_version(uri)
    assert first is not None and second is not None
    delete_version(uri, standing=first)
    assert storage.read_bytes(uri) == b"second"
    delete_version(uri, standing=second)
    delete_version(uri, standing=second)  # a second delete has no effect
    assert read_version(uri) is None


def test_file_in_a_removed_folder_is_not_replaced(tmp_path: Path):
    file = tmp_path / "folder" / "file"
    storage.write_bytes(str(file), b"first")
    standing = read_version(str(file))
    assert standing is not None
    file.unlink()
    file.parent.rmdir()
    assert not replace_bytes(str(file), b"mine", standing=standing)
    delete_version(str(file), standing=standing)


def test_store_that_accepts_two_creators_of_a_file_is_detected(tmp_path: Path):
    with conditional_store(exclusive=False):
        assert not creates_exclusively("cond://careless")
    with conditional_store():
        assert creates_exclusively("cond://careful")
    assert creates_exclusively(str(tmp_path))


def test_outcomes_that_come_at_once_over_a_failure_leave_the_success(tmp_path: Path):
    cell = cell_of(tmp_path, make_record())
    write_record(cell, make_record(status="infra_failed"))
    records = [make_record(status="infra_failed"), make_record(), make_record(status="failed")] * 4
    threads = [threading.Thread(target=write_record, args=(cell, record)) for record in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    standing = read_record(cell)
    assert standing is not None and standing.succeeded


def test_failures_of_machines_in_a_row_are_counted_in_the_record(tmp_path: Path):
    cell = cell_of(tmp_path, make_record())
    counted = [write_record(cell, make_record(status=status)).infra_failures for status in
               ("infra_failed", "infra_failed", "failed", "infra_failed")]  # fmt: skip
    assert counted == [1, 2, None, 1]


def test_attempt_that_was_ordered_to_end_is_no_failure_of_machines(tmp_path: Path):
    cell = cell_of(tmp_path, make_record())
    told_to_end = make_record(status="infra_failed", interrupted=True)
    written = [told_to_end, make_record(status="infra_failed"), told_to_end, make_record(status="infra_failed")]
    assert [write_record(cell, record).infra_failures for record in written] == [0, 1, 1, 2]
