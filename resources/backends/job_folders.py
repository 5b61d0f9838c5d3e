"""Jobs as folders: specification, status, logs, announcements and results are files that processes and handles see."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from resources.backends.processes import argv_of
from resources.jobs.jobs import Call, Client, Command, JobDetails, JobRequest, JobStatus
from resources.jobs.logs import LogPart, check_replica, logs_by_replica, part_of_file
from resources.jobs.results import pickled
from resources.jobs.waiting import BackendJob, no_such_job
from resources.storage import storage
from resources.storage.files import replace_json, tail

_CALL = "call.pickle"
_STATUS = "status.json"
_SPECIFICATION = "specification.json"
_KEPT_JOBS = 200


class FolderJob(BackendJob):
    """Handle on the job of a folder, submitted by this process or attached to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._specification: dict[str, Any] = json.loads((folder / _SPECIFICATION).read_text())

    @abstractmethod
    def process_details(self) -> dict[str, Any]:
        """Returns its `status.json`: status, reason, numbers of attempts, and fields of the backend."""

    @abstractmethod
    def request_stop(self) -> None:
        """Requests the end of the job, and returns before it has ended."""

    @abstractmethod
    def _file(self, name: str, replica: int) -> Path:
        """Returns a file of a replica: replica.log, announced or result."""

    @property
    def job_id(self) -> str:
        return self._folder.name

    @property
    def outlives_parent(self) -> bool:
        return self._specification["outlives_parent"]

    def status(self) -> JobStatus:
        return JobStatus(self.process_details()["status"])

    def details(self) -> JobDetails:
        now = self.process_details()
        return JobDetails(
            job_id=self.job_id,
            status=JobStatus(now["status"]),
            returns=(self._folder / _CALL).exists(),
            **{field: now[field] for field in ("reason", "attempts", "failures", "preemptions")},
            **{field: self._specification[field] for field in ("name", "submitted_at", "replicas")},
        )

    def logs(self, max_lines: int = 200, *, replica: int | None = None) -> str:
        return logs_by_replica(
            lambda index: tail(self._file("replica.log", index), max_lines),
            self._specification["replicas"],
            replica=replica,
        )

    def read_log(self, after: str = "", *, replica: int = 0) -> LogPart:
        check_replica(replica, self._specification["replicas"])
        return part_of_file(self._file("replica.log", replica), after)

    def announced(self, replica: int = 0) -> str | None:
        with suppress(FileNotFoundError):
            return storage.read_bytes(str(self._file("announced", replica))).decode()
        return None

    @property
    def where(self) -> str:
        return f"read {self._file('replica.log', 0)}"

    def result_bytes(self, replica: int) -> bytes | None:
        with suppress(FileNotFoundError):
            return storage.read_bytes(str(self._file("result", replica)))
        return None

    def _read(self) -> dict[str, Any]:
        return json.loads((self._folder / _STATUS).read_text())

    def _write(self, status: dict[str, Any]) -> None:
        replace_json(self._folder / _STATUS, status)


Job = TypeVar("Job", bound=FolderJob)


class FolderClient(Client, Generic[Job]):
    """Runs jobs with folders below `root`; `handle` returns the handle on the job of a folder."""

    def __init__(self, root: Path, handle: Callable[[Path], Job]) -> None:
        self._root = root
        self._handle = handle
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()

    def attach(self, job_id: str) -> Job:
        """Returns a handle on a job of any process with the same folders; raises `BadInput` if there is none."""
        folder = self._root / job_id
        if not re.fullmatch(r"\w[\w.-]*", job_id) or not (folder / _STATUS).is_file():
            remedy = "Choose one of the folders there; those of old jobs are removed."
            raise no_such_job(f"in {self._root}", job_id, remedy)
        return self._handle(folder)

    def jobs(self) -> list[JobDetails]:
        """Returns the jobs of all processes with the same folders, the newest first."""
        jobs: list[JobDetails] = []
        for status in self._root.glob(f"*/{_STATUS}"):
            with suppress(OSError, KeyError, ValueError):  # another process prunes them, or it is not a job's
                jobs.append(self._handle(status.parent).details())
        return sorted(jobs, key=lambda details: details.submitted_at or 0.0, reverse=True)

    def shutdown(self) -> None:
        jobs = self._mortal()
        for job in jobs:
            job.request_stop()
        for job in jobs:
            job.terminate()

    def _mortal(self) -> list[Job]:
        return [job for job in self._jobs.values() if not job.outlives_parent]

    def _create_folder(
        self, request: JobRequest, *, python: Path, imports: Sequence[str], working_directory: Path, **further: Any
    ) -> Path:
        job_id = f"{request.name}-{secrets.token_hex(4)}"
        call = pickled(request.entrypoint, job_id=job_id) if isinstance(request.entrypoint, Call) else None
        folder = self._root / job_id
        folder.mkdir(parents=True, mode=0o700)
        if call is not None:
            (folder / _CALL).write_bytes(call)
        entrypoint = request.entrypoint if isinstance(request.entrypoint, Command) else folder / _CALL
        specification = {
            "name": request.name,
            "submitted_at": time.time(),
            "argv": argv_of(entrypoint, python=python, imports=imports),
            "working_directory": str(working_directory),
            "replicas": request.replica_count,
            "max_retries_failure": request.max_retries_failure,
            "max_retries_preemption": request.max_retries_preemption,
            "outlives_parent": request.outlives_parent,
            **further,
        }
        (folder / _SPECIFICATION).write_text(json.dumps(specification))
        pending = {"status": "pending", "reason": None, "attempts": 0, "failures": 0, "preemptions": 0}
        replace_json(folder / _STATUS, {**pending, "supervisor_pid": None, "replicas": []})
        return folder

    def _prune(self) -> list[Job]:
        changed_at: dict[Path, float] = {}
        for status in self._root.glob(f"*/{_STATUS}"):
            with suppress(OSError):  # another process may be pruning too
                changed_at[status.parent] = status.stat().st_mtime
        kept: list[Job] = []
        for rank, folder in enumerate(sorted(changed_at, key=changed_at.__getitem__, reverse=True)):
            with suppress(OSError, ValueError):
                job = self._handle(folder)
                if rank >= _KEPT_JOBS and job.status().finished:
                    shutil.rmtree(folder)
                else:
                    kept.append(job)
        return kept
