"""Turns at requesting places from Ray: order of requests, and when a new request is useful."""

from __future__ import annotations

import asyncio

import pytest

from resources.backends.ray.placement import Placement
from resources.backends.ray.turns import Turns

pytestmark = pytest.mark.timeout(30)


class Grants:
    """A Ray with `places`; like the real Ray it answers a new request at once, and a waiting request never."""

    def __init__(self, places: int, *, seconds: float = 0.0) -> None:
        self.free = places
        self.seconds = seconds
        self.asked: list[str] = []
        self.granted: list[str] = []

    async def ask(self, name: str) -> Placement:
        self.asked.append(name)
        await asyncio.sleep(self.seconds)
        if not self.free:
            await asyncio.Event().wait()
        self.free -= 1
        self.granted.append(name)
        return Placement([], self.take_back)

    def take_back(self) -> None:
        self.free += 1


def placed(turns: Turns, grants: Grants, name: str, shape: str = "cpu") -> asyncio.Task[Placement]:
    return asyncio.ensure_future(turns.placed(shape, lambda: grants.ask(name), on_waiting=lambda reason: None))


def give_back(turns: Turns, placement: Placement) -> None:
    placement.release()
    turns.given_back()


async def test_jobs_that_ask_for_the_same_are_served_in_their_order_as_places_come_back() -> None:
    turns, grants = Turns(), Grants(1)
    messages: list[str] = []
    names = ["first", "second", "third"]
    jobs = [
        asyncio.ensure_future(turns.placed("cpu", lambda name=name: grants.ask(name), on_waiting=messages.append))
        for name in names
    ]
    for job in jobs:
        give_back(turns, await job)
    assert grants.granted == names
    assert messages == ["waits behind jobs that ask for the same"] * 2


async def test_other_shapes_do_not_wait_behind_a_job_that_gets_no_place() -> None:
    turns, full, empty = Turns(), Grants(0), Grants(1)
    large = placed(turns, full, "large", "eight cores")
    await placed(turns, empty, "small")
    assert not large.done()
    large.cancel()


async def test_job_that_gives_up_allows_the_next_job_to_ask() -> None:
    turns, grants = Turns(), Grants(1)
    first = await placed(turns, grants, "first")
    waiting, next_job = placed(turns, grants, "waiting"), placed(turns, grants, "next")
    await asyncio.sleep(0)
    waiting.cancel()
    give_back(turns, first)
    await next_job
    assert waiting.cancelled()
    assert grants.granted == ["first", "next"]


async def test_job_that_is_cancelled_while_it_asks_again_gives_up() -> None:
    turns, asked = Turns(), asyncio.Event()

    async def ask() -> Placement:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            job.cancel()
        raise AssertionError

    job = asyncio.ensure_future(turns.placed("cpu", ask, on_waiting=lambda reason: None))
    await asked.wait()
    turns.given_back()
    done, _ = await asyncio.wait({job}, timeout=10)
    assert done and job.cancelled()


async def test_place_that_is_granted_to_a_job_as_it_gives_up_is_given_back() -> None:
    turns, asked, released = Turns(), asyncio.Event(), asyncio.Event()

    async def ask() -> Placement:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return Placement([], released.set)
        raise AssertionError

    job = asyncio.ensure_future(turns.placed("cpu", ask, on_waiting=lambda reason: None))
    await asked.wait()
    job.cancel()
    await asyncio.wait_for(released.wait(), 10)
    assert job.cancelled()


async def test_late_grant_of_ray_is_awaited_while_others_give_back_resources() -> None:
    turns, grants = Turns(), Grants(1, seconds=0.3)
    job = placed(turns, grants, "job")
    while not job.done():
        turns.given_back()
        await asyncio.sleep(0.01)
    assert grants.granted == ["job"]
    assert len(grants.asked) < 10


async def test_error_of_ray_reaches_the_job_and_frees_its_turn() -> None:
    turns, grants = Turns(), Grants(1)

    async def refuse() -> Placement:
        raise RuntimeError("no placement groups today")

    failing = asyncio.ensure_future(turns.placed("cpu", refuse, on_waiting=lambda reason: None))
    next_job = placed(turns, grants, "next")
    with pytest.raises(RuntimeError, match="today"):
        await failing
    await next_job
