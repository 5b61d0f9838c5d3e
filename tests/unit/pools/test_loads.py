"""Loads as reported by replicas: checkpoints that cannot be served any more, and the cause of each failure."""

from __future__ import annotations

from typing import Any

import pytest

from pools.pool.loads import LoadLog
from pools.protocol import Announcement, Failure, LeaseStatus, LoadedHow, LoadReport, ReplicaStatus, ServedModel

SERVED = {name: ServedModel(digest=name) for name in ("run-1", "run-2", "run-3")}


class Pool:
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
        return {model: failure.found for model, failure in self.loads.unusable(SERVED).items()}


def failure(kind: str = "StorageError", problem: str = "NaN") -> Failure:
    return Failure(kind=kind, expected="finite numbers", found=problem, remedy="train again")


def load(
    number: int, model: str, *, failed: Failure | None = None, how: LoadedHow = "reload", seconds: float = 1.0
) -> LoadReport:
    return LoadReport(number=number, model=model, digest=model, how=how, seconds=seconds, failure=failed)


def replica(name: str, *loads: LoadReport, holds: str | None = None, **fields: Any) -> ReplicaStatus:
    fields = {"last_death": "IndexError: 320", **fields} if "deaths" in fields else fields
    announcement = Announcement(instance=f"{name}-a", state="ready", digest=holds, loads=loads, **fields)
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
    return {
        "lease": LeaseStatus(holder="x", seconds=1, seconds_left=1, models={}, wants=("run-2",), tries={"run-2": tries})
    }


def test_failed_load_makes_its_checkpoint_unusable_until_the_next_want() -> None:
    pool = Pool()
    pool.loads.forgive(leases(1), SERVED)
    pool.loads.take_in([replica("r0", load(1, "run-1"), load(2, "run-2", failed=failure()))])
    pool.loads.forgive(leases(1), SERVED)
    assert pool.unusable == {"run-2": "NaN"}
    pool.loads.forgive(leases(2), SERVED)
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


def test_verdict_on_the_model_is_final_for_its_user() -> None:
    pool = Pool()
    pool.loads.forgive(leases(1), SERVED)
    pool.loads.take_in([replica("r0", load(1, "run-2", failed=failure("ModelUnusable")))])
    pool.loads.forgive(leases(2), SERVED)
    assert set(pool.unusable) == {"run-2"}
    pool.loads.forgive({"another": leases(1)["lease"]}, SERVED)
    assert pool.unusable == {}


START = "EngineStartFailed"
ENDED = "it ended before its model answered. "


@pytest.mark.parametrize(
    ("failures", "unusable"),
    [
        ([("run-1", START, f"{ENDED}First error in its log: TypeError: a")], {"run-1"}),
        ([("run-1", START, "a"), ("run-1", START, "a")], {"run-1"}),
        ([("run-1", START, "First error: a"), ("run-2", START, "First error: b")], {"run-1", "run-2"}),
        ([("run-1", START, f"{ENDED}Last lines:\na"), ("run-2", START, f"{ENDED}Last lines:\nb")], {"run-1", "run-2"}),
        ([("run-1", START, "no /staged/a3 at 0x7f, 12 B"), ("run-2", START, "no /staged/b4 at 0x8, 9 B")], set(SERVED)),
        ([("run-1", "WeightsNotRead", "a"), ("run-2", "WeightsNotRead", "a")], {"run-1", "run-2"}),
        ([("run-1", "ModelUnusable", "no parameter"), ("run-2", "ModelUnusable", "no parameter")], {"run-1", "run-2"}),
    ],
)
def test_start_failure_is_the_pools_once_two_checkpoints_met_it(
    failures: list[tuple[str, str, str]], unusable: set[str]
) -> None:
    pool = Pool()
    loads = [load(number, name, failed=failure(kind, problem)) for number, (name, kind, problem) in enumerate(failures)]
    pool.loads.take_in([replica("r0", *loads)])
    assert set(pool.unusable) == unusable
    assert (pool.loads.start_failure(SERVED) is not None) == (unusable == set(SERVED))
    assert {name: pool.unusable[name] for name, _, _ in failures} == {name: problem for name, _, problem in failures}
    pool.loads.take_in([replica("r1", load(1, "run-3"))])
    assert set(pool.unusable) == {name for name, _, _ in failures}


def test_start_failure_of_two_checkpoints_leaves_others_with_another_tokenizer_to_be_tried() -> None:
    pool, served = Pool(), {**SERVED, "run-3": ServedModel(digest="run-3", tokenizer="other")}
    pool.loads.take_in([replica("r0", *(load(n, f"run-{n}", failed=failure(START)) for n in (1, 2)))])
    assert pool.loads.start_failure(served) is None and set(pool.loads.unusable(served)) == {"run-1", "run-2"}
    pool.loads.take_in([replica("r0", load(3, "run-3", failed=failure(START)))])
    assert pool.loads.start_failure(served) is not None


def test_start_failure_of_every_checkpoint_is_forgotten_for_another_try() -> None:
    pool, only = Pool(), {"run-1": SERVED["run-1"]}
    pool.loads.take_in([replica("r0", load(1, "run-1", failed=failure(START)))])
    assert pool.loads.start_failure(only) == failure(START)
    pool.loads.try_again()
    assert (pool.loads.start_failure(only), pool.unusable) == (None, {})


def test_second_death_of_an_error_condemns_what_was_held() -> None:
    pool = Pool()
    for deaths in (1, 2):
        pool.loads.take_in([replica(f"r{deaths}", deaths={"run-2": 1})])
        assert set(pool.unusable) == ({"run-2"} if deaths == 2 else set())
    assert "for the 2. time in ten minutes. First error in its log: IndexError: 320" in pool.unusable["run-2"]
    pool.loads.forgive(leases(1), SERVED)
    assert pool.unusable == {}


def test_death_while_a_request_is_suspected_condemns_nothing() -> None:
    pool = Pool()
    for deaths, suspected in ((1, set()), (2, {"run-2"}), (3, {"run-2"}), (4, set())):
        pool.loads.take_in([replica("r0", deaths={"run-2": deaths})], suspected=suspected)
        assert pool.unusable == {}
    pool.loads.take_in([replica("r0", deaths={"run-2": 5})])
    assert set(pool.unusable) == {"run-2"}


def test_load_before_which_the_engine_had_died_is_no_fault_of_its_checkpoint() -> None:
    pool = Pool()
    pool.loads.take_in([replica("r0", load(1, "run-1", failed=failure("EngineDied")))])
    assert pool.unusable == {}


def test_load_reported_again_counts_once() -> None:
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
