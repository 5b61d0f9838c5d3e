"""Parts of a folder that travel with a job, and their unchanged arrival."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resources.errors import BadInput, StorageError
from resources.jobs.packaging import Package, package_workspace, unpack


def _git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def _write(folder: Path, **contents: str) -> None:
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or path.is_file()}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    _write(folder, script_dot_py="print(1)", _dot_gitignore="*.bin\n", data__weights_dot_bin="x" * 1000)
    _git(folder, "init", "-q")
    _git(folder, "add", ".")
    _git(folder, "commit", "-qm", "first")
    return folder


def test_package_of_a_repository_has_what_git_would_commit(repository: Path, tmp_path: Path) -> None:
    _write(repository, untracked_dot_txt="new", gone_dot_py="", _dot_venv__bin__python="", pkg____init___dot_py="")
    (repository / "pkg").mkdir(exist_ok=True)
    (repository / "pkg" / "__pycache__").mkdir()
    (repository / "pkg" / "__pycache__" / "a.pyc").write_text("")
    _git(repository, "add", "gone.py")
    (repository / "gone.py").unlink()
    inner = repository / "vendored"
    _write(inner, inner_dot_py="")
    _git(inner, "init", "-q")

    folder = unpack(package_workspace(repository), tmp_path / "there")

    assert {"script.py", ".gitignore", "untracked.txt", "vendored/inner.py"} <= _files(folder)
    assert not {name for name in _files(folder) if name.endswith((".bin", ".pyc", "gone.py")) or ".venv" in name}


def test_settings_of_a_repository_run_no_command(repository: Path, tmp_path: Path) -> None:
    inner = repository / "evaluations" / "attempt"
    _write(inner, samples_dot_json="{}")
    _git(inner, "init", "-q")
    _git(inner, "config", "core.fsmonitor", f"touch {tmp_path / 'ran'}; :")
    files = _files(unpack(package_workspace(repository), tmp_path / "there"))
    assert "evaluations/attempt/samples.json" in files
    assert not (tmp_path / "ran").exists()


def test_package_of_a_folder_in_a_repository_obeys_its_rules_unless_it_is_ignored_as_a_whole(
    repository: Path, tmp_path: Path
) -> None:
    _write(repository, inside__a_dot_py="a", inside__b_dot_bin="b", scratch__a_dot_py="a", scratch___dot_gitignore="*")
    for name, files in (("inside", {"a.py"}), ("scratch", {"a.py", ".gitignore"})):
        assert _files(unpack(package_workspace(repository / name), tmp_path / name)) == files


def test_package_of_a_plain_folder_keeps_links_and_executable_bits(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    _write(folder, run_dot_sh="#!/bin/sh", deep__er__a_dot_txt="a", _dot_venv__b="", _dot_git__c="")
    (folder / "run.sh").chmod(0o700)
    (folder / "link").symlink_to("deep/er/a.txt")
    (folder / "folder-link").symlink_to("deep")
    os.mkfifo(folder / "pipe")

    arrived = unpack(package_workspace(folder), tmp_path / "there")

    assert _files(arrived) == {"run.sh", "deep/er/a.txt", "link", "folder-link"}
    assert os.access(arrived / "run.sh", os.X_OK)
    assert not os.access(arrived / "deep/er/a.txt", os.X_OK)
    assert (arrived / "link").readlink() == Path("deep/er/a.txt")
    assert (arrived / "folder-link" / "er" / "a.txt").read_text() == "a"


def test_package_of_equal_content_has_the_same_digest_whenever_it_was_written(tmp_path: Path) -> None:
    for name, time in (("one", 10**9), ("two", 10**9 + 12345)):
        _write(tmp_path / name, a__b_dot_py="b", c_dot_py="c")
        os.utime(tmp_path / name / "c.py", (time, time))
    earlier, later = (package_workspace(tmp_path / name) for name in ("one", "two"))
    assert earlier == later
    assert earlier.digest == hashlib.sha256(earlier.content).hexdigest()
    (tmp_path / "two" / "c.py").chmod(0o755)
    assert package_workspace(tmp_path / "two").digest != earlier.digest


def test_package_that_is_too_large_names_the_largest_files(tmp_path: Path) -> None:
    for index in range(7):
        (tmp_path / f"file-{index}").write_bytes(b"x" * 2**18 * (index + 1))
    with pytest.raises(BadInput) as caught:
        package_workspace(tmp_path, max_bytes=2**20)
    assert [line.split()[-1] for line in caught.value.found.splitlines()[1:]] == [f"file-{n}" for n in (6, 5, 4, 3, 2)]
    assert "1 MiB" in caught.value.expected and ".gitignore" in caught.value.remedy
    with pytest.raises(BadInput):
        package_workspace(tmp_path / "missing")


def test_unpack_by_many_at_once_leaves_a_single_whole_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for index in range(50):
        _write(source, **{f"folder{index}__a": str(index)})
    package = package_workspace(source)
    start = threading.Barrier(8)

    def run(_: int) -> set[str]:
        start.wait()
        return _files(unpack(package, tmp_path / "there"))

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(run, range(8)))
    assert seen == [_files(source)] * 8
    assert [path.name for path in (tmp_path / "there").iterdir()] == [package.digest]


def test_unpack_of_a_damaged_package_or_of_files_outside_the_folder_leaves_nothing(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("../evil", "x")
    raw = content.getvalue()
    for package in (Package(digest="0" * 64, content=b"PK"), Package(hashlib.sha256(raw).hexdigest(), raw)):
        with pytest.raises(StorageError):
            unpack(package, tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == [] and not (tmp_path / "evil").exists()
