"""Deaths of a replica's engines: those of an error are counted for the checkpoint held, others for the replica."""

from __future__ import annotations

from collections import Counter

from pools.engine.engine_log import computing_process_ended, explained, first_error
from pools.jobs import Restarts
from resources.errors import EngineDied
from resources.jobs.jobs import JobHandle

DIED = "died"
_KILLED = ("from outside", "out of memory")  # as the reason of a job's end says


class Deaths:
    """The deaths so far.

    Args:
        replica: name of the replica.
        most: deaths in ten minutes without an error, as by SIGKILL, that are followed by a restart.
    """

    def __init__(self, replica: str, most: int) -> None:
        self.revived = 0
        """Engines started again, because one died."""
        self.last: str | None = None
        """The first error in the log of the engine that died last."""
        self.of_errors: Counter[str] = Counter()
        """Engines that died of an error, by the digest of the checkpoint that they held."""
        self._replica = replica
        self._restarts = Restarts(most)

    def count(self, why: str, *, log: str, job: JobHandle | None, held: str) -> EngineDied | None:
        """Counts a death; returns the replica's failure where no restart may follow.

        After an error one always follows: the pool takes the checkpoint away that two engines died of.

        Args:
            why: what happened to the engine, as in "it …".
            log: of the engine, without its key.
            job: of the engine.
            held: digest of the checkpoint that it held.
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
