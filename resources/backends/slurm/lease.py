"""Renewal of leases: a Slurm job outlives its submitter, so jobs that must not do so end without regular renewals."""

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
    """Renews the leases of this process' jobs, and polls their states, in a daemon thread every `renew_seconds`."""

    def __init__(self, *, renew_seconds: float) -> None:
        self._renew_seconds = renew_seconds
        self._jobs: dict[str, SlurmJob] = {}
        self._lock = threading.Lock()
        self._closed: threading.Event | None = None  # close event of the running thread

    def add(self, job: SlurmJob) -> None:
        """Renews the lease of a job until it has finished."""
        with self._lock:
            self._jobs[job.job_id] = job
            if self._closed is None:
                self._closed = threading.Event()
                threading.Thread(target=self._keep, args=(self._closed,), name="slurm-lease", daemon=True).start()

    def running(self) -> list[SlurmJob]:
        """Returns the jobs that had not finished at the last poll."""
        with self._lock:
            return list(self._jobs.values())

    def close(self) -> None:
        """Stops all renewals until another job is added."""
        with self._lock:
            self._jobs.clear()
            if self._closed is not None:
                self._closed.set()
            self._closed = None

    def _keep(self, closed: threading.Event) -> None:
        while not closed.wait(self._renew_seconds):
            for job in self.running():
                try:
                    with suppress(BackendUnavailable):  # an unreachable controller does not end jobs
                        if job.status().finished:
                            with self._lock:
                                self._jobs.pop(job.job_id, None)
                            continue
                    replace_text(job.lease, str(time.time()))
                except OSError as error:  # the other jobs must still get their renewals
                    _log.warning("the lease of %s could not be renewed: %s", job.job_id, error)
