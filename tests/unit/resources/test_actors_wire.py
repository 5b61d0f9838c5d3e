"""The wire between callers and actors: authentication, and effects of broken connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from resources.actors.actor_wire import Frame, Kind, WrongKey, greet_actor, greet_caller, receive, send

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


@pytest.mark.parametrize("size", [0, 5, 1 << 16, (1 << 16) + 1, 5_000_000])
def test_frames_of_any_size_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket], size: int) -> None:
    caller, actor = greeted(pair)
    frame = Frame(2**40, Kind.CALL, "méthode", bytes(range(256)) * (size // 256) + bytes(size % 256))
    ended = in_background(lambda: send(caller, frame))
    assert receive(actor) == frame
    assert ended() is None


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
