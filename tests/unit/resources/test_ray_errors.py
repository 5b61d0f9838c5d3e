"""Errors of Ray: their classification as preemptions or failures, and a server for Ray Clients that sometimes dies."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray import exceptions
from ray._raylet import ActorID

from resources.backends.ray.connection import RayConnection
from resources.backends.ray.orders import classify_ray
from resources.errors import BackendUnavailable


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"ray://127.0.0.1:{server.getsockname()[1]}"


class FlakyRay:
    """The part of the module `ray` that connects; its server fails the first tries, as real servers rarely do."""

    exceptions = SimpleNamespace(RayError=OSError)
    util = SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: True)))

    def __init__(self, error: Exception, *, times: int) -> None:
        self.given: list[str] = []
        self._private = SimpleNamespace(
            worker=SimpleNamespace(
                maybe_enable_token_auth_if_token_available=lambda **_: self.given.append("the user's token")
            )
        )
        self.error = error
        self.failures_left = times
        self.tries = 0
        self.half_open = False

    def is_initialized(self) -> bool:
        return self.tries > 0 and not self.half_open

    def init(self, **options: Any) -> None:
        assert not self.half_open
        self.tries += 1
        if self.failures_left:
            self.failures_left -= 1
            self.half_open = True
            raise self.error

    def shutdown(self) -> None:
        self.half_open = False

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address="10.0.0.1:6379", get_job_id=lambda: "01000000")


def test_ray_client_server_with_a_dead_process_is_asked_again(address: str) -> None:
    ray = FlakyRay(ConnectionAbortedError("Starting Ray client server failed"), times=2)
    assert RayConnection(ray, address).address == "10.0.0.1:6379"
    assert ray.tries == 3
    assert ray.given == ["the user's token"], "to a server on loopback"


@pytest.mark.parametrize(
    ("error", "tries"), [(ConnectionAbortedError("failed again"), 3), (RuntimeError("version mismatch"), 1)]
)
def test_ray_client_server_that_cannot_be_used_is_said_with_its_words(
    address: str, error: Exception, tries: int
) -> None:
    ray = FlakyRay(error, times=9)
    with pytest.raises(BackendUnavailable, match=str(error)):
        RayConnection(ray, address)
    assert ray.tries == tries


OBJECT = ("00" * 28, None, "call site")
FROM_OUTSIDE: dict[str, Callable[[], BaseException]] = {
    "its node has died": lambda: exceptions.NodeDiedError("node 127.0.0.3"),
    "its raylet has died": lambda: exceptions.LocalRayletDiedError(),
    "its worker has died": lambda: exceptions.WorkerCrashedError(),
    "its actor has died": lambda: exceptions.ActorDiedError(),
    "its actor cannot be reached": lambda: exceptions.ActorUnavailableError("no route", b"0" * ActorID.size()),
    "its data was lost": lambda: exceptions.ObjectLostError(*OBJECT),
    "the owner of its data has died": lambda: exceptions.OwnerDiedError(*OBJECT),
    "its data could not be rebuilt": lambda: exceptions.ObjectReconstructionFailedError(*OBJECT),
    "its data could not be fetched": lambda: exceptions.ObjectFetchTimedOutError(*OBJECT),
    "the cluster did not answer": lambda: exceptions.GetTimeoutError("10 s"),
    "disk ran out": lambda: exceptions.OutOfDiskError("full"),
    "the placement group was removed": lambda: exceptions.TaskPlacementGroupRemoved(),
    "an actor's placement group was removed": lambda: exceptions.ActorPlacementGroupRemoved(),
    "the node it was pinned to is gone": lambda: exceptions.TaskUnschedulableError("node is dead"),
}
OWN_DOING: dict[str, Callable[[], BaseException]] = {
    "the runtime environment cannot be set up": lambda: exceptions.RuntimeEnvSetupError("no such package"),
    "memory ran out": lambda: exceptions.OutOfMemoryError("killed the last worker"),
    "our code on the node raised": lambda: exceptions.RayTaskError("f", "Traceback\nNameError: x", NameError("x")),
    "it was cancelled": lambda: exceptions.TaskCancelledError(),
    "anything else": lambda: KeyError("x"),
}


@pytest.mark.parametrize(
    ("make", "verdict"),
    [*((make, "preempted") for make in FROM_OUTSIDE.values()), *((make, "failed") for make in OWN_DOING.values())],
    ids=[*FROM_OUTSIDE, *OWN_DOING],
)
def test_error_of_ray_is_a_preemption_or_a_failure_with_a_line_of_reason(
    make: Callable[[], BaseException], verdict: str
) -> None:
    outcome, words = classify_ray(make())
    assert outcome == verdict
    assert len(words.splitlines()) == 1


def test_error_of_ray_names_the_remedy_for_memory_and_the_cause_of_an_error_of_our_code() -> None:
    assert "resources.ram" in classify_ray(exceptions.OutOfMemoryError("killed the last worker"))[1]
    error = exceptions.RayTaskError("f", "Traceback\n  File x\nValueError: damaged", ValueError("damaged"))
    assert classify_ray(error.as_instanceof_cause()) == ("failed", "RayTaskError(ValueError): ValueError: damaged")
