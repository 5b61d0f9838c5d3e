"""Packages for sending code, a folder's or Assay's own, to another machine: a zip named after its content."""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import shutil
import stat
import subprocess
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath

from resources.errors import BadInput, StorageError
from resources.settings import deployment_data, process_environment

LEFT_OUT = frozenset({".git", ".venv", "__pycache__"})
"""Files and folders of these names are left out, even if git tracks them."""

_ROOT = Path(__file__).parents[2]
_OURS = ("flows", "tasks", "pools", "resources")
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # the earliest time of the zip format; a fixed time keeps equal folders equal
_NAMED_FILES = 5
_OF_ANOTHER_REPOSITORY = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"})  # set in git's hooks


@dataclass(frozen=True)
class Package:
    """A packed folder."""

    digest: str
    """SHA-256 of `content`, a zip file, as 64 hexadecimal digits."""
    content: bytes = field(repr=False)


@cache
def own_code() -> Package:
    """Packs the packages of this installation, 1 MB zipped, once per process."""
    files = [path for name in _OURS for path in (_ROOT / name).rglob("*") if path.is_file() and path.suffix != ".pyc"]
    paths = sorted({*files, *deployment_data().glob("*.yaml")})
    return _packed(
        (zipfile.ZipInfo(path.relative_to(_ROOT).as_posix(), date_time=_EARLIEST), path.read_bytes()) for path in paths
    )


def package_workspace(folder: Path, *, max_bytes: int = 200 * 2**20) -> Package:
    """Packs a folder's files that git would commit, or all files outside of a work tree; symlinks stay symlinks.

    `max_bytes` bounds the total size of the files before compression.
    """
    if not folder.is_dir():
        raise BadInput(expected="a folder that exists", found=str(folder), remedy="Correct the path, or create it.")
    files = {name: folder / name for name in _names(folder)}
    sizes = {name: path.lstat().st_size for name, path in files.items()}
    if sum(sizes.values()) > max_bytes:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_NAMED_FILES]
        listed = "\n".join(f"  {sizes[name] / 2**20:8.1f} MiB  {name}" for name in largest)
        raise BadInput(
            expected=f"at most {max_bytes / 2**20:g} MiB to send with the job from {folder}",
            found=f"{sum(sizes.values()) / 2**20:.1f} MiB in {len(sizes)} files; the largest are\n{listed}",
            remedy="Name in .gitignore what the job does not need, or keep it in an object store.",
        )
    return _packed(_entry(name, files[name]) for name in sorted(files))


def unpack(package: Package, into: Path) -> Path:
    """Creates the folder `into/<digest>` unless it exists; safe in concurrent processes."""
    target = into / package.digest
    if target.is_dir():
        return target
    if hashlib.sha256(package.content).hexdigest() != package.digest:
        raise StorageError(
            expected=f"a package with the digest {package.digest}",
            found=f"{len(package.content)} bytes with another digest",
            remedy="Submit the job again; the package was damaged on its way.",
        )
    unfinished = into / f".{package.digest}.{secrets.token_hex(4)}"
    unfinished.mkdir(parents=True)
    try:
        _extract(package.content, unfinished)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():  # if it is, another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _packed(entries: Iterable[tuple[zipfile.ZipInfo, bytes]]) -> Package:
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w") as archive:
        for entry, content in entries:
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return Package(digest=hashlib.sha256(archived.getvalue()).hexdigest(), content=archived.getvalue())


def _names(folder: Path) -> Iterator[str]:
    listed = _listed_by_git(folder)
    for name in _walked(folder) if listed is None else listed:
        path = folder / name
        if LEFT_OUT.intersection(PurePosixPath(name).parts):
            continue
        if path.is_dir() and not path.is_symlink():  # a nested repository: git lists only its folder
            yield from (f"{name.rstrip('/')}/{inner}" for inner in _names(path))
        elif path.is_symlink() or path.is_file():  # excludes sockets, and deletions that are not committed
            yield name


def _walked(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        below = Path(parent).relative_to(folder)
        yield from ((below / name).as_posix() for name in files)
        yield from ((below / name).as_posix() for name in folders if (Path(parent) / name).is_symlink())
        folders[:] = [name for name in folders if name not in LEFT_OUT]


def _listed_by_git(folder: Path) -> list[str] | None:
    if shutil.which("git") is None:
        return None
    listing = _git(folder, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if listing.returncode:
        words = listing.stderr.decode(errors="replace").strip()
        if "not a git repository" in words:
            return None
        raise BadInput(
            expected=f"git to say which files of {folder} are ignored",
            found=words.splitlines()[-1] if words else f"git ended with {listing.returncode}",
            remedy="Run git status there, and mend what it complains of.",
        )
    if not listing.stdout and _git(folder, "check-ignore", "-q", ".").returncode == 0:
        return None  # a surrounding repository ignores the whole folder, which was requested explicitly
    # During a merge, git lists a file once per side.
    return sorted({os.fsdecode(name) for name in listing.stdout.split(b"\0") if name})


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    inherited = {name: value for name, value in process_environment().items() if name not in _OF_ANOTHER_REPOSITORY}
    command = ["git", "-c", "core.fsmonitor=false", "-c", "safe.bareRepository=explicit", *arguments]  # runs no program
    return subprocess.run(command, cwd=folder, env={**inherited, "LC_ALL": "C"}, capture_output=True, check=False)


def _entry(name: str, path: Path) -> tuple[zipfile.ZipInfo, bytes]:
    try:
        name.encode()
        mode = path.lstat().st_mode
        content = os.fsencode(path.readlink()) if stat.S_ISLNK(mode) else path.read_bytes()
    except (OSError, UnicodeEncodeError) as error:
        raise BadInput(
            expected="files that can be read, with names in UTF-8",
            found=f"{name!r}: {error}",
            remedy="Rename it, mend its permissions, or name it in .gitignore.",
        ) from error
    entry = zipfile.ZipInfo(name, date_time=_EARLIEST)
    entry.create_system = 3  # Unix: the upper half of the attributes holds the mode
    permissions = 0o755 if mode & 0o100 else 0o644
    entry.external_attr = (stat.S_IFLNK | 0o777 if stat.S_ISLNK(mode) else stat.S_IFREG | permissions) << 16
    return entry, content


def _extract(content: bytes, folder: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        # Symlinks last: no file is ever written through a symlink.
        for entry in sorted(archive.infolist(), key=lambda entry: stat.S_ISLNK(entry.external_attr >> 16)):
            name = PurePosixPath(entry.filename)
            if name.is_absolute() or ".." in name.parts:
                raise StorageError(
                    expected="a package with all files inside its folder",
                    found=repr(entry.filename),
                    remedy="Make packages with package_workspace.",
                )
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = entry.external_attr >> 16
            if stat.S_ISLNK(mode):
                path.symlink_to(os.fsdecode(archive.read(entry)))
            else:
                path.write_bytes(archive.read(entry))
                path.chmod(stat.S_IMODE(mode))
