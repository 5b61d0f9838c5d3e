"""libtpu's lock file is removed before and after, independent of its owner."""

from __future__ import annotations

from pathlib import Path

import pytest

from resources.jobs.tpu_lockfile import remove_tpu_lockfile_on_exit


def test_block_with_lockfile_of_a_dead_process_starts_and_ends_without_it(tmp_path: Path) -> None:
    lockfile = tmp_path / "libtpu_lockfile"
    lockfile.touch()
    with pytest.raises(RuntimeError), remove_tpu_lockfile_on_exit(path=lockfile):
        assert not lockfile.exists()
        lockfile.touch()
        raise RuntimeError
    assert not lockfile.exists()


def test_decorated_function_called_twice_finds_no_lockfile_either_time(tmp_path: Path) -> None:
    lockfile = tmp_path / "libtpu_lockfile"

    @remove_tpu_lockfile_on_exit(path=lockfile)
    def use_the_tpu(name: str) -> str:
        existed = lockfile.exists()
        lockfile.touch()
        return f"{name}: {existed}"

    lockfile.touch()
    assert [use_the_tpu("first"), use_the_tpu("second")] == ["first: False", "second: False"]
    assert not lockfile.exists()


def test_lockfile_of_another_user_is_removed_with_sudo_that_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    sudo = tmp_path / "sudo"
    sudo.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {calls}\n')
    sudo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    not_ours = Path("/proc/version")  # not removable, not even by root
    with remove_tpu_lockfile_on_exit(path=not_ours):
        assert calls.read_text() == "-n rm -f /proc/version\n"


def test_lockfile_that_cannot_be_removed_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no sudo there
    with remove_tpu_lockfile_on_exit(path=Path("/proc/version")):
        pass
    assert "/proc/version belongs to another user" in caplog.text
