"""Loads as replicas report them: what cannot be served any more, and who is at fault."""

from __future__ import annotations

from pools.pool.loads import LoadLog
from pools.protocol import Announcement, Failure, LeaseStatus, LoadedHow, LoadReport, ReplicaStatus

MODELS = ("run-1", "run-2")


class Pool:
    """A log of loads, and what it calls."""

    def __init__(self, *, most_failures: int = 1) -> None:
        self.given_up: list[tuple[str, str]] = []
        self.events: list[str] = []
        self.loads = LoadLog(
            most_failures=most_failures,
            give_up=lambda replica, reason: self.given_up.append((replica, reason)),
            on_event=self.events.append,
        )

    @property
    def unusable(self) -> dict[str, str]:
        return {model: failure.found for model, failure in self.loads.unusable(MODELS).items()}


def failure(kind: str = "ModelUnusable") -> Failure:
    return Failure(kind=kind, expected="finite numbers", found="NaN", remedy="train again")


def load(
    number: int, model: str, *, failed: Failure | None = None, how: LoadedHow = "reload", seconds: float = 1.0
) -> LoadReport:
    return LoadReport(number=number, model=model, digest=model, how=how, seconds=seconds, failure=failed)


def replica(name: str, *loads: LoadReport, holds: str | None = None, restarts: int = 0) -> ReplicaStatus:
    announcement = Announcement(instance=f"{name}-a", state="ready", digest=holds, loads=loads, restarts=restarts)
    return ReplicaStatus(
        name=name,
        ordered=None,
        announcement=announcement,
        lost=False,
        silent_seconds=0,
        suspect=False,
        in_flight=0,
        consecutive_failures=0,
    )


def leases(tries: int) -> dict[str, LeaseStatus]:
    return {"lease": LeaseStatus(holder="x", seconds_left=1, models={}, wants=("run-2",), tries={"run-2": tries})}


def test_load_that_failed_makes_its_checkpoint_unusable_until_it_is_wanted_anew() -> None:
    pool = Pool()
    pool.loads.forgive(leases(1))
    pool.loads.take_in([replica("r0", load(1, "run-1"), load(2, "run-2", failed=failure()))])
    pool.loads.forgive(leases(1))
    assert pool.unusable == {"run-2": "NaN"}
    pool.loads.forgive(leases(2))
    assert pool.unusable == {}
    assert pool.loads.take_paused() == set()


def test_load_that_failed_where_another_replica_holds_the_checkpoint_is_the_replicas_fault() -> None:
    pool = Pool(most_failures=1)
    sound = replica("r1", holds="run-2")
    pool.loads.take_in([replica("r0", load(1, "run-2", failed=failure())), sound])
    assert (pool.unusable, pool.given_up) == ({}, [])
    assert pool.loads.take_paused() == {"r0"}
    assert pool.loads.take_paused() == set()
    pool.loads.take_in([replica("r0", load(2, "run-2", failed=failure())), sound])
    assert (pool.unusable, pool.given_up) == ({}, [("r0", "NaN")])


def test_load_that_went_well_forgets_the_failures_before_it() -> None:
    pool = Pool(most_failures=1)
    sound = replica("r1", holds="run-2")
    for number, failed in ((1, failure()), (2, None), (3, failure())):
        pool.loads.take_in([replica("r0", load(number, "run-2", failed=failed)), sound])
    assert pool.given_up == []


def test_engine_that_never_started_makes_every_checkpoint_unusable_until_something_answers() -> None:
    pool = Pool()
    pool.loads.take_in([replica("r0", load(1, "run-1", failed=failure("EngineStartFailed")))])
    assert set(pool.unusable) == set(MODELS)
    pool.loads.take_in([replica("r1", load(1, "run-2"))])
    assert set(pool.unusable) == {"run-1"}


def test_engine_that_never_started_is_forgotten_for_another_try() -> None:
    pool = Pool()
    assert pool.loads.start_failure is None
    pool.loads.take_in([replica("r0", load(1, "run-1", failed=failure("EngineStartFailed")))])
    assert pool.loads.start_failure == "NaN"
    pool.loads.try_again()
    assert (pool.loads.start_failure, pool.unusable) == (None, {})


def test_load_before_which_the_engine_had_died_is_no_fault_of_its_checkpoint() -> None:
    pool = Pool()
    pool.loads.take_in([replica("r0", load(1, "run-1", failed=failure("EngineDied")))])
    assert pool.unusable == {}


def test_load_reported_again_is_told_once() -> None:
    pool = Pool()
    for _ in range(3):
        pool.loads.take_in([replica("r0", load(1, "run-1"), restarts=1)])
    assert pool.events == [
        "the engine of r0 died, or hung, and is started again",
        "run-1 is ready on r0 (reload, 1.00 s)",
    ]


def test_linger_follows_the_last_swap_within_bounds_and_not_a_cold_start() -> None:
    pool = Pool()
    lingers = []
    swaps: list[tuple[LoadedHow, float]] = [("cold start", 40.0), ("reload", 0.15), ("restart", 40.0), ("reload", 0.01)]
    for number, (how, seconds) in enumerate(swaps, start=1):
        pool.loads.take_in([replica("r0", load(number, "run-1", how=how, seconds=seconds))])
        lingers.append(pool.loads.linger_seconds)
    assert lingers == [0.1, 0.15, 5.0, 0.1]
