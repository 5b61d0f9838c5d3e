"""Preemption notices of Google Cloud's metadata server; libtpu's lock file, removed before and after its use."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.http_server import Answer, Request, http_server
from resources.backends.ray.replica import preemption_announced, remove_tpu_lockfile_on_exit

PREEMPTED = "/computeMetadata/v1/instance/preempted"


@pytest.mark.parametrize(
    ("content", "status", "announced"),
    [(b"TRUE", 200, True), (b"FALSE", 200, False), (b"no such page", 404, False), (b"<html>TRUE", 200, False)],
)
def test_preemption_is_announced_only_where_the_metadata_server_says_so(
    content: bytes, status: int, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the metadata server is never behind a proxy

    def answer(request: Request) -> Answer:
        return status if request.headers["Metadata-Flavor"] == "Google" else 403, {}, content

    with http_server(answer) as address:
        assert preemption_announced(url=address + PREEMPTED) is announced


def test_machine_without_a_metadata_server_was_not_preempted() -> None:
    assert not preemption_announced(url="http://127.0.0.1:9/", timeout_seconds=1)


def test_lockfile_is_removed_before_and_after_each_use(tmp_path: Path) -> None:
    lockfile = tmp_path / "libtpu_lockfile"

    @remove_tpu_lockfile_on_exit(path=lockfile)
    def use_the_tpu() -> None:
        assert not lockfile.exists()
        lockfile.touch()
        raise RuntimeError

    for _ in range(2):
        lockfile.touch()
        with pytest.raises(RuntimeError):
            use_the_tpu()
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
