"""Jobs of Iris outlive whoever submitted them; those that are not to are told from time to time that we live."""

from __future__ import annotations

import threading

from resources.backends.iris_controller import LEASE, Controller, tell
from resources.backends.iris_states import job_status
from resources.errors import AssayError


class LeaseKeeper:
    """Renews what the replicas of this process' jobs wait for; a thread that ends with the process.

    Args:
        controller: of the jobs.
        renew_seconds: how often; replicas wait for several times as long.
    """

    def __init__(self, controller: Controller, *, renew_seconds: float) -> None:
        self._controller = controller
        self._renew_seconds = renew_seconds
        self._attempts: dict[str, int] = {}
        self._beat = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, job_id: str) -> None:
        """Begins with a job, until it has finished."""
        with self._lock:
            self._attempts[job_id] = -1  # before its first attempt
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._keep, name="iris-lease", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Renews nothing any more."""
        self._closed.set()

    def _keep(self) -> None:
        while not self._closed.wait(self._renew_seconds):
            try:
                self._renew()
            except AssayError:  # the controller is away; replicas that cannot ask it wait on
                continue

    def _renew(self) -> None:
        with self._lock:
            attempts = dict(self._attempts)
        if not attempts:
            return
        self._beat += 1
        states = self._controller.job_states(list(attempts))
        for job_id, attempt in attempts.items():
            if job_id in states and not job_status(states[job_id]).finished:
                told = tell(self._controller, job_id, LEASE, {"beat": str(self._beat)}, attempt=attempt)
                self._attempts[job_id] = -1 if told is None else told
            elif job_id not in states or job_status(states[job_id]).finished:
                with self._lock:
                    self._attempts.pop(job_id, None)
