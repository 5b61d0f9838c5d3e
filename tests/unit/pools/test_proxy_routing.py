"""Choice of a request's replica, and retries of requests; announcements of replicas, and orders to them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pools.protocol import Announcement, DesiredState, Lease, ServedModel
from pools.proxy.replicas import RequestOutcome, RoutedReplica
from pools.proxy.routing import RoutingTable
from pools.proxy.users import Leases

MODELS = {"m1": ServedModel(digest="d1"), "m2": ServedModel(digest="d2")}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _announcement(digest: str | None = "d1", **fields: Any) -> Announcement:
    return Announcement.model_validate(
        {"instance": "i1", "url": "http://127.0.0.1:8001", "state": "ready", "digest": digest, **fields}
    )


def _table(**replicas: Announcement) -> RoutingTable:
    table = RoutingTable(clock=Clock())
    table.apply(DesiredState(models=MODELS, orders=dict.fromkeys(replicas)))
    for name, announcement in replicas.items():
        table.announce(name, announcement)
    return table


def _chosen(
    table: RoutingTable, digest: str = "d1", *, tried: dict[str, RequestOutcome] | None = None
) -> RoutedReplica:
    replica = table.choose(digest, tried=tried or {})
    assert replica is not None
    return replica


def _begun(table: RoutingTable) -> RoutedReplica:
    replica = _chosen(table)
    table.begin(replica, "m1")
    return replica


def test_choose_equal_load_takes_turns() -> None:
    table = _table(a=_announcement(), b=_announcement(), c=_announcement())
    names = []
    for _ in range(6):
        replica = _begun(table)
        table.end(replica, "m1", RequestOutcome.ANSWERED)
        names.append(replica.name)
    assert names == ["a", "b", "c", "a", "b", "c"]


def test_choose_unequal_capacity_follows_load_relative_to_it() -> None:
    table = _table(small=_announcement(capacity=1), big=_announcement(capacity=3))
    for _ in range(8):
        _begun(table)
    assert {name: replica.in_flight for name, replica in table.replicas.items()} == {"small": 2, "big": 6}


def test_choose_replica_that_is_to_get_other_weights_is_none() -> None:
    table = _table(a=_announcement())
    table.apply(DesiredState(models=MODELS, orders={"a": "m2"}))
    assert table.choose("d1", tried={}) is None
    table.announce("a", _announcement("d2"))
    assert _chosen(table, "d2").name == "a"


def test_choose_prefers_replica_not_tried_and_falls_back() -> None:
    table = _table(a=_announcement(), b=_announcement())
    table.begin(table.replicas["b"], "m1")
    assert _chosen(table, tried={"a": RequestOutcome.SERVER_ERROR}).name == "b"
    assert _chosen(table, tried={"a": RequestOutcome.SERVER_ERROR, "b": RequestOutcome.LOST}).name == "a"


def test_choose_never_returns_to_a_replica_that_timed_out() -> None:
    assert _table(a=_announcement()).choose("d1", tried={"a": RequestOutcome.TIMED_OUT}) is None


@pytest.mark.parametrize("outcome", [RequestOutcome.LOST, RequestOutcome.TIMED_OUT])
def test_end_with_failure_makes_replica_a_suspect(outcome: RequestOutcome) -> None:
    table = _table(a=_announcement())
    replica = _begun(table)
    table.end(replica, "m1", outcome)
    assert (replica.suspect, replica.consecutive_failures, replica.in_flight) == (True, 1, 0)
    assert table.choose("d1", tried={}) is None
    assert table.health == "holding"


@pytest.mark.parametrize("outcome", [RequestOutcome.ANSWERED, RequestOutcome.SERVER_ERROR, None])
def test_end_without_failure_keeps_replica_in_use(outcome: RequestOutcome | None) -> None:
    table = _table(a=_announcement())
    replica = _begun(table)
    table.end(replica, "m1", outcome)
    assert table.choose("d1", tried={}) is replica


def test_announce_other_weights_keeps_the_load() -> None:
    table = _table(a=_announcement())
    _begun(table)
    table.announce("a", _announcement("d2", capacity=4))
    assert table.choose("d1", tried={}) is None
    assert _chosen(table, "d2").in_flight == 1


def test_announce_dead_replica_is_returned_as_lost() -> None:
    table = _table(a=_announcement(), b=_announcement())
    assert [replica.name for replica in table.announce("a", _announcement(state="dead"))] == ["a"]


def test_announce_later_start_takes_over_and_the_earlier_is_lost() -> None:
    table = _table(a=_announcement())
    before = _begun(table)
    assert table.announce("a", _announcement(instance="i2", start=1)) == [before]
    assert before.lost
    assert table.replicas["a"].in_flight == 0


def test_announce_superseded_instance_must_stop_and_never_comes_back() -> None:
    table = _table(a=_announcement())
    table.announce("a", _announcement("d2", instance="i2", start=1))
    before = table.version
    for sequence in (1, 2):
        assert table.announce("a", _announcement(instance="i1", sequence=sequence)) == []
        assert table.orders_of("a", "i1").stop
    assert (table.replicas["a"].announcement.instance, table.replicas["a"].lost) == ("i2", False)
    assert table.version == before
    assert not table.orders_of("a", "i2").stop


def test_announce_second_instance_under_a_held_name_is_refused_with_the_reason_once_the_first_is_heard_of() -> None:
    table = _table(a=_announcement())
    before = _begun(table)
    assert table.announce("a", _announcement("d2", instance="i2")) == []
    waiting = table.orders_of("a", "i2")
    assert (waiting.stop, waiting.known, table.has_to_wait("a", "i2")) == (False, False, True)
    table.announce("a", _announcement(sequence=1))
    refused = table.orders_of("a", "i2")
    assert (refused.stop, refused.refusal) == (True, "another instance has the name a and is there")
    assert table.announce("a", _announcement("d2", instance="i2", sequence=1)) == []
    assert table.orders_of("a", "i2").stop
    assert (table.replicas["a"], before.lost) == (before, False)
    assert not table.orders_of("a", "i1").stop


def _gone(table: RoutingTable, how: str) -> None:
    match how:
        case "silent":
            assert isinstance(table.clock, Clock)
            table.clock.now += 31
            table.expire(30)
        case "dead":
            table.announce("a", _announcement(state="dead", sequence=1))
        case "hung up":
            table.hung_up("a", "i1")


@pytest.mark.parametrize("how", ["silent", "dead", "hung up"])
@pytest.mark.parametrize("waited", [True, False])
def test_announce_instance_of_the_same_start_replaces_a_gone_instance(how: str, waited: bool) -> None:
    table = _table(a=_announcement())
    if waited and how != "dead":  # its last announcement would refuse it
        table.announce("a", _announcement("d2", instance="i2"))
        assert table.has_to_wait("a", "i2")
    _gone(table, how)
    assert not table.has_to_wait("a", "i2")
    [before] = table.announce("a", _announcement("d2", instance="i2", sequence=1))
    assert (before.announcement.instance, before.lost) == ("i1", True)
    assert _chosen(table, "d2").announcement.instance == "i2"
    table.announce("a", _announcement(sequence=9))
    assert table.orders_of("a", "i1").refusal == "another instance has taken over the name a"


def test_announce_earlier_start_takes_nothing_over_from_a_later_start() -> None:
    table = _table(a=_announcement(instance="second", start=2))
    assert table.announce("a", _announcement("d2", instance="first", start=1)) == []
    assert (table.replicas["a"].announcement.instance, table.orders_of("a", "first").stop) == ("second", True)
    [before] = table.announce("a", _announcement("d2", instance="third", start=3))
    assert before.announcement.instance == "second"
    assert table.orders_of("a", "second").stop


def test_announce_older_message_that_arrives_late_changes_nothing() -> None:
    table = _table(a=_announcement("d1", sequence=5))
    table.announce("a", _announcement("d2", sequence=4))
    assert table.replicas["a"].announcement.digest == "d1"


@pytest.mark.parametrize(
    "steps",
    [[_announcement(url="http://127.0.0.1:8002")], [_announcement(state="starting"), _announcement()]],
    ids=["new-address", "restarted"],
)
def test_announce_new_engine_clears_suspicion(steps: list[Announcement]) -> None:
    table = _table(a=_announcement())
    table.end(_begun(table), "m1", RequestOutcome.LOST)
    for announcement in steps:
        table.announce("a", announcement)
    assert table.choose("d1", tried={}) is not None


def test_announce_unchanged_replica_stays_a_suspect() -> None:
    table = _table(a=_announcement())
    table.end(_begun(table), "m1", RequestOutcome.LOST)
    table.announce("a", _announcement())
    assert table.replicas["a"].suspect


def test_expire_silent_replica_is_lost_until_it_speaks_again() -> None:
    table = _table(a=_announcement(), b=_announcement())
    assert isinstance(table.clock, Clock)
    table.clock.now += 20
    table.announce("b", _announcement())
    table.clock.now += 15
    assert [replica.name for replica in table.expire(30)] == ["a"]
    assert table.expire(30) == []
    assert _chosen(table).name == "b"
    table.announce("a", _announcement())
    assert not table.replicas["a"].lost


def test_apply_replica_that_is_not_wanted_is_lost_and_told_to_stop() -> None:
    table = _table(a=_announcement(), b=_announcement())
    assert [replica.name for replica in table.apply(DesiredState(models=MODELS, orders={"a": None}))] == ["b"]
    assert table.orders_of("b").stop
    table.announce("b", _announcement())
    assert _chosen(table).name == "a"
    assert "b" not in table.replicas  # otherwise the status would list it as lost forever


def test_orders_before_the_pool_has_spoken_let_replicas_go_on() -> None:
    orders = RoutingTable().orders_of("a")
    assert (orders.known, orders.stop, orders.model) == (False, False, None)


def test_orders_name_the_checkpoint_and_what_comes_next() -> None:
    table = _table(a=_announcement())
    before = table.orders_of("a").version
    table.apply(DesiredState(models=MODELS, orders={"a": "m1"}, next=("m1", "m2")))
    orders = table.orders_of("a")
    assert (orders.model, orders.served, orders.next) == ("m1", MODELS["m1"], {"m2": MODELS["m2"]})
    assert orders.version != before
    table.apply(DesiredState(models=MODELS, orders={"a": "m1"}, next=("m1", "m2"), failed="not about orders"))
    assert table.orders_of("a").version == orders.version


def test_demand_tells_held_in_flight_and_idle() -> None:
    table = _table(a=_announcement())
    assert isinstance(table.clock, Clock)
    table.hold("m2")
    table.clock.now += 3
    table.hold("m2")
    replica = _begun(table)
    demand = table.demand()
    assert (demand["m2"].held, demand["m2"].unserved_seconds, table.held) == (2, 3.0, 2)
    assert (demand["m1"].in_flight, demand["m1"].idle_seconds) == (1, 0.0)
    table.let_go("m2")
    table.end(replica, "m1", RequestOutcome.ANSWERED)
    table.clock.now += 2
    demand = table.demand()
    assert (demand["m2"].held, demand["m2"].unserved_seconds, table.held) == (1, 5.0, 1)
    assert demand["m1"].idle_seconds == 2.0


def test_demand_counts_a_models_wait_since_served_despite_clients_leaving() -> None:
    table = _table(a=_announcement())
    assert isinstance(table.clock, Clock)
    for _ in range(5):  # a client with a timeout of 10 s that retries after 2 s
        table.hold("m1")
        table.clock.now += 10
        table.let_go("m1")
        assert table.demand()["m1"].held == 0
        table.clock.now += 2
    table.hold("m1")
    table.hold("m1")
    assert table.demand()["m1"].unserved_seconds == 60
    table.let_go("m1")
    replica = _begun(table)
    table.clock.now += 3
    assert table.demand()["m1"].unserved_seconds == 3, "the second model waits since the first was served"
    table.let_go("m1")
    table.begin(replica, "m1")
    assert table.demand()["m1"].unserved_seconds == 0


def test_replica_seconds_add_up_over_orders() -> None:
    table = _table(a=_announcement(), b=_announcement())
    assert isinstance(table.clock, Clock)
    table.apply(DesiredState(models=MODELS, orders={"a": "m1", "b": "m1"}))
    table.clock.now += 10
    table.apply(DesiredState(models=MODELS, orders={"a": "m2", "b": "m1"}))
    table.clock.now += 5
    assert table.replica_seconds() == {"m1": 25.0, "m2": 5.0}


def test_health_follows_failure_and_readiness() -> None:
    table = RoutingTable()
    assert table.health == "holding"
    table = _table(a=_announcement())
    assert table.health == "ready"
    table.apply(DesiredState(models=MODELS, orders={"a": None}, failed="engines die"))
    assert table.health == "failed"


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:80", "http://h/path", "ftp://h", "http://"),
        *("http://127.0.0.1:99999", "http://h:0", "http://h:a", "http://[::1", "http://[h]:80", "http://:80"),
    ],
)
def test_announcement_url_that_is_no_origin_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        Announcement(instance="i", url=url)


def test_leases_end_when_they_are_not_renewed() -> None:
    clock = Clock()
    leases = Leases(clock)
    leases.take("one", Lease(holder="a", seconds=10))
    leases.take("two", Lease(holder="b", seconds=30, wants=("m1",)))
    clock.now += 8
    leases.take("one", Lease(holder="a", seconds=10))
    clock.now += 8
    assert not leases.expire()
    assert leases.status()["two"].seconds_left == pytest.approx(14)
    clock.now += 8
    assert leases.expire()
    assert list(leases.status()) == ["two"]
    leases.end("two")
    leases.end("two")
    assert leases.status() == {}
