"""An actor's process at an address that strangers know."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from resources.actors.actor_wire import Frame, Kind, greet_actor, receive, send
from resources.jobs.user_key import USER_KEY_VARIABLE
from resources.settings import process_environment

KEY, JOB, DESCRIPTORS = "a key of actors", "job-1", 48
ACTOR = f"""
import resource, socket
from resources.actors.actor_server import ActorServer

class Kit:
    total = 0
    def add(self):
        self.total += 1
        return self.total

resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
    print(listener.getsockname()[1], flush=True)
    ActorServer(Kit(), max_concurrency=1).serve(listener)
"""


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """Address of an actor with a low limit of open files."""
    variables = process_environment({USER_KEY_VARIABLE: KEY, "ASSAY_JOB_ID": JOB})
    with subprocess.Popen([sys.executable, "-c", ACTOR], stdout=subprocess.PIPE, text=True, env=variables) as actor:
        assert actor.stdout is not None
        yield "127.0.0.1", int(actor.stdout.readline())
        actor.kill()


@contextmanager
def caller_of(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=20) as connection:
        greet_actor(connection, KEY.encode(), actor=JOB)
        connection.settimeout(20)
        yield connection


def added(connection: socket.socket) -> int:
    send(connection, Frame(1, Kind.CALL, "add", pickle.dumps(((), {}))))
    answer = receive(connection)
    assert answer is not None and answer.kind is Kind.RESULT
    return pickle.loads(answer.body)


def test_connections_without_the_key_neither_end_an_actor_nor_keep_callers_out(address: tuple[str, int]) -> None:
    with ExitStack() as strangers, caller_of(address) as before:
        assert added(before) == 1
        for _ in range(4 * DESCRIPTORS):
            strangers.enter_context(socket.create_connection(address, timeout=20))
        with caller_of(address) as meanwhile:
            assert (added(meanwhile), added(before)) == (2, 3)


def test_descriptors_that_callers_and_strangers_use_up_do_not_end_an_actor(address: tuple[str, int]) -> None:
    with caller_of(address) as first:
        with ExitStack() as connections:
            for _ in range(DESCRIPTORS * 3 // 4):
                connections.enter_context(caller_of(address))
            for _ in range(DESCRIPTORS):
                connections.enter_context(socket.create_connection(address, timeout=20))
            assert added(first) == 1
        with caller_of(address) as later:
            assert (added(later), added(first)) == (2, 3)
