"""Folders that other programs may write: only regular files are read or copied, and no link leads out."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from resources.errors import IrregularFile, StorageError
from resources.jobs.logs import part_of_file
from resources.storage import storage
from resources.storage.files import tail
from resources.storage.regular_files import UnsafeFile, open_within

SECRET = "PRIVATE KEY"


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


HOSTILE = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "link-out": _link("../secret"),
    "link-to-device": _link("/dev/zero"),
    "link-to-etc": _link("/etc/hostname"),
    "link-to-itself": _link("bad"),
    "link-to-a-pipe": _link("../pipe"),
    "link-to-memory": _link("/proc/self/environ"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    os.mkfifo(tmp_path / "pipe")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "good").write_text("good")
    return folder


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_file_is_neither_read_nor_copied(folder: Path, make: Callable[[Path], None], tmp_path: Path) -> None:
    make(folder / "bad")
    with pytest.raises(IrregularFile):
        storage.read_bytes(str(folder / "bad"))
    listed = {storage.basename(file.uri): file.regular for file in storage.list_files(str(folder))}
    assert listed.pop("bad", False) is False
    assert listed == {"good": True}
    storage.copy_to_local(str(folder), tmp_path / "copy")
    storage.copy_from_local(folder, f"memory://{tmp_path.name}")
    assert [path.name for path in (tmp_path / "copy").rglob("*") if not path.is_dir()] == ["good"]
    assert [storage.basename(file.uri) for file in storage.list_files(f"memory://{tmp_path.name}")] == ["good"]


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_log_reads_as_empty(folder: Path, make: Callable[[Path], None]) -> None:
    make(folder / "bad")
    assert (tail(folder / "bad", 10), part_of_file(folder / "bad", "").output) == ("", b"")


def test_link_within_its_folder_is_read_and_copied(folder: Path, tmp_path: Path) -> None:
    (folder / "link").symlink_to("sub/good")
    assert storage.read_bytes(str(folder / "link")) == b"good"
    assert storage.copy_to_local(str(folder), tmp_path / "copy") == []
    assert (tmp_path / "copy" / "link").read_text() == "good"


def test_link_of_a_hub_cache_is_read_from_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0f"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "1").write_text("config")
    (snapshot / "config.json").symlink_to("../../blobs/1")
    assert storage.read_bytes(str(snapshot / "config.json")) == b"config"
    [file] = storage.list_files(str(snapshot))
    assert (file.regular, file.place) == (True, str(tmp_path / "models--a--b" / "blobs" / "1"))


def test_folder_in_a_linked_folder_is_not_within(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text(SECRET)
    (folder / "linked").symlink_to(tmp_path / "other")
    with pytest.raises(UnsafeFile, match="leads out"):
        open_within(folder / "linked" / "file", within=folder)
    with pytest.raises(StorageError, match="link"):
        storage.copy_to_local(str(folder / "linked"), tmp_path / "copy")


def test_file_that_the_user_named_may_be_a_link_and_no_pipe(folder: Path) -> None:
    (folder / "link").symlink_to("../secret")
    assert storage.read_bytes(str(folder / "link"), within="/").decode() == SECRET
    os.mkfifo(folder / "pipe")
    assert storage.content_digest(str(folder / "pipe")) is storage.content_digest("/dev/zero") is None
    with pytest.raises(IrregularFile, match="a FIFO"):
        storage.read_bytes(str(folder / "pipe"), within="/")


def test_object_with_a_name_outside_the_folder_is_not_copied(tmp_path: Path):
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/hostile/run/{name}": b"x" for name in ("config.json", "../../escaped")})
    with pytest.raises(IrregularFile, match="outside"):
        storage.copy_to_local("memory://hostile/run", tmp_path / "copy")
    assert not list(tmp_path.iterdir())
