"""Counts deaths of a replica's engines: deaths by an error per checkpoint held, all others per replica."""

from __future__ import annotations

from collections import Counter

from pools.engine.engine_log import computing_process_ended, explained, first_error
from pools.jobs import Restarts
from resources.errors import EngineDied
from resources.jobs.jobs import JobHandle

DIED = "died"
_KILLED = ("from outside", "out of memory")  # in the reason of a job's end


class Deaths:
    """The deaths of a replica's engines; deaths without an error allow `most` restarts in ten minutes."""

    def __init__(self, replica: str, most: int) -> None:
        self.revived = 0
        """Engines restarted because an engine died."""
        self.last: str | None = None
        """The first error in the log of the engine that died last."""
        self.of_errors: Counter[str] = Counter()
        """Engines that died of an error, by the digest of the checkpoint held."""
        self._replica = replica
        self._restarts = Restarts(most)

    def count(self, why: str, *, log: str, job: JobHandle | None, held: str) -> EngineDied | None:
        """Counts a death; returns the replica's failure if no restart is allowed. `why` completes "it …".

        A death by an error always allows a restart: the pool withdraws a checkpoint that killed two engines.
        """
        error = first_error(log)
        self.last = error or f"none in its log; it {why}"
        if error is not None and why == DIED:
            self.of_errors[held] += 1
        elif not self._restarts.allow():
            reason = (job.details().reason if job else None) or ""
            killed = any(word in reason for word in _KILLED) or computing_process_ended(log)
            hint = "; it was killed, as for want of memory: give the replicas more with --ram" if killed else ""
            return EngineDied(
                expected=f"the engine of {self._replica} to live",
                found=f"it {why}, {self._restarts.last}{hint if why == DIED else ''}. {explained(log)}",
                remedy="read the log above, and run again",
            )
        self.revived += 1
        return None
