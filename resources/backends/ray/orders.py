"""Messages of the Ray backend between client, controller and node, as plain values."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from resources.backends.programs.attempts import Outcome
from resources.backends.programs.endings import ENDINGS, OUT_OF_MEMORY, Cause
from resources.errors import AssayError, BadInput
from resources.jobs.jobs import Command, JobRequest
from resources.jobs.packaging import Package, unpack
from resources.process_marks import boot_id
from resources.settings import settings

DETACHED = "controller-detached"
"""Name prefix of controllers for jobs that outlive their parent."""
NAMESPACE = "assay"
"""Namespace of all actors of Assay in a Ray cluster."""

_CAUSES: dict[str, tuple[Cause, str]] = {
    "NodeDiedError": ("machine lost", "its node has died"),
    "LocalRayletDiedError": ("machine lost", "its node has died"),
    "OwnerDiedError": ("machine lost", "the worker that held its data has died"),
    "ActorDiedError": ("machine lost", "the actor that it needed has died"),
    "ActorUnavailableError": ("machine lost", "the actor that it needed cannot be reached"),
    "WorkerCrashedError": ("machine lost", "its worker has died"),
    "GetTimeoutError": ("machine lost", "the cluster did not answer in time"),
    "OutOfMemoryError": ("out of memory", OUT_OF_MEMORY),
    "ObjectLostError": ("data lost", "its data was lost with a node"),
    "ObjectFetchTimedOutError": ("data lost", "its data could not be fetched"),
    "OutOfDiskError": ("place taken", "its node ran out of disk"),
    "TaskPlacementGroupRemoved": ("place taken", "its place was taken away"),
    "ActorPlacementGroupRemoved": ("place taken", "its place was taken away"),
    "TaskUnschedulableError": ("place taken", "its place is gone"),
}
"""By name of the exception's class or of a base class, since only the backend imports ray."""


def classify_ray(error: BaseException) -> tuple[Outcome, str]:
    """Returns the budget that an error of a Ray task counts against, and a formatted reason.

    Errors without an entry, such as a runtime environment that cannot be set up, or an error in Assay's own code on the
    node, are failures, since they would recur.
    """
    for kind in type(error).__mro__:
        if (row := _CAUSES.get(kind.__name__)) is not None:
            return ENDINGS[row[0]], row[1]
    # Ray's text is a remote traceback, which ends with the exception.
    return ENDINGS["crashed"], f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def this_machine() -> str:
    """Returns an identity of this machine, equal for all processes of a user that share its temporary folder."""
    shared = Path(tempfile.gettempdir()).stat()
    return f"{boot_id()} {shared.st_dev}:{shared.st_ino} {os.getuid()}"


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


@dataclass(frozen=True, kw_only=True)
class JobOrder:
    """A job for its controller to run."""

    job_id: str
    request: JobRequest
    """Without its entrypoint."""
    client: str
    entrypoint: Command | bytes
    """A command, or a pickled call; empty for a large call, which is fetched from the object store."""
    workspace: SentFolder
    working_directory: str
    """Path on the submitting machine."""
    imports: tuple[str, ...]
    """Folders on the submitting machine with the call's modules."""
    grace_seconds: float
    submitted_at: float
    address: str
    """Address of the cluster for processes of the job."""

    @property
    def hosts(self) -> int:
        """Number of hosts of a replica."""
        return self.request.resources.hosts_per_replica


@dataclass(frozen=True, kw_only=True)
class ProcessOrder:
    """A process of a job for a node to run: a replica, or the part of a multi-host replica on a host."""

    job: JobOrder
    attempt: int
    replica: int
    host: int
    device_variables: Mapping[str, str]
    """Variables for the device; variables of the environment override them."""


@dataclass(frozen=True)
class Output:
    """A piece of a process's output; `start` is the number of bytes before it, by which a repetition is recognized."""

    content: bytes = b""
    start: int = 0


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """End of a process of a job."""

    outcome: Outcome
    reason: str | None = None
    output: Output = Output()
    """Output that was not reported yet."""
    announcement: str | None = None
    result: bytes | None = None
    """File that the process wrote for `JobHandle.result`."""


def refusal_text(error: AssayError) -> str:
    """Returns the reason of a job that can never be started."""
    return f"expected {error.expected}; found {error.found}. {error.remedy}"
