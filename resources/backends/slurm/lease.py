"""Jobs of Slurm outlive whoever submitted them; those that are not to are told from time to time that we live."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from resources.backends.slurm.job import SlurmJob
from resources.errors import BackendUnavailable
from resources.storage.files import replace_text

_log = logging.getLogger(__name__)


class LeaseRenewer:
    """Renews what the jobs of this process wait for, and looks at them; a thread that ends with the process.

    Args:
        renew_seconds: how often; jobs wait for several times as long.
    """

    def __init__(self, *, renew_seconds: float) -> None:
        self._renew_seconds = renew_seconds
        self._jobs: dict[str, SlurmJob] = {}
        self._lock = threading.Lock()
        self._closed: threading.Event | None = None
        """Of the thread that runs."""

    def add(self, job: SlurmJob) -> None:
        """Begins with a job, until it has finished."""
        with self._lock:
            self._jobs[job.job_id] = job
            if self._closed is None:
                self._closed = threading.Event()
                threading.Thread(target=self._keep, args=(self._closed,), name="slurm-lease", daemon=True).start()

    def running(self) -> list[SlurmJob]:
        """Returns the jobs that had not finished when they were looked at last."""
        with self._lock:
            return list(self._jobs.values())

    def close(self) -> None:
        """Renews nothing any more, until another job is added."""
        with self._lock:
            self._jobs.clear()
            if self._closed is not None:
                self._closed.set()
            self._closed = None

    def _keep(self, closed: threading.Event) -> None:
        while not closed.wait(self._renew_seconds):
            for job in self.running():
                try:
                    with suppress(BackendUnavailable):  # a controller that is away does not end jobs
                        if job.status().finished:
                            with self._lock:
                                self._jobs.pop(job.job_id, None)
                            continue
                    replace_text(job.lease, str(time.time()))
                except OSError as error:  # this job's alone, or a file system that is away: the others want theirs
                    _log.warning("the lease of %s could not be renewed: %s", job.job_id, error)
