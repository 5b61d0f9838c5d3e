"""Cache files that other users could have written are not used, and a warning names them."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.models import write_checkpoint
from pools.journal.schema import connect
from pools.weights import content
from pools.weights.model_files import digest_model_folder, inspect_model_folder
from resources.environments.environments import EnvironmentSpec, ensure_environment
from resources.errors import EnvironmentBuildFailed
from resources.settings import settings
from tasks.reports.viewer.kept import KeptColumns, kept_at

OTHER_USER = 54321
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def _writable(path: Path) -> None:
    path.chmod(0o666)


def _given_away(path: Path) -> None:
    os.chown(path, OTHER_USER, OTHER_USER)


def _linked(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


FOREIGN = [_writable, pytest.param(_given_away, marks=is_root)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    return tmp_path / "cache"


@pytest.mark.parametrize("make_foreign", FOREIGN)
def test_columns_that_others_could_write_are_made_again(
    make_foreign: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = kept_at("evaluations")
    assert path is not None
    KeptColumns(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("insert into texts values (x'00', x'00')")
    connection.close()
    assert kept_at("evaluations") == path
    assert KeptColumns(path).knows(b"\0")
    make_foreign(path)
    assert kept_at("evaluations") == path
    assert not KeptColumns(path).knows(b"\0")
    assert "Not used" in caplog.text


def test_columns_in_a_folder_that_others_can_write_are_not_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "columns").mkdir(parents=True)
    (cache / "columns").chmod(0o777)
    assert kept_at("evaluations") is None
    assert "ASSAY_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("make_foreign", [*FOREIGN, _linked])
def test_remembered_digest_that_others_could_write_is_not_used(
    cache: Path, tmp_path: Path, make_foreign: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "SETTLED_SECONDS", -1e9)
    folder = inspect_model_folder(str(write_checkpoint(tmp_path / "run-a" / "step-1")))
    true = digest_model_folder(folder)
    [remembered] = (cache / "digests").iterdir()
    remembered.write_bytes(hashlib.sha256(b"another checkpoint").hexdigest().encode())
    assert digest_model_folder(folder) != true, "its own cache is believed"
    make_foreign(remembered)
    assert digest_model_folder(folder) == true


@is_root
def test_environment_and_journal_of_another_user_are_refused(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("")
    spec = EnvironmentSpec(name="empty", requirements=tmp_path / "list.txt", smoke_import=None)
    _given_away(ensure_environment(spec).directory)
    with pytest.raises(EnvironmentBuildFailed, match=f"an environment of user {OTHER_USER}"):
        ensure_environment(spec)
    connect(cache / "journal.sqlite", wait_seconds=1).close()
    _given_away(cache / "journal.sqlite")
    with pytest.raises(PermissionError, match="another user's"):
        connect(cache / "journal.sqlite", wait_seconds=1)
