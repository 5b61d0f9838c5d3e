"""The leased queue: no item is lost, and no item blocks forever. The test controls the clock."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from resources.actors.leased_queue import Lease, LeasedQueue, LeaseLost, QueueCounts
from resources.errors import BadInput


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def popped(queue: LeasedQueue, lease_seconds: float = 60.0) -> Lease:
    lease = queue.pop(lease_seconds)
    assert lease is not None
    return lease


def test_items_are_lent_in_the_order_they_came_and_are_gone_when_done(clock: Clock) -> None:
    queue = LeasedQueue(clock=clock)
    for item in "abc":
        queue.push(item)
    leases = [popped(queue) for _ in "abc"]
    assert [lease.item for lease in leases] == ["a", "b", "c"]
    assert queue.pop() is None
    assert queue.counts() == QueueCounts(waiting=0, leased=3, dead=0, done=0)
    for lease in leases:
        queue.done(lease.lease_id)
    assert queue.counts() == QueueCounts(waiting=0, leased=0, dead=0, done=3)


def test_lease_that_ran_out_is_worth_nothing_and_its_item_is_lent_again(clock: Clock) -> None:
    queue = LeasedQueue(clock=clock)
    queue.push("a")
    first = popped(queue, 10)
    clock.now += 9.9
    assert queue.pop() is None
    clock.now += 0.1
    second = popped(queue, 10)
    assert (second.item, second.deliveries) == ("a", 2)
    for use in (queue.done, queue.release, queue.renew):
        with pytest.raises(LeaseLost, match="run out"):
            use(first.lease_id)
    queue.done(second.lease_id)
    with pytest.raises(LeaseLost):
        queue.done(second.lease_id)


@pytest.mark.parametrize("ending", ["released", "its lease ran out"])
def test_unusable_item_starves_no_other_and_is_set_aside(clock: Clock, ending: str) -> None:
    queue = LeasedQueue(max_deliveries=3, clock=clock)
    queue.push("orphan")
    for number in range(20):
        queue.push(number)
    served: list[int] = []
    for _ in range(23):
        lease = popped(queue, 10)
        if lease.item != "orphan":
            queue.done(lease.lease_id)
            served.append(lease.item)
        elif ending == "released":
            queue.release(lease.lease_id)
        else:
            clock.now += 10
    assert served == list(range(20))
    assert queue.pop() is None
    (dead,) = queue.dead_letters()
    assert (dead.item, dead.deliveries, dead.reason) == ("orphan", 3, ending)


def test_without_a_bound_an_item_comes_back_for_ever_and_behind_all_others(clock: Clock) -> None:
    queue = LeasedQueue(max_deliveries=None, clock=clock)
    for item in ("orphan", "a", "b"):
        queue.push(item)
    order = []
    for _ in range(100):
        lease = popped(queue)
        order.append(lease.item)
        queue.release(lease.lease_id)
    assert order[:6] == ["orphan", "a", "b"] * 2
    assert queue.counts().dead == 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_numbers_that_mean_nothing_are_refused(clock: Clock, seconds: float) -> None:
    with pytest.raises(BadInput):
        LeasedQueue(clock=clock).pop(seconds)
    with pytest.raises(BadInput):
        LeasedQueue(max_deliveries=0)


class AtLeastOnce(RuleBasedStateMachine):
    """For any actions of producers, consumers and the clock, an item is either waiting, lent, dead or done."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queue = LeasedQueue(max_deliveries=3, clock=self.clock)
        self.pushed = 0
        self.done: set[int] = set()
        self.valid_until: dict[str, float] = {}

    @rule()
    def push(self) -> None:
        self.queue.push(self.pushed)
        self.pushed += 1

    @rule(target=leases, seconds=st.integers(1, 30))
    def pop(self, seconds: int) -> Lease | None:
        lease = self.queue.pop(seconds)
        if lease is not None:
            assert lease.item not in self.done
            assert lease.deliveries <= 3
            self.valid_until[lease.lease_id] = self.clock.now + seconds
        return lease

    @rule(lease=leases, seconds=st.integers(1, 30))
    def renew(self, lease: Lease | None, seconds: int) -> None:
        if lease is not None and self._works(lease, lambda: self.queue.renew(lease.lease_id, seconds)):
            self.valid_until[lease.lease_id] = self.clock.now + seconds

    @rule(lease=consumes(leases))
    def finish(self, lease: Lease | None) -> None:
        if lease is not None and self._works(lease, lambda: self.queue.done(lease.lease_id)):
            assert lease.item not in self.done
            self.done.add(lease.item)
            del self.valid_until[lease.lease_id]

    @rule(lease=leases)
    def release(self, lease: Lease | None) -> None:
        if lease is not None and self._works(lease, lambda: self.queue.release(lease.lease_id)):
            del self.valid_until[lease.lease_id]

    @rule(seconds=st.integers(1, 20))
    def time_passes(self, seconds: int) -> None:
        self.clock.now += seconds

    def _works(self, lease: Lease, use) -> bool:
        valid = self.valid_until.get(lease.lease_id, 0.0) > self.clock.now
        try:
            use()
        except LeaseLost:
            assert not valid
            return False
        assert valid
        return True

    @invariant()
    def nothing_is_lost(self) -> None:
        counts = self.queue.counts()
        assert counts.done == len(self.done)
        assert counts.waiting + counts.leased + counts.dead + counts.done == self.pushed
        assert counts.leased == sum(until > self.clock.now for until in self.valid_until.values())

    def teardown(self) -> None:
        # A consumer that finishes everything gets every item that is neither done nor dead.
        self.clock.now += 1000
        got = set()
        while (lease := self.queue.pop()) is not None:
            self.queue.done(lease.lease_id)
            got.add(lease.item)
        dead = {letter.item for letter in self.queue.dead_letters()}
        assert got | dead | self.done == set(range(self.pushed))
        assert len(got) + len(dead) + len(self.done) == self.pushed


TestAtLeastOnce = AtLeastOnce.TestCase
TestAtLeastOnce.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
