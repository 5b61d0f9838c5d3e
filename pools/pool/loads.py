"""Loads of checkpoints as replicas report them: which checkpoints cannot be served, and by which replicas."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping

from pools.jobs import Restarts
from pools.protocol import Failure, LeaseStatus, LoadReport, ReplicaStatus, ServedModel
from resources.errors import EngineDied, EngineStartFailed, ModelUnusable, WeightsNotRead

_SHORTEST_LINGER_SECONDS = 0.1
_LONGEST_LINGER_SECONDS = 5.0
_MOST_DEATHS = 1  # of engines per checkpoint; the second condemns it
_STARTS = (EngineStartFailed.__name__, WeightsNotRead.__name__)
_MOST_EXCUSED = 20  # in ten minutes, while their requests are suspected
# between two reports of the same error: paths, sets, addresses, numbers
_DIFFERS = re.compile(r"/\S+|\{.*|0x[0-9a-f]+|\d+")


def error_in(failure: Failure) -> str:
    """Returns the error of a failed engine start without paths, addresses and numbers, to compare starts."""
    first, *others = failure.found.splitlines() or [""]
    return _DIFFERS.sub("", first if "First error" in first or not others else f"{first} {others[-1]}")


def _read_alike(served: ServedModel) -> tuple[str, str]:
    return served.config, served.tokenizer


class LoadLog:
    """Records the loads of a pool's replicas, and the deaths of engines by the checkpoint that they held.

    A failure belongs to the checkpoint that was loaded or held. It is the pool's if no engine has answered yet, and
    either two different checkpoints failed with the same error, or no checkpoint is left to try. Checkpoints with
    another config or tokenizer than any that failed are tried first. An engine that ended while it read a checkpoint's
    weights says nothing about the others.

    `linger_seconds` is the time that a checkpoint must be idle before its replica is free: as long as a swap takes.

    Args:
        most_failures: number of consecutive failed loads after which a replica is given up.
        give_up: called with the name of such a replica, and the reason.
    """

    def __init__(
        self, *, most_failures: int, give_up: Callable[[str, str], None], on_event: Callable[[str], None]
    ) -> None:
        self.linger_seconds = _SHORTEST_LINGER_SECONDS
        self._most_failures = most_failures
        self._give_up = give_up
        self._on_event = on_event
        self._seen: set[tuple[str, str, int]] = set()
        self._engine_starts: dict[str, int] = {}
        self._reasons_told: set[str] = set()
        self._has_answered = False
        self._start_errors: dict[str, tuple[str, Failure]] = {}  # by digest, with the checkpoint's name
        self._deaths: dict[str, Restarts] = {}
        self._excused: dict[str, Restarts] = {}
        self._deaths_seen: Counter[tuple[str, str]] = Counter()
        self._deadly: dict[str, Failure] = {}  # by digest
        self._unusable: dict[str, Failure] = {}
        self._failures_in_a_row: Counter[str] = Counter()
        self._to_pause: set[str] = set()
        self._tries: dict[tuple[str, str], int] = {}

    def take_in(self, replicas: Iterable[ReplicaStatus], *, suspected: Container[str] = ()) -> None:
        """Processes newly reported loads and deaths; `suspected` has digests with requests in flight at two deaths."""
        replicas = list(replicas)
        for replica in replicas:
            announced, instance = replica.announcement, replica.announcement.instance
            if announced.restarts > self._engine_starts.get(instance, 0):
                error = f" ({announced.last_death})" if announced.last_death else ""
                self._on_event(f"the engine of {replica.name} died, or hung, and is started again{error}")
                self._engine_starts[instance] = announced.restarts
            for digest, count in announced.deaths.items():
                seen = self._deaths_seen[instance, digest]
                self._deaths_seen[instance, digest] = count
                for _ in range(seen, count):
                    self._died(digest, announced.last_death or "no error in its log", suspected=digest in suspected)
            for load in announced.loads:
                report = (replica.name, instance, load.number)
                if report in self._seen:
                    continue
                self._seen.add(report)
                if load.failure is None:
                    self._succeeded(replica.name, load)
                else:
                    others = (other for other in replicas if other.name != replica.name)
                    held_elsewhere = any(other.holds(load.digest) for other in others)
                    self._failed(replica.name, load, load.failure, held_elsewhere=held_elsewhere)

    def _died(self, digest: str, error: str, *, suspected: bool) -> None:
        deaths = self._deaths.setdefault(digest, Restarts(_MOST_DEATHS))
        # suspected requests are sent alone and condemned individually, so the checkpoint's other requests can be served
        if suspected:
            deaths = self._excused.setdefault(digest, Restarts(_MOST_EXCUSED))
            del self._deaths[digest]
        if not deaths.allow():
            self._deadly[digest] = Failure(
                kind=EngineDied.__name__,
                expected="engines that hold this checkpoint to live",
                found=f"an engine died of it {deaths.last}. First error in its log: {error}",
                remedy="look for that error among the engine's known errors; the other checkpoints are served",
            )

    def _succeeded(self, replica: str, load: LoadReport) -> None:
        self._has_answered = True
        self._failures_in_a_row[replica] = 0
        if load.how in ("reload", "restart"):  # the next swap will probably cost as much
            self.linger_seconds = min(max(_SHORTEST_LINGER_SECONDS, load.seconds), _LONGEST_LINGER_SECONDS)
        why = f", since {load.reason}" if load.reason and load.reason not in self._reasons_told else ""
        self._reasons_told.add(load.reason or "")
        self._on_event(f"{load.model} is ready on {replica} ({load.how}, {load.seconds:.2f} s{why})")

    def _failed(self, replica: str, load: LoadReport, failure: Failure, *, held_elsewhere: bool) -> None:
        self._on_event(f"{load.model} cannot be served by {replica}: {failure.found.splitlines()[0]}")
        if failure.kind == EngineDied.__name__:
            return  # caused by the checkpoint held before; the replica is given up
        if held_elsewhere:  # so the replica is at fault, not the checkpoint
            self._failures_in_a_row[replica] += 1
            self._to_pause.add(replica)
            if self._failures_in_a_row[replica] > self._most_failures:
                self._give_up(replica, failure.found)
            return
        self._unusable[load.model] = failure
        if failure.kind == EngineStartFailed.__name__:
            self._start_errors[load.digest] = load.model, failure

    def start_failure(self, models: Mapping[str, ServedModel]) -> Failure | None:
        """Returns the reason that no engine of the pool starts; None if a checkpoint may still be servable."""
        if self._has_answered:
            return None
        tried = {_read_alike(served) for served in models.values() if served.digest in self._start_errors}
        if any(name not in self._unusable and _read_alike(served) not in tried for name, served in models.items()):
            return None
        alike: dict[str, list[str]] = {}
        for name, failure in self._start_errors.values():
            alike.setdefault(error_in(failure), []).append(name)
        for name, failure in self._start_errors.values():
            if len(names := alike[error_in(failure)]) < 2 or name != names[0]:
                continue
            return Failure(
                kind=EngineStartFailed.__name__,
                expected="an engine of this pool to start",
                found=f"{', '.join(names)} met the same error, so it is the pool's: {failure.found}",
                remedy="mend the engine's arguments, environment or device; the records of those have log and command",
            )
        failed = [self._unusable.get(name) for name in models]
        if any(failure is None or failure.kind != EngineStartFailed.__name__ for failure in failed):
            return None
        return failed[0] if failed else None

    def try_again(self) -> None:
        kept = self._has_answered
        self._unusable = {model: why for model, why in self._unusable.items() if kept or why.kind not in _STARTS}
        self._start_errors.clear()
        self._failures_in_a_row.clear()

    def forgive(self, leases: Mapping[str, LeaseStatus], models: Mapping[str, ServedModel]) -> None:
        """Clears the failure of a checkpoint when a user requests it again.

        Refusals by the loader and weights without finite numbers stay final for a user that requested the checkpoint
        before, as do failed starts before any engine answered.
        """
        unusable = self.unusable(models)
        final = {ModelUnusable.__name__, *(() if self._has_answered else _STARTS)}
        tries = {(lease, name): count for lease, held in leases.items() for name, count in held.tries.items()}
        for (lease, name), count in tries.items():
            if name in unusable and count > self._tries.get((lease, name), 0):
                if unusable[name].kind in final and (lease, name) in self._tries:
                    continue
                self._unusable.pop(name, None)
                if name in models:
                    self._deadly.pop(models[name].digest, None)
                    self._deaths.pop(models[name].digest, None)
                    self._excused.pop(models[name].digest, None)
        unusable = self.unusable(models)
        for (lease, name), count in tries.items():
            if name not in unusable:
                self._tries[lease, name] = count

    def unusable(self, models: Mapping[str, ServedModel]) -> dict[str, Failure]:
        """Returns the failures by model that cannot be served: of all models if no engine of the pool starts."""
        common = self.start_failure(models)
        deadly = {name: self._deadly[served.digest] for name, served in models.items() if served.digest in self._deadly}
        return {**(dict.fromkeys(models, common) if common else {}), **deadly, **self._unusable}

    def take_paused(self) -> set[str]:
        """Returns the replicas with a failed load since the last call; they get no order for a round before a retry."""
        paused, self._to_pause = self._to_pause, set()
        return paused
