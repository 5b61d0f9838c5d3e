"""Connecting to a server for Ray Clients that sometimes dies while it forks a process for the client."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from resources.backends.ray.connection import RayConnection
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
