"""Attempts of a job on every backend: their outcomes, the two retry budgets, and the job's final status; without I/O.

Standard library only, since it also runs on nodes without Assay, in the folder of the programs that use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Outcome = Literal["succeeded", "failed", "preempted", "stopped", "refused"]
"""Outcome of an attempt, or of a replica in it; "refused" if a further attempt would meet the same refusal."""
FINISHED = ("succeeded", "failed", "stopped")
"""Final statuses of a job, in its `status.json`."""
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.1, 10.0
_MOST_DOUBLINGS = 20


class Final(NamedTuple):
    """The final status of a job and the reason, which a success lacks."""

    status: Literal["succeeded", "failed", "stopped"]
    reason: str | None


class Attempts(NamedTuple):
    """Attempts of a job so far, and the budgets for further attempts after failures and after preemptions."""

    max_retries_failure: int
    max_retries_preemption: int
    attempts: int = 0
    """Number of times that all replicas were started, including the present attempt."""
    failures: int = 0
    preemptions: int = 0

    @property
    def pause_seconds(self) -> float:
        """Returns the pause before the next attempt, which doubles with each attempt: 0.1 s at first, 10 s at last."""
        return min(_FIRST_PAUSE_SECONDS * 2.0 ** min(self.attempts - 1, _MOST_DOUBLINGS), _LAST_PAUSE_SECONDS)

    @property
    def counts(self) -> dict[str, int]:
        """Returns the fields of `JobDetails` for the attempts so far."""
        return {"attempts": self.attempts, "failures": self.failures, "preemptions": self.preemptions}

    def begun(self) -> Attempts:
        """Returns the attempts with a further attempt."""
        return self._replace(attempts=self.attempts + 1)

    def ended(self, outcome: Outcome, reason: str | None = None) -> tuple[Attempts, Final | None]:
        """Counts an attempt's end against its budget; returns the job's final status too, or None to try again.

        `reason` is the cause of the end, or of the request to stop; None if unknown.
        """
        counted = self._replace(
            failures=self.failures + (outcome in ("failed", "refused")),
            preemptions=self.preemptions + (outcome == "preempted"),
        )
        last = f"; last: {reason}" if reason else ""
        if outcome == "succeeded":
            return counted, Final("succeeded", None)
        if outcome == "stopped":
            return counted, Final("stopped", reason)
        if outcome == "refused":
            return counted, Final("failed", reason)
        if counted.failures > self.max_retries_failure:
            return counted, Final("failed", f"failed {_times(counted.failures)}{last}")
        if counted.preemptions > self.max_retries_preemption:
            return counted, Final("failed", f"ended from outside {_times(counted.preemptions)}{last}")
        return counted, None


def outcome_of(replicas: Iterable[Outcome | None], *, stopping: bool = False) -> Outcome | None:
    """Returns the outcome of an attempt from those of its replicas, of which None runs; None while it goes on.

    Only complete success wins over `stopping`, a request to end the job.
    """
    outcomes = set(replicas)
    if outcomes == {"succeeded"}:
        return "succeeded"
    if stopping:
        return "stopped"
    # The loss of a replica can make the others fail an instant later, so preemption wins over failure; and the
    # others are stopped after either.
    order: tuple[Outcome, ...] = ("refused", "preempted", "failed", "stopped")
    return next((outcome for outcome in order if outcome in outcomes), None)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
