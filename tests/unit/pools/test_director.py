"""Assignment of checkpoints to replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pools.pool.director import assign
from pools.protocol import Demand

HELD = Demand(held=3, unserved_seconds=1)
WORKING = Demand(in_flight=2)
LATELY = Demand(idle_seconds=0.1)
DONE = Demand(idle_seconds=5)
STARVED = Demand(held=1, unserved_seconds=61)
OLDER = Demand(held=1, unserved_seconds=90)
FREE = {"r0": None, "r1": None}


def _assigned(
    orders: Mapping[str, str | None],
    demand: Mapping[str, Demand] | None = None,
    wants: Sequence[str] = (),
    held_seconds: Mapping[str, float] | None = None,
) -> dict[str, str | None]:
    return assign(
        orders,
        demand=demand or {},
        wants=wants,
        held_seconds=held_seconds or {},
        linger_seconds=0.5,
        longest_wait_seconds=60,
    )


@pytest.mark.parametrize(
    ("orders", "demand", "wants", "held_seconds", "after"),
    [
        pytest.param({"r0": "a", "r1": None}, {"a": DONE}, "", {}, {"r0": "a", "r1": None}, id="nothing requested"),
        pytest.param(FREE, {}, "a", {}, {"r0": "a", "r1": "a"}, id="the first want gets every replica"),
        pytest.param(FREE, {}, "ab", {}, {"r0": "a", "r1": "b"}, id="several wants are spread"),
        pytest.param({"r0": "a"}, {"a": WORKING, "b": HELD}, "", {}, {"r0": "a"}, id="held while it works"),
        pytest.param({"r0": "a"}, {"a": LATELY, "b": HELD}, "", {}, {"r0": "a"}, id="held while it was used lately"),
        pytest.param({"r0": "a"}, {"a": DONE, "b": HELD}, "", {}, {"r0": "b"}, id="held until it is idle"),
        pytest.param({"r0": "a"}, {"a": DONE, "b": HELD}, "a", {}, {"r0": "b"}, id="held before a want"),
        pytest.param({"r0": "a"}, {"a": DONE}, "ab", {}, {"r0": "a"}, id="a want alone takes no wanted replica"),
        pytest.param({"r0": "a"}, {"a": DONE}, "b", {}, {"r0": "b"}, id="a want given up frees the replica"),
        pytest.param({"r0": "a"}, {"a": WORKING, "c": STARVED}, "", {}, {"r0": "a"}, id="starved, before its turn"),
        pytest.param({"r0": "a"}, {"a": OLDER, "c": STARVED}, "", {"r0": 5}, {"r0": "a"}, id="starved, others longer"),
        pytest.param({"r0": None}, {"b": HELD, "c": OLDER}, "", {}, {"r0": "c"}, id="the oldest held comes first"),
        pytest.param(
            {"r0": "a", "r1": "b"},
            {"a": WORKING, "b": WORKING, "c": STARVED},
            *("", {"r0": 5, "r1": 70}, {"r0": "a", "r1": "c"}),
            id="starved, takes the longest held",
        ),
        pytest.param(
            {"r0": "a", "r1": "b", "r2": None},
            {"a": Demand(in_flight=1), "b": Demand(in_flight=50)},
            *("", {}, {"r0": "a", "r1": "b", "r2": "b"}),
            id="an idle replica helps where most waits",
        ),
    ],
)
def test_assign_follows_requests_and_wants(
    orders: dict[str, str | None],
    demand: dict[str, Demand],
    wants: str,
    held_seconds: dict[str, float],
    after: dict[str, str | None],
) -> None:
    assert _assigned(orders, demand, list(wants), held_seconds) == after


def test_assign_second_want_takes_one_of_two_replicas_of_the_first() -> None:
    spread = _assigned({"r0": "a", "r1": "a"}, {"a": WORKING}, wants=["a", "b"])
    assert sorted(model or "" for model in spread.values()) == ["a", "b"]


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
