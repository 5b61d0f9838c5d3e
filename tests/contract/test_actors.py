"""Behaviour of actors on every backend: calls, errors, limits, deaths, restarts, groups, and the leased queue."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import cloudpickle
import pytest

from fakes.clients import CLIENTS
from fakes.polling import eventually
from fakes.shared import closed_before
from resources.actors.actors import ActorHandle, actor_variables, create_actor, create_actor_group, get_actor
from resources.actors.leased_queue import LeasedQueue, LeaseLost
from resources.backends.current import current_client
from resources.config import ResourceConfig
from resources.errors import ActorDied, ActorMethodFailed, ActorRestarted, BadInput, JobTimeout
from resources.jobs.jobs import Client, Entrypoint, JobAlreadyExists, JobRequest, JobStatus, create_environment

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("small_workspace")]

AT_ONCE = 4
ANSWER_SECONDS = 30.0
QUEUE_ITEMS = 40
QUEUE_LEASE_SECONDS = 2.0  # of the killed consumer; those of the others are longer than the test


class Unsendable(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("two numbers")


class Kit:
    def __init__(self, start: int = 0, *, step: int = 1) -> None:
        self.total = start
        self.step = step
        self.running = self.peak = 0
        self.lock = threading.Lock()
        self.together = threading.Barrier(AT_ONCE)

    def add(self, times: int = 1) -> int:
        self.total += times * self.step
        return self.total

    def divide(self, number: int) -> float:
        return 1 / number

    def raise_unsendable(self) -> None:
        raise Unsendable(1, 2)

    def leave(self) -> None:
        raise SystemExit(3)

    def reverse(self, content: bytes) -> bytes:
        return content[::-1]

    def give_lock(self) -> object:
        return self.lock

    def meet(self) -> int:
        with self.lock:
            self.running += 1
            self.peak = max(self.peak, self.running)
        self.together.wait(ANSWER_SECONDS)
        with self.lock:
            self.running -= 1
        return self.peak

    async def meet_asleep(self) -> int:
        self.running += 1
        self.peak = max(self.peak, self.running)
        await asyncio.sleep(0.02)
        self.running -= 1
        return self.peak

    def say(self, text: str) -> None:
        print(text)

    def touch_and_hang(self, path: Path) -> None:
        path.touch()
        time.sleep(300)

    def wait_for(self, path: Path, began: Path) -> str:
        began.touch()
        while not path.exists():
            time.sleep(0.02)
        return "gone on"

    def kill(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(300)

    def end(self, code: int) -> None:
        os._exit(code)

    def pid(self) -> int:
        return os.getpid()


class Broken:
    def __init__(self) -> None:
        raise ArithmeticError("cannot make the unmakeable")


class Gated:
    """Waits in its constructor for the file `go`, and removes it."""

    def __init__(self, folder: Path) -> None:
        while True:
            try:
                (folder / "go").rename(folder / f"gone-{os.getpid()}")
                return
            except FileNotFoundError:
                time.sleep(0.02)


@pytest.fixture(scope="module", autouse=True)
def _classes_travel() -> Iterator[None]:
    # pickles the classes of this file by value: an image with the code lacks the file
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", params=sorted(CLIENTS))
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    client = CLIENTS[request.param](tmp_path_factory.mktemp("actors"))
    with closed_before(client, client.shutdown):
        yield client


@pytest.fixture(scope="module")
def kit(client: Client) -> ActorHandle:
    """An actor for tests that leave it alive."""
    return create_actor(client, Kit, 10, name="kit", step=2, max_concurrency=AT_ONCE)


def test_calls_reach_a_single_remembering_object_that_lives_elsewhere(kit: ActorHandle) -> None:
    first = kit.add()
    future = kit.add.remote(times=5)
    assert future.result(ANSWER_SECONDS) == first + 10
    assert future.done()
    assert kit.pid() != os.getpid()


def test_exception_of_a_method_comes_back_with_type_and_traceback(kit: ActorHandle) -> None:
    with pytest.raises(ZeroDivisionError, match="division") as caught:
        kit.divide(0)
    assert "return 1 / number" in str(caught.value.__cause__)
    assert kit.divide(4) == 0.25


@pytest.mark.parametrize(
    ("method", "shown"), [("raise_unsendable", "Unsendable: two numbers"), ("leave", "SystemExit")]
)
def test_exception_that_cannot_be_sent_is_described_and_ends_nothing(kit: ActorHandle, method: str, shown: str) -> None:
    with pytest.raises(ActorMethodFailed, match=shown):
        getattr(kit, method)()
    assert kit.divide(1) == 1


def test_methods_that_are_not_there_or_not_public_are_attribute_errors(kit: ActorHandle) -> None:
    with pytest.raises(AttributeError, match="nothing_like_that"):
        kit.nothing_like_that()
    with pytest.raises(AttributeError):
        kit._private()


def test_arguments_and_results_that_cannot_be_sent_are_refused_by_name(kit: ActorHandle) -> None:
    with pytest.raises(BadInput, match=r"arguments of kit\.add"):
        kit.add(threading.Lock())
    with pytest.raises(BadInput, match="result of give_lock"):
        kit.give_lock()


def test_requests_of_many_megabytes_go_through(kit: ActorHandle) -> None:
    content = os.urandom(1 << 20) * 24
    assert kit.reverse(content) == content[::-1]


@pytest.mark.parametrize("method", ["meet", "meet_asleep"])
def test_methods_run_at_once_up_to_the_limit_and_never_beyond(kit: ActorHandle, method: str) -> None:
    futures = [getattr(kit, method).remote() for _ in range(3 * AT_ONCE)]
    assert max(future.result(ANSWER_SECONDS) for future in futures) == AT_ONCE


def test_result_that_takes_too_long_is_a_timeout_and_can_still_come(kit: ActorHandle) -> None:
    futures = [kit.meet.remote() for _ in range(AT_ONCE - 1)]
    with pytest.raises(JobTimeout, match=r"kit\.meet"):
        futures[0].result(0.05)
    assert not futures[0].done()
    kit.meet()
    assert futures[0].result(ANSWER_SECONDS) == AT_ONCE


def test_call_that_has_not_begun_is_cancelled_and_running_calls_continue(client: Client, tmp_path: Path) -> None:
    actor = create_actor(client, Kit, 0, name="busy")
    early = actor.add.remote(100)
    assert early.cancel() or early.result(ANSWER_SECONDS) == 100  # before the actor has an address, or just after
    known = actor.add(0)
    running = actor.wait_for.remote(tmp_path / "go", tmp_path / "began")
    eventually((tmp_path / "began").exists)
    waiting = [actor.add.remote(1000) for _ in range(3)]
    assert [future.cancel() for future in waiting[:2]] == [True, True]
    assert waiting[0].done() and not waiting[0].cancel() and not waiting[2].done()
    with pytest.raises(CancelledError, match=r"busy\.add"):
        waiting[0].result(ANSWER_SECONDS)
    assert not running.cancel()
    (tmp_path / "go").touch()
    assert running.result(ANSWER_SECONDS) == "gone on"
    assert waiting[2].result(ANSWER_SECONDS) == known + 1000
    actor.job.terminate()


def test_names_of_living_actors_are_taken_and_unknown_names_are_refused(client: Client, kit: ActorHandle) -> None:
    kit.pid()
    assert get_actor(client, "kit").pid() == kit.pid()
    with pytest.raises(JobAlreadyExists):
        create_actor(client, Kit, name="kit")
    with pytest.raises(BadInput, match="kit"):
        get_actor(client, "nobody")


def test_calls_under_way_and_later_calls_end_when_the_actor_dies(client: Client, tmp_path: Path) -> None:
    mortal = create_actor(client, Kit, name="mortal", max_concurrency=2)
    mortal.say("my last words")
    hanging = mortal.touch_and_hang.remote(tmp_path / "hangs")
    queued = [mortal.end.remote(7), mortal.add.remote()]
    for future in (hanging, *queued):
        with pytest.raises(ActorDied, match="my last words"):
            future.result(ANSWER_SECONDS)
    with pytest.raises(ActorDied):
        mortal.add()
    assert mortal.job.wait(ANSWER_SECONDS, raise_on_failure=False) is JobStatus.FAILED


def test_calls_end_when_the_job_of_the_actor_is_terminated_and_its_name_is_free_again(
    client: Client, tmp_path: Path
) -> None:
    doomed = create_actor(client, Kit, name="phoenix")
    hanging, waiting = doomed.touch_and_hang.remote(tmp_path / "hangs"), doomed.add.remote()
    eventually((tmp_path / "hangs").exists)
    doomed.job.terminate()
    for future in (hanging, waiting):
        with pytest.raises(ActorDied, match="stopped"):
            future.result(ANSWER_SECONDS)
    _restarts_as_often_as_allowed(client, tmp_path / "hangs-again")


def _restarts_as_often_as_allowed(client: Client, hangs: Path) -> None:
    # an actor ended from outside, until its restarts are used up
    phoenix = create_actor(client, Kit, 5, name="phoenix", max_concurrency=2, max_restarts=1)
    assert phoenix.add() == 6
    first_pid = phoenix.pid()
    hanging = phoenix.touch_and_hang.remote(hangs)
    eventually(hangs.exists)
    os.kill(first_pid, signal.SIGKILL)
    with pytest.raises(ActorRestarted, match="phoenix"):
        hanging.result(ANSWER_SECONDS)
    assert phoenix.add.remote().result(ANSWER_SECONDS) == 6
    assert phoenix.pid() != first_pid
    with pytest.raises(ActorDied, match="from outside"):
        phoenix.kill.remote(signal.SIGKILL).result(ANSWER_SECONDS)


def test_job_calls_actors_it_was_sent_or_looked_up_and_those_it_creates_die_with_it(
    client: Client, kit: ActorHandle, tmp_path: Path
) -> None:
    def create(sent: ActorHandle, folder: Path) -> None:
        actor = get_actor(current_client(), "kit")
        (folder / "pids").write_text(f"{sent.pid()} {actor.pid()}")
        inner = create_actor(current_client(), Kit, name="inner", max_concurrency=2)
        inner.add()
        (folder / "created").touch()
        time.sleep(300)

    creator = client.submit(job_with_actors("creator", create, kit, tmp_path))
    eventually((tmp_path / "created").exists)
    assert (tmp_path / "pids").read_text() == f"{kit.pid()} {kit.pid()}"
    inner = get_actor(client, "inner")
    assert inner.add() == 2
    hanging = inner.touch_and_hang.remote(tmp_path / "hangs")
    eventually((tmp_path / "hangs").exists)
    creator.terminate()
    with pytest.raises(ActorDied):
        hanging.result(ANSWER_SECONDS)


def test_group_becomes_ready_one_at_a_time_and_ends_together(client: Client, tmp_path: Path) -> None:
    group = create_actor_group(client, Gated, tmp_path, name="gated", count=3)
    assert [actor.name for actor in group] == ["gated-0", "gated-1", "gated-2"]
    assert group.ready() == []
    with pytest.raises(JobTimeout, match="gated"):
        group.wait_ready(1, timeout=0.05)
    (tmp_path / "go").touch()
    (first,) = group.wait_ready(1, timeout=ANSWER_SECONDS)
    assert [actor.name for actor in group.discover_new()] == [first.name]
    assert group.discover_new() == []
    (tmp_path / "go").touch()
    ready = group.wait_ready(2, timeout=ANSWER_SECONDS)  # not all 3
    assert {actor.name for actor in group.discover_new()} == {actor.name for actor in ready} - {first.name}
    (tmp_path / "go").touch()
    assert len(group.wait_ready(timeout=ANSWER_SECONDS)) == 3
    assert [actor.job.status() for actor in group] == [JobStatus.RUNNING] * 3
    group.shutdown()
    assert [actor.job.status() for actor in group] == [JobStatus.STOPPED] * 3
    assert group.ready() == []


def test_actors_that_cannot_be_made_give_callers_and_waiters_the_reason(client: Client) -> None:
    group = create_actor_group(client, Broken, name="hopeless", count=2, max_restarts=5)
    with pytest.raises(ActorDied, match="cannot make the unmakeable"):
        group.wait_ready(1, timeout=ANSWER_SECONDS)
    broken = next(iter(group))
    with pytest.raises(ActorDied, match="cannot make the unmakeable"):
        broken.anything.remote().result(ANSWER_SECONDS)
    with pytest.raises(ActorDied, match="cannot make the unmakeable"):
        broken.wait_ready(ANSWER_SECONDS)
    with pytest.raises(BadInput, match="at most 2"):
        group.wait_ready(3)


@pytest.mark.parametrize(
    "options",
    [
        {"max_concurrency": 0},
        {"max_restarts": -1},
        {"name": "two words"},
        {"resources": ResourceConfig.with_tpu("v6e-16")},
    ],
)
def test_options_that_mean_nothing_are_refused(client: Client, options: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        create_actor(client, Kit, **{"name": "refused", **options})  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadInput):
        create_actor_group(client, Kit, name="refused", count=0)


def test_items_of_a_killed_consumer_and_an_orphan_are_finished_by_others(client: Client, tmp_path: Path) -> None:
    def take_and_hang(queue: ActorHandle, path: Path) -> None:
        lease = queue.pop(QUEUE_LEASE_SECONDS)
        path.with_suffix(".unfinished").write_text(f"{os.getpid()} {lease.item}")
        path.with_suffix(".unfinished").rename(path)
        time.sleep(300)

    def consume(queue: ActorHandle) -> None:
        while (counts := queue.counts()).waiting + counts.leased:
            lease = queue.pop(300.0)
            if lease is None:
                time.sleep(0.02)
            elif lease.item == "orphan":
                queue.release(lease.lease_id)
            else:
                queue.done(lease.lease_id)

    queue = create_actor(client, LeasedQueue, name="items", max_deliveries=3)
    queue.push("orphan")
    doomed = client.submit(
        job_with_actors("doomed", take_and_hang, queue, tmp_path / "taken", max_retries_preemption=0)
    )
    eventually((tmp_path / "taken").exists)
    pid, item = (tmp_path / "taken").read_text().split()
    assert item == "orphan"
    for number in range(QUEUE_ITEMS):
        queue.push(number)
    os.kill(int(pid), signal.SIGKILL)
    consumers = [client.submit(job_with_actors(f"consumer-{index}", consume, queue)) for index in range(2)]
    assert [consumer.wait(60) for consumer in consumers] == [JobStatus.SUCCEEDED] * 2
    assert doomed.wait(20, raise_on_failure=False) is JobStatus.FAILED
    counts = queue.counts()
    assert (counts.done, counts.dead, counts.waiting, counts.leased) == (QUEUE_ITEMS, 1, 0, 0)
    assert [(letter.item, letter.deliveries) for letter in queue.dead_letters()] == [("orphan", 3)]
    queue.push("more")
    lease = queue.pop()
    queue.done(lease.lease_id)
    with pytest.raises(LeaseLost, match="offered again"):
        queue.done(lease.lease_id)


def job_with_actors(name: str, function: object, *args: object, **options: int) -> JobRequest:
    return JobRequest(
        name,
        Entrypoint.from_callable(function, args),  # pyright: ignore[reportArgumentType]
        resources=ResourceConfig(),
        environment=create_environment(env_vars=actor_variables()),
        **options,  # pyright: ignore[reportArgumentType]
    )
