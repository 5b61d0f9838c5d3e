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
    """Renews the leases of this process' jobs six times per lease, each in a daemon thread: none waits for another."""

    def __init__(self, *, lease_seconds: float) -> None:
        self._renew_seconds = lease_seconds / _RENEWALS_PER_LEASE
        self._closed = threading.Event()

    def add(self, job_id: str, renew: Callable[[], bool]) -> None:
        """Calls `renew` regularly until it returns False, which reports that the job has finished."""
        arguments = (job_id, renew, self._closed)
        threading.Thread(target=self._keep, args=arguments, name="job-lease", daemon=True).start()

    def close(self) -> None:
        """Stops the renewals of all jobs that were added so far."""
        self._closed.set()
        self._closed = threading.Event()

    def _keep(self, job_id: str, renew: Callable[[], bool], closed: threading.Event) -> None:
        while not closed.wait(self._renew_seconds):
            try:
                with suppress(BackendUnavailable):  # jobs that cannot reach it either keep running
                    if not renew():
                        return
            except (AssayError, OSError, ValueError) as error:
                _log.warning("the lease of %s could not be renewed: %s", job_id, error)
