"""Recovery of a pool from a fault: once, by itself, and with its earlier state."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from contextlib import closing

import httpx
import pytest

from fakes.fault_target import MODEL
from fakes.polling import eventually
from faults.scenarios.processes import send
from faults.scenarios.target import Target, kept_answers
from resources.settings import settings

pytestmark = pytest.mark.timeout(90)


def _ask(base_url: str, key: str, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": "why", "max_tokens": 4, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{base_url}/completions", json=body, headers=headers, timeout=60)


def _kill_proxy(target: Target) -> None:
    killed = target.proxy_pid
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: target.proxy_pid != killed)
    assert asyncio.run(target.settled()) is None


def test_sampled_answers_of_a_cell_are_kept_and_replayed_after_a_restart_of_the_proxy(single: Target) -> None:
    with single.cell() as view:
        base_url, key = view.endpoint.base_url, view.endpoint.key
        before = _ask(base_url, key, temperature=1.0).json()["choices"]
        _kill_proxy(single)
        after = _ask(base_url, key, temperature=1.0).json()["choices"]
        assert after != before
        kept = view.kept()
        assert kept is not None
        assert (kept.answers, kept.questions) == (2, 1)


def test_leases_of_users_are_known_again_after_a_restart_of_the_proxy(single: Target) -> None:
    before = set(single.status().leases)
    assert before
    _kill_proxy(single)
    eventually(lambda: before <= set(single.status().leases))


def _started_again(events: list[str], replica: str) -> list[str]:
    return [event for event in events if replica in event and "started again" in event]


def test_replica_that_hangs_with_its_agent_is_started_again_once(single: Target, events: list[str]) -> None:
    assert asyncio.run(single.settled()) is None
    events.clear()
    [engine] = single.engines()
    stopped = [single.agents()[engine.replica], engine.pid]
    send(signal.SIGSTOP, stopped)
    eventually(lambda: _started_again(events, engine.replica))
    assert asyncio.run(single.settled()) is None
    agents = single.agents()
    assert asyncio.run(single.settled()) is None
    assert stopped[0] not in agents.values()
    assert _started_again(events, engine.replica) == [f"{engine.replica} was silent and is started again"]


def test_engine_that_hangs_is_replaced_by_its_own_agent(single: Target, events: list[str]) -> None:
    assert asyncio.run(single.settled()) is None
    events.clear()
    [engine] = single.engines()
    agents = single.agents()
    send(signal.SIGSTOP, [engine.pid])
    eventually(lambda: single.unsettled() is not None)
    answer = _ask(single.endpoint.base_url, single.endpoint.key, temperature=0)
    assert answer.status_code == 200
    assert asyncio.run(single.settled()) is None
    assert single.agents() == agents
    assert single.engines()[0].pid != engine.pid
    [event] = _started_again(events, engine.replica)
    assert event.startswith(f"the engine of {engine.replica} died, or hung, and is started again (none in its log; it ")


def test_journal_file_of_the_machine_is_sound_after_all_of_this(single: Target) -> None:
    with closing(sqlite3.connect(settings().journal_path)) as journal:
        assert journal.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert kept_answers(settings().journal_path, "no such cell").answers == 0
