"""Renewal of leases: jobs of a cluster outlive their submitter, so jobs that must not do so end without renewals."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from resources.errors import AssayError, BackendUnavailable

LEASE_SECONDS = 60.0
"""Time after which a job that does not outlive its submitter ends without a renewal."""
POLL_SECONDS = 2.0
"""Interval at which a job's program checks its lease, and requests to stop."""
_RENEWALS_PER_LEASE = 6

_log = logging.getLogger(__name__)


class LeaseRenewer:
    """Renews the leases of this process' jobs in a daemon thread, six times per lease."""

    def __init__(self, *, lease_seconds: float) -> None:
        self._renew_seconds = lease_seconds / _RENEWALS_PER_LEASE
        self._jobs: dict[str, Callable[[], bool]] = {}
        self._lock = threading.Lock()
        self._closed: threading.Event | None = None  # close event of the running thread

    def add(self, job_id: str, renew: Callable[[], bool]) -> None:
        """Calls `renew` regularly until it returns False, which reports that the job has finished."""
        with self._lock:
            self._jobs[job_id] = renew
            if self._closed is None:
                self._closed = threading.Event()
                threading.Thread(target=self._keep, args=(self._closed,), name="job-leases", daemon=True).start()

    def close(self) -> None:
        """Stops all renewals until another job is added."""
        with self._lock:
            self._jobs.clear()
            if self._closed is not None:
                self._closed.set()
            self._closed = None

    def _keep(self, closed: threading.Event) -> None:
        while not closed.wait(self._renew_seconds):
            with self._lock:
                jobs = list(self._jobs.items())
            for job_id, renew in jobs:
                try:
                    with suppress(BackendUnavailable):  # jobs that cannot reach it either keep running
                        if not renew():
                            with self._lock:
                                self._jobs.pop(job_id, None)
                except (AssayError, OSError, ValueError) as error:  # the other jobs must still get their renewals
                    _log.warning("the lease of %s could not be renewed: %s", job_id, error)
