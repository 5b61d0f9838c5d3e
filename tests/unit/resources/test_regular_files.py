"""Folders that other programs can write: which files are opened and copied."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from resources.storage import storage
from resources.storage.regular_files import (
    UnsafeFile,
    copy_regular_files,
    open_regular,
    open_within,
    path_of_open_file,
    real_path,
)

SECRET = "outside"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "key").write_text(SECRET)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "good.json").write_text("good")
    return tmp_path / "in"


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


LEFT: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "link": (lambda top: (top / "x").symlink_to(top.parent / "outside" / "key"), "x", "links"),
    "relative link": (lambda top: (top / "deep" / "x").symlink_to("../../outside/key"), "deep/x", "links"),
    "link to a folder": (lambda top: (top / "x").symlink_to(top.parent / "outside"), "x/key", "links"),
    "dangling link": (lambda top: (top / "x").symlink_to("nothing"), "x", "links"),
    "FIFO": (lambda top: os.mkfifo(top / "x"), "x", "FIFOs, devices or folders in place of files"),
    "socket": (lambda top: _socket(top / "x"), "x", "sockets"),
}


@pytest.mark.parametrize("case", LEFT)
def test_file_that_is_not_regular_is_refused_and_not_copied(folder: Path, case: str):
    leave, name, kind = LEFT[case]
    leave(folder)
    with pytest.raises(UnsafeFile):
        open_regular(folder, name)
    copied = copy_regular_files(folder, folder.parent / "out")
    assert (copied.files, dict(copied.dropped)) == (1, {kind: 1})
    assert [path.name for path in (folder.parent / "out").rglob("*")] == ["deep", "good.json"]


@pytest.mark.parametrize("name", ["../outside/key", "/etc/passwd", "deep/../../outside/key", "", ".", "a\0b"])
def test_name_that_leads_out_of_the_folder_is_refused(folder: Path, name: str):
    with pytest.raises(UnsafeFile, match="not a path below"):
        open_regular(folder, name)


@pytest.mark.parametrize("name", [".git/config", ".GIT/config", "bare/HEAD", ".envrc"])
def test_file_that_other_programs_take_for_settings_is_not_copied(folder: Path, name: str):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("[core]\n\tfsmonitor = id\n")
    copied = copy_regular_files(folder, folder.parent / "out")
    assert (copied.files, dict(copied.dropped)) == (1, {"hidden names, or HEAD": 1})


def test_regular_file_is_read_and_a_missing_file_is_not_found(folder: Path):
    with open_regular(folder, "deep/good.json", owned=True, max_bytes=4) as file:
        assert file.read() == b"good"
    with pytest.raises(FileNotFoundError):
        open_regular(folder, "deep/none")


def test_file_that_others_can_write_or_that_is_too_large_is_refused(folder: Path):
    with pytest.raises(UnsafeFile, match="too large"):
        open_regular(folder, "deep/good.json", max_bytes=3)
    (folder / "deep" / "good.json").chmod(0o666)
    with pytest.raises(UnsafeFile, match="others can write"):
        open_regular(folder, "deep/good.json", owned=True)


def test_copy_clears_modes_and_leaves_what_is_not_bounded(folder: Path):
    (folder / "deep" / "good.json").chmod(0o6777)
    os.link(folder / "deep" / "good.json", folder.parent / "other name")
    (folder / "set").write_text("uid")
    (folder / "set").chmod(0o6777)
    os.truncate(os.open(folder / "sparse", os.O_CREAT | os.O_WRONLY), 1 << 40)
    (folder / "line\nbreak").touch()
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).touch()
    (folder / "harness.log").touch()
    (folder / "/".join("d" * 40)).mkdir(parents=True)
    (folder.parent / "out").mkdir()
    copied = copy_regular_files(folder, folder.parent / "out", reserved=frozenset({"harness.log"}))
    assert [path.name for path in (folder.parent / "out").rglob("*")] == ["set"]
    assert (folder.parent / "out" / "set").stat().st_mode & 0o7777 & ~0o022 == 0o644 & ~0o022
    assert dict(copied.dropped) == {
        "files with several names": 1,
        "files beyond 10000, or 256 MiB together": 1,
        "names that are not printable": 2,
        "names of Assay's own files": 1,
        "folders deeper than 12 levels": 1,
    }


def test_copy_of_a_folder_in_place_of_a_copied_file_keeps_the_file(folder: Path):
    out = folder.parent / "out"
    copy_regular_files(folder, out)
    (folder / "deep" / "good.json").unlink()
    (folder / "deep" / "good.json").mkdir()
    (folder / "deep" / "good.json" / "x").touch()
    assert copy_regular_files(folder, out).dropped["names that are both a file and a folder"] == 1
    assert (out / "deep" / "good.json").read_text() == "good"


def test_open_file_of_a_process_is_read_after_its_removal_but_not_through_a_link_of_a_folder(folder: Path):
    secret = folder.parent / "secret.json"
    secret.write_bytes(b"secret")
    with secret.open("rb") as opened:
        held = f"/proc/{os.getpid()}/fd/{opened.fileno()}"
        (folder / "link.json").symlink_to(held)
        for removed in (False, True):
            if removed:
                secret.unlink()
            assert real_path(folder / "link.json") == real_path(held) == held
            assert path_of_open_file(held) == str(secret)
            with os.fdopen(open_within(held), "rb") as file:
                assert file.read() == b"secret"
            with pytest.raises(UnsafeFile):
                open_within(folder / "link.json")
            [listed] = [file for file in storage.list_files(str(folder)) if file.uri.endswith("link.json")]
            assert not listed.regular
    assert path_of_open_file(folder / "link.json") is None
