"""Transfer of a job's folder to the nodes of a Ray cluster."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from resources.errors import BadInput
from resources.jobs.packaging import Package, unpack
from resources.settings import settings


def this_machine() -> str:
    """Returns a random id of this machine, the content of a file in its `/tmp`, equal for all of its processes.

    Names taken by other users, or by anything but a regular file, are skipped.
    """
    for number in count():
        path = Path(tempfile.gettempdir()) / f"assay-machine-{os.getuid()}{f'-{number}' if number else ''}"
        if not os.path.lexists(path):
            unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            unfinished.touch(mode=0o600)
            unfinished.write_text(secrets.token_hex(16))
            try:
                os.link(unfinished, path)  # unlike a rename, a link does not overwrite another process' file
            except FileExistsError:
                pass
            finally:
                unfinished.unlink()
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return path.read_text()
    raise AssertionError("numbers do not end")


@dataclass(frozen=True, kw_only=True)
class SentFolder:
    """A folder of the submitting machine, as sent to a node."""

    path: Path
    machine: str
    inode: int
    digest: str | None
    """Digest of the package for other machines; None if none was sent."""

    @classmethod
    def of(cls, path: Path, *, digest: str | None) -> SentFolder:
        return cls(path=path, machine=this_machine(), inode=path.stat().st_ino, digest=digest)

    def is_here(self) -> bool:
        """Returns True if the folder lies on this machine and is still the same (by inode)."""
        return self.machine == this_machine() and self.path.is_dir() and self.path.stat().st_ino == self.inode

    def brought_here(self, fetch: Callable[[], bytes]) -> Path:
        """Returns the folder itself on its own machine, else the folder of its unpacked package."""
        if self.is_here():
            return self.path
        if self.digest is None:
            raise BadInput(
                expected=f"{self.path} on every node, as when the job was submitted",
                found="a node of another machine, which joined the cluster later, or no such folder any more",
                remedy="Submit the job again; it is then packed for other machines.",
            )
        folders = settings().cache_dir / "workspaces"
        folders.mkdir(parents=True, exist_ok=True)
        local = folders / self.digest
        return local if local.is_dir() else unpack(Package(digest=self.digest, content=fetch()), folders)

    def moved(self, paths: Sequence[str], *, to: Path) -> list[str]:
        """Returns paths below the folder as paths below `to`; other paths are unchanged."""
        places = [Path(path) for path in paths]
        return [
            str(to / place.relative_to(self.path)) if place.is_relative_to(self.path) else str(place)
            for place in places
        ]
