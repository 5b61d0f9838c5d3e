"""Renewal of leases: an Iris job outlives its submitter, so jobs that must not do so end without regular renewals."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from resources.backends.iris.controller import LEASE, Controller, tell
from resources.backends.iris.states import job_status
from resources.errors import BackendUnavailable, BadInput

_log = logging.getLogger(__name__)


class LeaseRenewer:
    """Renews the leases of this process' jobs in a daemon thread; `renew_seconds` is a fraction of the lease."""

    def __init__(self, controller: Controller, *, renew_seconds: float) -> None:
        self._controller = controller
        self._renew_seconds = renew_seconds
        self._attempts: dict[str, int] = {}
        self._beat = 0
        self._lock = threading.Lock()
        self._closed: threading.Event | None = None  # close event of the running thread

    def add(self, job_id: str) -> None:
        """Renews the lease of a job until it has finished."""
        with self._lock:
            self._attempts[job_id] = -1  # before its first attempt
            if self._closed is None:
                self._closed = threading.Event()
                threading.Thread(target=self._keep, args=(self._closed,), name="iris-lease", daemon=True).start()

    def close(self) -> None:
        """Stops all renewals until another job is added."""
        with self._lock:
            self._attempts.clear()
            if self._closed is not None:
                self._closed.set()
            self._closed = None

    def _keep(self, closed: threading.Event) -> None:
        while not closed.wait(self._renew_seconds):
            with suppress(BackendUnavailable):  # the controller is away; replicas that cannot reach it keep running
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            attempts = dict(self._attempts)
        if not attempts:
            return
        self._beat += 1
        states = self._controller.job_states(list(attempts))
        for job_id, attempt in attempts.items():
            if job_id in states and not job_status(states[job_id]).finished:
                self._tell(job_id, attempt)
            else:
                with self._lock:
                    self._attempts.pop(job_id, None)

    def _tell(self, job_id: str, attempt: int) -> None:
        try:
            current = tell(self._controller, job_id, LEASE, {"beat": str(self._beat)}, attempt=attempt)
        except BadInput as error:  # an error of this job must not delay the renewal of the others
            _log.warning("the lease of %s could not be renewed: %s", job_id, error)
            return
        with self._lock:
            if job_id in self._attempts:
                self._attempts[job_id] = -1 if current is None else current
