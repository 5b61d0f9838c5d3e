"""The folder of a job on its way to the nodes of a Ray cluster."""

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
    """A word that processes of one machine share, and no other machine knows: the content of a file in its `/tmp`.

    A name that somebody else has taken there, or that is no file, is passed over.
    """
    for number in count():
        path = Path(tempfile.gettempdir()) / f"assay-machine-{os.getuid()}{f'-{number}' if number else ''}"
        if not os.path.lexists(path):
            unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            unfinished.touch(mode=0o600)
            unfinished.write_text(secrets.token_hex(16))
            try:
                os.link(unfinished, path)  # unlike a rename it leaves what another process has put there
            except FileExistsError:
                pass
            finally:
                unfinished.unlink()
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return path.read_text()
    raise AssertionError("numbers do not end")


@dataclass(frozen=True, kw_only=True)
class SentFolder:
    """A folder of the submitting machine, as a node gets it."""

    path: Path
    machine: str
    inode: int
    digest: str | None
    """Of the package to be used on other machines; None where none was sent."""

    @classmethod
    def of(cls, path: Path, *, digest: str | None) -> SentFolder:
        """Describes an existing folder of this machine."""
        return cls(path=path, machine=this_machine(), inode=path.stat().st_ino, digest=digest)

    def is_here(self) -> bool:
        """Returns True if this machine is the one that the folder lies on, and the folder is still the same."""
        return self.machine == this_machine() and self.path.is_dir() and self.path.stat().st_ino == self.inode

    def brought_here(self, fetch: Callable[[], bytes]) -> Path:
        """The folder itself where this is its machine, else its package, unpacked once."""
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
        here = folders / self.digest
        return here if here.is_dir() else unpack(Package(digest=self.digest, content=fetch()), folders)

    def moved(self, paths: Sequence[str], *, to: Path) -> list[str]:
        """Paths below the folder, as they are below `to`; others stay as they are."""
        places = [Path(path) for path in paths]
        return [
            str(to / place.relative_to(self.path)) if place.is_relative_to(self.path) else str(place)
            for place in places
        ]
