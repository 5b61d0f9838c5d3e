"""The wire between callers and actors, and an actor's process at an address that strangers know."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from resources.actors.actor_wire import Frame, Kind, WrongKey, greet_actor, greet_caller, receive, send
from resources.jobs.user_key import USER_KEY_VARIABLE
from resources.settings import process_environment

KEY = b"the key of both"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        actor, _ = listener.accept()
    with caller, actor:
        yield caller, actor


def in_background(work: Callable[[], object]) -> Callable[[], BaseException | None]:
    """Starts `work` in a thread; the returned function waits for its end and returns its exception."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except OSError as error:  # includes WrongKey
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def ended() -> BaseException | None:
        thread.join(20)
        return raised[0] if raised else None

    return ended


def greeted(pair: tuple[socket.socket, socket.socket]) -> tuple[socket.socket, socket.socket]:
    caller, actor = pair
    ended = in_background(lambda: greet_caller(actor, KEY, actor="job-1"))
    greet_actor(caller, KEY, actor="job-1")
    assert ended() is None
    return pair


@pytest.mark.parametrize(("key", "job_id"), [(b"another key", "job-1"), (KEY, "job-2"), (b"", "job-1")])
def test_strangers_are_turned_away_by_both_sides(
    pair: tuple[socket.socket, socket.socket], key: bytes, job_id: str
) -> None:
    caller, actor = pair

    def turn_away() -> None:
        with actor:
            greet_caller(actor, KEY, actor="job-1")

    ended = in_background(turn_away)
    with pytest.raises(WrongKey):
        greet_actor(caller, key, actor=job_id)
    assert isinstance(ended(), WrongKey)


def test_impostor_that_gives_a_caller_its_own_proof_back_is_no_actor(pair: tuple[socket.socket, socket.socket]) -> None:
    caller, impostor = pair

    def reflect() -> None:
        impostor.sendall(bytes(32))
        answer = impostor.recv(64, socket.MSG_WAITALL)
        impostor.sendall(answer[32:])

    ended = in_background(reflect)
    with pytest.raises(WrongKey):
        greet_actor(caller, KEY, actor="job-1")
    assert ended() is None


def test_stranger_that_speaks_a_byte_at_a_time_has_no_more_time_than_others(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    caller, actor = pair
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.05):
            caller.sendall(b"x")

    ended = in_background(drip)
    try:
        with pytest.raises(TimeoutError):
            greet_caller(actor, KEY, actor="job-1", timeout_seconds=0.3)
    finally:
        over.set()
    assert ended() is None


def test_connection_that_ends_inside_a_frame_gives_none(pair: tuple[socket.socket, socket.socket]) -> None:
    caller, actor = greeted(pair)
    send(caller, Frame(1, Kind.CALL, "add", b"1234"))
    whole = actor.recv(1000, socket.MSG_PEEK)
    assert receive(actor) is not None
    caller.sendall(whole[:-1])
    caller.close()
    assert receive(actor) is None


def test_proof_does_not_contain_the_key(pair: tuple[socket.socket, socket.socket]) -> None:
    caller, actor = pair
    actor.sendall(bytes(32))
    ended = in_background(lambda: greet_actor(caller, KEY, actor="job-1"))
    received = b""
    while len(received) < 64:
        received += actor.recv(64)
    actor.close()
    assert isinstance(ended(), WrongKey)
    assert KEY not in received


DESCRIPTORS = 48
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
    variables = process_environment({USER_KEY_VARIABLE: KEY.decode(), "ASSAY_JOB_ID": "job-1"})
    with subprocess.Popen([sys.executable, "-c", ACTOR], stdout=subprocess.PIPE, text=True, env=variables) as actor:
        assert actor.stdout is not None
        yield "127.0.0.1", int(actor.stdout.readline())
        actor.kill()


@contextmanager
def caller_of(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=20) as connection:
        greet_actor(connection, KEY, actor="job-1")
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
