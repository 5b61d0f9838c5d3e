"""A webhook receiver that keeps the posted contents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fakes.http_server import Answer, Request, http_server


@dataclass
class Receiver:
    """Port of the receiver, and the received JSON by path."""

    port: int = 0
    posted: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def got(self, path: str, number: int) -> list[dict[str, Any]]:
        """Returns the contents posted to a path once there are `number` of them, else an empty list."""
        came = list(self.posted.get(path, ()))
        return came if len(came) == number else []


@contextmanager
def receiver() -> Iterator[Receiver]:
    started = Receiver()

    def answer(request: Request) -> Answer:
        started.posted.setdefault(request.path, []).append(json.loads(request.body))
        return 200, {}, b""

    with http_server(answer) as address:
        started.port = int(address.rpartition(":")[2])
        yield started
