"""Host 0's control endpoint for the other hosts of its replica: access, effects of reports, loss of a host."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from fakes.polling import eventually
from pools.config import InferencePoolConfig
from pools.protocol import Failure, ServedModel
from pools.replica.gang import Gang, HostOrders, HostState
from resources.errors import CheckpointChanged, EngineStartFailed

SERVED = ServedModel(digest="d", uri="/run/step-1")


def gang_of(hosts: int, **fields: Any) -> Gang:
    content = {"model": {"name": "run"}, "resource_config": {"hosts": hosts}, "lease_seconds": 20, **fields}
    return Gang("replica-0", InferencePoolConfig.model_validate(content), host="127.0.0.1", token="join", start=7)


@pytest.fixture
def gang() -> Iterator[Gang]:
    made = gang_of(2)
    yield made
    with ThreadPoolExecutor(1) as threads, suppress(OSError):
        threads.submit(made.close)
        say(made, sequence=99)  # otherwise it would wait for a missing host


def post(gang: Gang, rank: int | str, body: str, *, token: str = "join") -> tuple[int, bytes]:
    place = urlsplit(gang.door or "")
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=20)
    connection.request("POST", f"/hosts/{rank}", body=body.encode(), headers={"Authorization": f"Bearer {token}"})
    reply = connection.getresponse()
    return reply.status, reply.read()


def say(gang: Gang, rank: int = 1, **fields: Any) -> HostOrders:
    state = HostState.model_validate({"instance": "i", "start": 7, **fields})
    status, body = post(gang, rank, state.model_dump_json())
    assert status == 200
    return HostOrders.model_validate_json(body)


@pytest.mark.parametrize(
    ("rank", "body", "token", "status"),
    [(1, "{}", "other", 401), (1, "{}", "join", 400), ("x", '{"instance": "i", "start": 7}', "join", 400)],
)
def test_door_is_open_to_hosts_alone(gang: Gang, rank: int | str, body: str, token: str, status: int) -> None:
    assert post(gang, rank, body, token=token)[0] == status


def test_check_ends_with_the_folder_of_each_host_or_a_reason(gang: Gang) -> None:
    check = gang.check(SERVED)
    orders = say(gang)
    assert (orders.check, orders.served) == (check, SERVED)
    say(gang, sequence=1, checked=check, folder="/there")
    assert gang.folders(check) == ("/there",)
    say(gang, checked=0)  # an older report that arrives late
    assert gang.folders(check) == ("/there",)
    again = gang.check(SERVED)
    failure = Failure(kind="CheckpointChanged", expected="the files", found="others", remedy="look")
    say(gang, sequence=2, checked=again, failure=failure)
    with pytest.raises(CheckpointChanged, match="the files, on host 1 of replica-0"):
        gang.folders(again)


def test_orders_reach_a_waiting_host_at_once_and_seen_orders_later(gang: Gang) -> None:
    seen = say(gang, seen=-1).version
    assert say(gang, sequence=1, seen=seen).version == seen
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(say, gang, sequence=2, seen=seen)
        gang.prefetch(SERVED)
        assert waiting.result(timeout=20).next == SERVED


def test_engine_part_starts_ends_and_reports_its_own_end_with_log(gang: Gang) -> None:
    part = gang.begin_parts()
    assert part is not None
    assert (part.rank, part.hosts, part.meeting[0]) == (0, 2, "127.0.0.1")
    orders = say(gang)
    assert (orders.part, orders.meeting) == (1, part.meeting)
    say(gang, sequence=1, part=1)
    assert gang.ended_part is None
    say(gang, sequence=2, part=1, ended=True, log="RuntimeError: boom")
    assert gang.ended_part == "RuntimeError: boom"
    with ThreadPoolExecutor(1) as threads:
        ending = threads.submit(gang.end_parts)
        eventually(lambda: say(gang, sequence=2).part == 0)
        say(gang, sequence=3, part=0)
        ending.result(timeout=20)
    gang.begin_parts()
    say(gang, sequence=4, part=1, ended=True)
    assert gang.ended_part is None  # of an earlier engine


@pytest.mark.parametrize("other", [{"instance": "j"}, {"start": 6}, {"start": 8}])
def test_second_process_of_a_host_and_another_start_must_stop(gang: Gang, other: dict[str, Any]) -> None:
    assert not say(gang).stop
    assert say(gang, **other).stop
    assert not say(gang, sequence=1).stop
    assert say(gang, rank=2).stop


def test_silent_host_is_lost_without_further_waiting() -> None:
    gang = gang_of(3, lease_seconds=0.4)
    say(gang)
    check = gang.check(SERVED)
    with pytest.raises(EngineStartFailed, match="host 1 has been silent"):
        gang.folders(check)
    assert "host 1" in str(gang.lost)
    say(gang, sequence=1)  # too late: the other hosts have begun to end
    assert "host 1" in str(gang.lost)
    gang.end_parts()
    gang.close()


def test_hosts_learn_of_the_end_before_the_door_closes(gang: Gang) -> None:
    say(gang)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(say, gang, sequence=1, seen=0)
        gang.close()
        assert waiting.result(timeout=20).stop
    assert gang.lost is None


def test_replica_of_a_single_host_does_not_wait() -> None:
    gang = gang_of(1)
    assert gang.door is None
    assert gang.begin_parts() is None
    assert gang.folders(gang.check(SERVED)) == ()
    gang.end_parts()
    gang.close()
    assert (gang.lost, gang.ended_part) == (None, None)
