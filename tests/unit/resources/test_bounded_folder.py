"""A bounded folder: holders of its entries, also during a removal."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from fakes.polling import eventually
from resources.errors import StorageError
from resources.storage.bounded_folder import BoundedFolder, Hold, size_text

KEY, OTHER = "a" * 32, "b" * 32


def fill(folder: BoundedFolder, key: str, size_bytes: int) -> None:
    hold = folder.hold(key)
    with folder.filling(key, waiting=lambda: None):
        folder.make_room(key, size_bytes)
        content = folder.partial(key) / "content"
        content.mkdir()
        (content / "file").write_bytes(b"x" * size_bytes)
        folder.publish(key, content)
    hold.release()


def test_hold_taken_while_the_entry_is_removed_still_counts(tmp_path: Path) -> None:
    bounded = BoundedFolder(tmp_path, max_bytes=1000)
    lock = tmp_path / f"{KEY}.lock"
    holds: list[Hold] = []
    with lock.open("ab") as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        inode = os.fstat(removing.fileno()).st_ino
        taking = threading.Thread(target=lambda: holds.append(bounded.hold(KEY)))
        taking.start()
        eventually(
            lambda: any("->" in line and f":{inode} " in line for line in Path("/proc/locks").read_text().split("\n"))
        )
        lock.unlink()
    taking.join(30)
    bounded.partial(KEY).mkdir()
    (bounded.partial(KEY) / "file").write_bytes(b"x" * 900)
    with pytest.raises(StorageError, match=f"in use: {KEY[:12]} "):
        bounded.make_room(OTHER, 200)
    holds[0].release()
    bounded.make_room(OTHER, 200)
    assert not bounded.partial(KEY).exists()


def test_make_room_counts_plans_of_another_process(tmp_path: Path) -> None:
    bounded = BoundedFolder(tmp_path, max_bytes=1000)
    hold = bounded.hold(KEY)
    bounded.make_room(KEY, 900)
    with pytest.raises(StorageError, match="900 B"):
        bounded.make_room(OTHER, 200)
    hold.release()


def test_make_room_removes_what_a_crash_left_half_removed(tmp_path: Path) -> None:
    bounded = BoundedFolder(tmp_path, max_bytes=1000)
    fill(bounded, KEY, 500)
    bounded.entry(KEY).rename(tmp_path / f"{KEY}.evicted")
    bounded.make_room(OTHER, 900)
    assert {path.name for path in tmp_path.iterdir()} == {f"{OTHER}.partial", "room.lock"}


def test_make_room_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    bounded = BoundedFolder(tmp_path, max_bytes=1000)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "file").write_bytes(b"x" * 5000)
    fill(bounded, KEY, 1000)
    assert (tmp_path / "small" / "file").exists()


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (999, "999 B"), (34_000, "34.0 kB"), (2_500_000_000_000, "2500.0 GB")]
)
def test_size_text_is_readable(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
