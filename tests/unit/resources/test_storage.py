"""Storage: atomic writes, exclusive creation, listing, on local disk and in memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.stores import FolderStore, HashKind, folder_store
from resources.errors import StorageError
from resources.storage import storage
from resources.storage.tree_signature import list_tree


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[type[FolderStore]]:
    with folder_store(tmp_path / "reads") as store:
        yield store


def test_write_then_read_returns_the_content(root: str) -> None:
    uri = storage.join(root, "a", "b.json")
    storage.write_bytes(uri, b"first")
    storage.write_bytes(uri, b"second")
    assert storage.read_bytes(uri) == b"second"
    assert storage.read_bytes(uri, start=0, end=3) == b"sec"
    assert storage.exists(uri)
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(storage.join(root, "nothing"))


def test_create_from_many_threads_has_exactly_a_single_winner(root: str) -> None:
    uri = storage.join(root, "record.json")
    barrier = threading.Barrier(8)
    won: list[int] = []

    def create(index: int) -> None:
        barrier.wait()
        if storage.create_bytes(uri, str(index).encode()):
            won.append(index)

    threads = [threading.Thread(target=create, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and not storage.create_bytes(uri, b"late")
    assert storage.read_bytes(uri) == str(won[0]).encode()


WRITER = """
import os, sys
from resources.storage import storage
os.fsync = lambda _: (print(flush=True), sys.stdin.read())
storage.write_bytes(sys.argv[1], b"at last")
"""


def writer_in_the_middle(path: Path) -> subprocess.Popen[bytes]:
    """Starts a process that has written a part of a file and ends it with its input; the part is an hour old."""
    command = [sys.executable, "-c", WRITER, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    for left in path.parent.glob(f".{path.name}.*.partial"):
        os.utime(left, (time.time() - 3600, time.time() - 3600))
    return process


def test_write_sweeps_leftovers_of_killed_writers_and_not_of_living_writers(tmp_path: Path) -> None:
    with writer_in_the_middle(tmp_path / "killed") as killed, writer_in_the_middle(tmp_path / "living") as living:
        killed.kill()
        killed.wait()
        (tmp_path / ".just.begun_by.partial").write_bytes(b"")
        (tmp_path / ".weights.partial").write_bytes(b"")
        os.utime(tmp_path / ".weights.partial", (1, 1))  # another process's, to be resumed
        storage.write_bytes(str(tmp_path / "new"), b"")
        names = {path.name.partition(".living.")[1] or path.name for path in tmp_path.iterdir()}
        assert names == {"new", ".living.", ".just.begun_by.partial", ".weights.partial"}
        living.communicate(b"")
    assert living.returncode == 0 and (tmp_path / "living").read_bytes() == b"at last"


def test_list_files_names_every_file_with_its_size(root: str) -> None:
    storage.write_bytes(storage.join(root, "x", "one"), b"1")
    storage.write_bytes(storage.join(root, "two"), b"22")
    listed = storage.list_files(root)
    assert [(file.uri, file.size) for file in listed] == [
        (storage.join(root, "two"), 2),
        (storage.join(root, "x", "one"), 1),
    ]
    assert all(file.modified > 0 for file in listed)
    assert storage.list_files(storage.join(root, "absent")) == []


def test_list_files_follows_links_to_files_and_not_into_folders(tmp_path: Path) -> None:
    root = tmp_path / "store"
    (root / "a").mkdir(parents=True)
    (root / "a" / "b.json").write_bytes(b"12345")
    (root / ".c.json.x.partial").write_bytes(b"half")
    (root / "folder").symlink_to(root / "a")
    (root / "link").symlink_to(root / "a" / "b.json")
    (root / "lost").symlink_to(root / "nothing")
    sizes = {file.uri.removeprefix(f"{root}/"): file.size for file in storage.list_files(str(root))}
    assert sizes == {"a/b.json": 5, "link": 5, "lost": 0}
    before = list_tree(str(root))
    assert {file.uri: file for file in before.files()} == {file.uri: file for file in storage.list_files(str(root))}
    assert list_tree(str(root)).signature == before.signature
    (root / "a" / "b.json").write_bytes(b"54321")
    os.utime(root / "a" / "b.json", ns=(1, 1))
    assert list_tree(str(root)).signature != before.signature
    os.utime(root / "a" / "b.json", (2e9, 2e9))
    [link] = [file for file in storage.list_files(str(root)) if file.uri.endswith("link")]
    assert link.modified == 2e9, "the target of a link was written again"


@pytest.mark.parametrize("span", [(None, None), (0, 8), (3, None), (3, 7), (9, 20), (5, 5)])
def test_read_part_of_a_file_is_that_part(root: str, span: tuple[int | None, int | None]) -> None:
    content = bytes(range(10))
    storage.write_bytes(storage.join(root, "f"), content)
    start, end = span
    assert storage.read_bytes(storage.join(root, "f"), start=start, end=end) == content[start:end]


def test_copy_to_local_brings_the_whole_folder(root: str, tmp_path: Path) -> None:
    storage.write_bytes(storage.join(root, "model", "config.json"), b"{}")
    storage.write_bytes(storage.join(root, "model", "sub", "w"), b"123")
    target = tmp_path / "copies" / "model"
    storage.copy_to_local(storage.join(root, "model"), target)
    storage.copy_to_local(storage.join(root, "model"), target)
    assert (target / "config.json").read_bytes() == b"{}"
    assert (target / "sub" / "w").read_bytes() == b"123"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_copy_to_local_over_a_file_in_the_way_says_so(root: str, tmp_path: Path) -> None:
    storage.write_bytes(storage.join(root, "model", "config.json"), b"{}")
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        storage.copy_to_local(storage.join(root, "model"), tmp_path / "taken")


def test_write_over_a_file_in_the_way_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Expected: to write") as caught:
        storage.write_bytes(str(tmp_path / "file" / "below"), b"")
    assert caught.value.remedy


def test_write_on_a_full_disk_leaves_nothing_behind(tmp_path: Path, small_disk: Path) -> None:
    uri = str(small_disk / "record.json")
    storage.write_bytes(uri, b"old")
    with pytest.raises(StorageError, match="free some space"):
        storage.write_bytes(uri, b"x" * 8_000_000)
    with pytest.raises(StorageError, match="free some space"):
        storage.create_bytes(str(small_disk / "new.json"), b"x" * 8_000_000)
    assert storage.read_bytes(uri) == b"old"
    assert [path.name for path in small_disk.iterdir()] == ["record.json"]


def test_unknown_protocol_is_refused_with_the_known_protocols() -> None:
    with pytest.raises(StorageError, match="gs://"):
        storage.exists("nosuch://bucket/x")


@pytest.mark.parametrize(
    ("kind", "scheme", "parts", "value"),
    [
        ("md5", "store", 1, hashlib.md5(b"123456789").hexdigest()),
        ("crc32c", "store", 1, "e3069283"),
        ("etag", "s3a", 1, hashlib.md5(b"123456789").hexdigest()),
        ("etag", "s3a", 3, None),
        ("etag", "store", 1, None),
        (None, "store", 1, None),
    ],
)
def test_list_files_tells_hashes_that_can_be_checked(
    store: type[FolderStore], tmp_path: Path, kind: HashKind | None, scheme: str, parts: int, value: str | None
) -> None:
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "file").write_bytes(b"123456789")
    store.hash_kind, store.parts = kind, parts
    (listed,) = storage.list_files(f"{scheme}:/{tmp_path}/remote")
    assert (listed.content_hash.value if listed.content_hash else None) == value
    assert (listed.content_hash.kind if listed.content_hash else None) == (kind if value else None)
    assert (listed.checksum is None) == (kind is None)


@pytest.mark.parametrize(("encryption", "is_md5"), [(None, True), ("AES256", True), ("aws:kms", False)])
def test_etag_is_md5_unless_the_key_is_the_customers(
    store: type[FolderStore], tmp_path: Path, encryption: str | None, is_md5: bool
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    store.encryption = encryption
    assert storage.etag_is_md5(f"s3a:/{tmp_path}/file") is is_md5
    assert storage.etag_is_md5(str(tmp_path / "file"))
    assert not storage.etag_is_md5("s3a://bucket--eun1-az1--x-s3/file")  # a directory bucket
