"""Assignment of checkpoints to replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from pools.pool.director import Patience, assign
from pools.protocol import Demand

PATIENCE = Patience(linger_seconds=0.5, longest_wait_seconds=60)
HELD = Demand(held=3, unserved_seconds=1)
WORKING = Demand(in_flight=2)
LATELY = Demand(idle_seconds=0.1)
DONE = Demand(idle_seconds=5)


def _assigned(
    orders: Mapping[str, str | None],
    demand: Mapping[str, Demand] | None = None,
    wants: Sequence[str] = (),
    held_seconds: Mapping[str, float] | None = None,
) -> dict[str, str | None]:
    return assign(orders, demand=demand or {}, wants=wants, held_seconds=held_seconds or {}, patience=PATIENCE)


def test_assign_nothing_asked_changes_nothing() -> None:
    assert _assigned({"r0": "a", "r1": None}, {"a": DONE}) == {"r0": "a", "r1": None}


def test_assign_first_want_goes_to_every_replica() -> None:
    assert _assigned({"r0": None, "r1": None}, wants=["a"]) == {"r0": "a", "r1": "a"}


def test_assign_several_wants_are_spread() -> None:
    assert _assigned({"r0": None, "r1": None}, wants=["a", "b"]) == {"r0": "a", "r1": "b"}


def test_assign_second_want_takes_one_of_two_replicas_of_the_first() -> None:
    spread = _assigned({"r0": "a", "r1": "a"}, {"a": WORKING}, wants=["a", "b"])
    assert sorted(model or "" for model in spread.values()) == ["a", "b"]


def test_assign_held_requests_wait_while_the_only_replica_works() -> None:
    assert _assigned({"r0": "a"}, {"a": WORKING, "b": HELD}) == {"r0": "a"}


def test_assign_held_requests_wait_while_the_replica_was_asked_lately() -> None:
    assert _assigned({"r0": "a"}, {"a": LATELY, "b": HELD}) == {"r0": "a"}


def test_assign_held_requests_get_the_replica_once_it_is_idle() -> None:
    assert _assigned({"r0": "a"}, {"a": DONE, "b": HELD}) == {"r0": "b"}


def test_assign_held_requests_get_an_idle_replica_despite_another_want() -> None:
    assert _assigned({"r0": "a"}, {"a": DONE, "b": HELD}, wants=["a"]) == {"r0": "b"}


def test_assign_want_alone_leaves_an_idle_replica_to_its_model() -> None:
    assert _assigned({"r0": "a"}, {"a": DONE}, wants=["a", "b"]) == {"r0": "a"}


def test_assign_want_given_up_frees_the_replica() -> None:
    assert _assigned({"r0": "a"}, {"a": DONE}, wants=["b"]) == {"r0": "b"}


def test_assign_requests_that_waited_too_long_take_the_longest_held_replica() -> None:
    starved = Demand(held=1, unserved_seconds=61)
    orders: dict[str, str | None] = {"r0": "a", "r1": "b"}
    demand = {"a": WORKING, "b": WORKING, "c": starved}
    assert _assigned(orders, demand, held_seconds={"r0": 5, "r1": 70}) == {"r0": "a", "r1": "c"}


def test_assign_requests_that_waited_too_long_leave_a_checkpoint_its_turn() -> None:
    starved = Demand(held=1, unserved_seconds=61)
    assert _assigned({"r0": "a"}, {"a": WORKING, "c": starved}, held_seconds={}) == {"r0": "a"}


def test_assign_requests_that_waited_too_long_take_nothing_from_others_that_wait_longer_for_what_they_got() -> None:
    demand = {"a": Demand(held=1, unserved_seconds=90), "c": Demand(held=1, unserved_seconds=61)}
    assert _assigned({"r0": "a"}, demand, held_seconds={"r0": 5}) == {"r0": "a"}


def test_assign_oldest_held_comes_first() -> None:
    older = Demand(held=1, unserved_seconds=9)
    assert _assigned({"r0": None}, {"b": HELD, "c": older}) == {"r0": "c"}


def test_assign_idle_replica_helps_where_most_waits() -> None:
    demand = {"a": Demand(in_flight=1), "b": Demand(in_flight=50)}
    assert _assigned({"r0": "a", "r1": "b", "r2": None}, demand)["r2"] == "b"


_demands = st.builds(
    Demand,
    held=st.integers(0, 2),
    in_flight=st.integers(0, 2),
    unserved_seconds=st.sampled_from([0.0, 1.0, 100.0]),
    idle_seconds=st.sampled_from([0.0, 0.1, 9.0]),
)
_models = st.sampled_from(["a", "b", "c", "d"])


@given(
    orders=st.dictionaries(st.sampled_from(["r0", "r1", "r2"]), st.none() | _models, min_size=1),
    demand=st.dictionaries(_models, _demands),
    wants=st.lists(_models, unique=True),
)
def test_assign_of_any_requests_settles_and_spares_working_replicas(
    orders: dict[str, str | None], demand: dict[str, Demand], wants: list[str]
) -> None:
    once = _assigned(orders, demand, wants)
    assert once.keys() == orders.keys()
    for replica, model in orders.items():
        working = model is not None and demand.get(model, Demand()).in_flight > 0
        alone = sum(other == model for other in orders.values()) == 1
        starved = any(load.held and load.unserved_seconds > 60 for load in demand.values())
        if working and alone and not starved:
            assert once[replica] == model
    if not any(load.held and load.unserved_seconds > 60 for load in demand.values()):
        assert _assigned(once, demand, wants) == once
