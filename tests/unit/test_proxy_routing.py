"""Which replica gets a request, and when one is tried again."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pools.proxy.routing import Outcome, Replica, RoutingTable, may_retry, outcome_of
from pools.proxy.state import DesiredReplica, DesiredState, ReplicaState


def _replica(
    name: str, digest: str | None = "d1", *, state: ReplicaState = "ready", capacity: int = 1, port: int = 8001
) -> DesiredReplica:
    return DesiredReplica(name=name, url=f"http://127.0.0.1:{port}", digest=digest, capacity=capacity, state=state)


def _table(*replicas: DesiredReplica) -> RoutingTable:
    table = RoutingTable()
    table.apply(DesiredState(models={"m1": "d1", "m2": "d2"}, replicas=replicas))
    return table


def _chosen(table: RoutingTable, digest: str = "d1", *, tried: dict[str, Outcome] | None = None) -> Replica:
    replica = table.choose(digest, tried=tried or {})
    assert replica is not None
    return replica


def test_choose_equal_load_takes_turns() -> None:
    table = _table(_replica("a"), _replica("b"), _replica("c"))
    names = []
    for _ in range(6):
        replica = _chosen(table)
        table.begin(replica)
        table.end(replica, Outcome.ANSWERED)
        names.append(replica.name)
    assert names == ["a", "b", "c", "a", "b", "c"]


def test_choose_unequal_capacity_follows_load_relative_to_it() -> None:
    table = _table(_replica("small", capacity=1), _replica("big", capacity=3))
    for _ in range(8):
        table.begin(_chosen(table))
    assert {name: one.in_flight for name, one in table.replicas.items()} == {"small": 2, "big": 6}


@pytest.mark.parametrize("state", ["starting", "draining", "dead"])
def test_choose_replica_that_is_not_ready_is_none(state: ReplicaState) -> None:
    assert _table(_replica("a", state=state)).choose("d1", tried={}) is None


@pytest.mark.parametrize("digest", ["d2", None])
def test_choose_replica_with_other_weights_is_none(digest: str | None) -> None:
    assert _table(_replica("a", digest)).choose("d1", tried={}) is None


def test_choose_prefers_replica_not_tried_and_falls_back() -> None:
    table = _table(_replica("a"), _replica("b"))
    table.begin(table.replicas["b"])
    assert _chosen(table, tried={"a": Outcome.SERVER_ERROR}).name == "b"
    both = {"a": Outcome.SERVER_ERROR, "b": Outcome.LOST}
    assert _chosen(table, tried=both).name == "a"


def test_choose_never_returns_to_a_replica_that_timed_out() -> None:
    assert _table(_replica("a")).choose("d1", tried={"a": Outcome.TIMED_OUT}) is None


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.TIMED_OUT])
def test_end_with_failure_makes_replica_a_suspect(outcome: Outcome) -> None:
    table = _table(_replica("a"))
    replica = _chosen(table)
    table.begin(replica)
    table.end(replica, outcome)
    assert (replica.suspect, replica.consecutive_failures, replica.in_flight) == (True, 1, 0)
    assert table.choose("d1", tried={}) is None
    assert table.health == "holding"


@pytest.mark.parametrize("outcome", [Outcome.ANSWERED, Outcome.SERVER_ERROR, None])
def test_end_without_failure_keeps_replica_in_use(outcome: Outcome | None) -> None:
    table = _table(_replica("a"))
    replica = _chosen(table)
    table.begin(replica)
    table.end(replica, outcome)
    assert table.choose("d1", tried={}) is replica


def test_apply_same_name_keeps_load_and_takes_new_weights() -> None:
    table = _table(_replica("a"))
    table.begin(_chosen(table))
    table.apply(DesiredState(models={"m2": "d2"}, replicas=(_replica("a", "d2", capacity=4),)))
    assert table.choose("d1", tried={}) is None
    assert _chosen(table, "d2").status.in_flight == 1
    assert table.models == {"m2": "d2"}


def test_apply_dead_and_removed_replicas_are_returned_as_lost() -> None:
    table = _table(_replica("a"), _replica("b"), _replica("c"))
    lost = table.apply(DesiredState(replicas=(_replica("a"), _replica("b", state="dead"))))
    assert sorted((one.name, one.state) for one in lost) == [("b", "dead"), ("c", "dead")]


@pytest.mark.parametrize(
    "steps",
    [[_replica("a", port=8002)], [_replica("a", state="starting"), _replica("a")]],
    ids=["new-address", "restarted"],
)
def test_apply_engine_that_is_a_new_one_clears_suspicion(steps: list[DesiredReplica]) -> None:
    table = _table(_replica("a"))
    replica = _chosen(table)
    table.begin(replica)
    table.end(replica, Outcome.LOST)
    for step in steps:
        table.apply(DesiredState(replicas=(step,)))
    assert table.choose("d1", tried={}) is not None


def test_apply_unchanged_replica_stays_a_suspect() -> None:
    table = _table(_replica("a"))
    table.begin(_chosen(table))
    table.end(table.replicas["a"], Outcome.LOST)
    table.apply(DesiredState(replicas=(_replica("a"),)))
    assert table.replicas["a"].suspect


def test_health_follows_failure_and_readiness() -> None:
    table = RoutingTable()
    assert table.health == "holding"
    table.apply(DesiredState(replicas=(_replica("a"),)))
    assert table.health == "ready"
    table.apply(DesiredState(replicas=(_replica("a"),), failed="engines die"))
    assert table.health == "failed"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.ANSWERED),
        (400, Outcome.ANSWERED),
        (429, Outcome.ANSWERED),
        (500, Outcome.SERVER_ERROR),
        (503, Outcome.SERVER_ERROR),
    ],
)
def test_outcome_of_status_tells_engine_errors_from_answers(status: int, outcome: Outcome) -> None:
    assert outcome_of(status) is outcome


@pytest.mark.parametrize("outcome", list(Outcome))
def test_may_retry_ends_after_three_attempts_and_never_follows_an_answer(outcome: Outcome) -> None:
    wanted = [outcome is not Outcome.ANSWERED] * 2 + [False]
    assert [may_retry(outcome, attempts=n) for n in (1, 2, 3)] == wanted


def test_desired_state_two_replicas_of_one_name_is_refused() -> None:
    with pytest.raises(ValidationError, match="different names"):
        DesiredState(replicas=(_replica("a"), _replica("a")))


@pytest.mark.parametrize("url", ["127.0.0.1:80", "http://h/path", "ftp://h", "http://"])
def test_desired_replica_url_that_is_no_origin_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        DesiredReplica(name="a", url=url)
