"""The leased queue as an actor on every backend: producers and consumers are jobs, and may die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.clients import CLIENTS
from fakes.polling import eventually
from resources.actors.actors import ActorHandle, actor_variables, create_actor
from resources.actors.leased_queue import LeasedQueue, LeaseLost
from resources.config import ResourceConfig
from resources.jobs.jobs import Client, Entrypoint, JobRequest, JobStatus, create_environment

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("small_workspace")]

ITEMS = 40
LEASE_SECONDS = 2.0  # of the killed consumer; those of the others are longer than the test


@pytest.fixture(params=sorted(CLIENTS))
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    client = CLIENTS[request.param](tmp_path)
    yield client
    client.shutdown()


def test_items_of_a_killed_consumer_and_an_orphan_are_finished_by_others(client: Client, tmp_path: Path) -> None:
    def take_and_hang(queue: ActorHandle, path: Path) -> None:
        lease = queue.pop(LEASE_SECONDS)
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
    doomed = client.submit(job("doomed", take_and_hang, queue, tmp_path / "taken", max_retries_preemption=0))
    eventually((tmp_path / "taken").exists)
    pid, item = (tmp_path / "taken").read_text().split()
    assert item == "orphan"
    for number in range(ITEMS):
        queue.push(number)
    os.kill(int(pid), signal.SIGKILL)
    consumers = [client.submit(job(f"consumer-{index}", consume, queue)) for index in range(2)]
    assert [consumer.wait(60) for consumer in consumers] == [JobStatus.SUCCEEDED] * 2
    assert doomed.wait(20, raise_on_failure=False) is JobStatus.FAILED
    counts = queue.counts()
    assert (counts.done, counts.dead, counts.waiting, counts.leased) == (ITEMS, 1, 0, 0)
    assert [(letter.item, letter.deliveries) for letter in queue.dead_letters()] == [("orphan", 3)]
    queue.push("more")
    lease = queue.pop()
    queue.done(lease.lease_id)
    with pytest.raises(LeaseLost, match="offered again"):
        queue.done(lease.lease_id)


def job(name: str, function: object, *args: object, **options: int) -> JobRequest:
    return JobRequest(
        name,
        Entrypoint.from_callable(function, args),  # pyright: ignore[reportArgumentType]
        resources=ResourceConfig(),
        environment=create_environment(env_vars=actor_variables()),
        **options,  # pyright: ignore[reportArgumentType]
    )
