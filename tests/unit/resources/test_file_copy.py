"""Copying a file in ranges: resumed, verified, and restarted if the remote file has changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.stores import FolderStore, HashKind, failing_after, folder_store
from resources.errors import StorageError
from resources.storage import storage
from resources.storage.file_copy import CopyStopped, copy_file, copy_files
from resources.storage.storage import FileInfo

RANGE = 1000
CONTENT = bytes(index % 251 for index in range(10_500))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[type[FolderStore]]:
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "weights").write_bytes(CONTENT)
    with folder_store(tmp_path / "reads") as store:
        yield store


def listed(tmp_path: Path, scheme: str = "store") -> FileInfo:
    (source,) = storage.list_files(f"{scheme}:/{tmp_path}/remote")
    return source


def copy(source: FileInfo, tmp_path: Path, *, arriving: list[int] | None = None, stop_after: int | None = None) -> Path:
    counts: list[int] = [] if arriving is None else arriving
    target = tmp_path / "local" / "weights"
    copy_file(
        source,
        target,
        sidecar=tmp_path / "origins" / "weights",
        range_bytes=RANGE,
        stopped=lambda: stop_after is not None and len(counts) > stop_after,
        on_bytes=counts.append,
    )
    return target


def test_copy_reads_every_byte_once_in_ranges(store: type[FolderStore], tmp_path: Path) -> None:
    arriving: list[int] = []
    assert copy(listed(tmp_path), tmp_path, arriving=arriving).read_bytes() == CONTENT
    assert store.ranges("weights") == [(start, min(start + RANGE, 10_500)) for start in range(0, 10_500, RANGE)]
    assert sum(arriving) == 10_500
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["weights"]
    before = store.ranges("weights")
    copy(listed(tmp_path), tmp_path)
    assert store.ranges("weights") == before


@pytest.mark.parametrize("kind", ["md5", "crc32c", "etag", None])
def test_copy_after_an_error_reads_only_what_is_missing(
    store: type[FolderStore], tmp_path: Path, kind: HashKind | None
) -> None:
    store.hash_kind = kind
    source = listed(tmp_path, "s3a" if kind == "etag" else "store")
    store.before_read = failing_after(4, "weights")
    with pytest.raises(StorageError, match="the store is gone"):
        copy(source, tmp_path)
    assert (tmp_path / "local" / "weights.partial").stat().st_size == 5 * RANGE
    read_before = len(store.ranges("weights"))
    store.before_read = failing_after(1000, "weights")
    arriving: list[int] = []
    assert copy(source, tmp_path, arriving=arriving).read_bytes() == CONTENT
    assert store.ranges("weights")[read_before:][0] == (5 * RANGE, 6 * RANGE)
    assert len(store.ranges("weights")) == 11
    assert arriving[0] == 5 * RANGE


def test_copy_stopped_between_ranges_keeps_what_arrived(store: type[FolderStore], tmp_path: Path) -> None:
    with pytest.raises(CopyStopped):
        copy(listed(tmp_path), tmp_path, stop_after=3)
    assert (tmp_path / "local" / "weights.partial").read_bytes() == CONTENT[: 3 * RANGE]


@pytest.mark.parametrize("changed", ["modified", "checksum"])
def test_copy_of_a_file_that_changed_meanwhile_starts_again(
    store: type[FolderStore], tmp_path: Path, changed: str
) -> None:
    store.hash_kind = "md5"
    with pytest.raises(CopyStopped):
        copy(listed(tmp_path), tmp_path, stop_after=3)
    remote = tmp_path / "remote" / "weights"
    before = remote.stat()
    if changed == "checksum":
        remote.write_bytes(CONTENT[::-1])
        os.utime(remote, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(remote, (1, 1))
    assert copy(listed(tmp_path), tmp_path).read_bytes() == remote.read_bytes()
    assert store.ranges("weights").count((0, RANGE)) == 2


@pytest.mark.parametrize("kind", ["md5", "crc32c", "etag"])
def test_copy_with_a_flipped_byte_is_refused_and_removed(
    store: type[FolderStore], tmp_path: Path, kind: HashKind
) -> None:
    store.hash_kind = kind
    source = listed(tmp_path, "s3a" if kind == "etag" else "store")
    store.spoil = lambda content: bytes([content[0] ^ 1]) + content[1:]
    with pytest.raises(StorageError, match=kind) as caught:
        copy(source, tmp_path)
    assert "copied again" in caught.value.remedy
    assert list((tmp_path / "local").iterdir()) == []
    store.spoil = lambda content: content
    assert copy(source, tmp_path).read_bytes() == CONTENT


def test_copy_with_a_byte_flipped_on_the_local_disk_is_refused(store: type[FolderStore], tmp_path: Path) -> None:
    store.hash_kind = "md5"
    with pytest.raises(CopyStopped):
        copy(listed(tmp_path), tmp_path, stop_after=3)
    partial = tmp_path / "local" / "weights.partial"
    partial.write_bytes(b"\xff" + partial.read_bytes()[1:])
    with pytest.raises(StorageError, match="md5"):
        copy(listed(tmp_path), tmp_path)
    assert not partial.exists()


def test_copy_where_etags_are_no_md5_is_accepted(store: type[FolderStore], tmp_path: Path) -> None:
    store.hash_kind = "etag"
    store.spoil = lambda content: bytes(reversed(content))  # content with an MD5 that differs from the ETag
    with pytest.raises(StorageError):
        copy(listed(tmp_path, "s3a"), tmp_path)
    store.encryption = "aws:kms"
    assert copy(listed(tmp_path, "s3a"), tmp_path).stat().st_size == len(CONTENT)


def test_copy_of_a_file_cut_short_meanwhile_says_so(store: type[FolderStore], tmp_path: Path) -> None:
    source = listed(tmp_path)
    (tmp_path / "remote" / "weights").write_bytes(CONTENT[:1500])
    with pytest.raises(StorageError, match="500 bytes"):
        copy(source, tmp_path)


def test_copy_of_many_files_stops_the_others_at_the_first_error(store: type[FolderStore], tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / "remote" / name).write_bytes(CONTENT)
    other_begun, failed = threading.Event(), threading.Event()
    failing: list[threading.Thread] = []

    def fail_after_the_other_began(file: Path, start: int) -> None:
        if file.name == "a" and start:
            other_begun.wait(30)
            failing.append(threading.current_thread())
            failed.set()
            raise ConnectionResetError("the store is gone")
        if file.name != "a":
            other_begun.set()
            if start:
                failed.wait(30)
                failing[0].join(30)

    store.before_read = fail_after_the_other_began
    with pytest.raises(StorageError, match="the store is gone"):
        copy_files(
            {
                storage.basename(file.uri): file
                for file in storage.list_files(f"store:/{tmp_path}/remote")
                if not file.uri.endswith("weights")
            },
            tmp_path / "local",
            sidecars=tmp_path / "origins",
            parallel=2,
            range_bytes=RANGE,
            stopped=lambda: False,
            on_bytes=lambda _: None,
        )
    assert {path.name for path in (tmp_path / "local").iterdir()} == {"a.partial", "b.partial"}
