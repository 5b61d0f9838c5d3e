"""Watching the runs of a policy, and saying when a checkpoint is complete."""

from __future__ import annotations

import time
from collections.abc import Callable

from resources.errors import AssayError
from tasks.policies.events import CompleteCheckpoint, WatchedRuns, send
from tasks.policies.policy import Policy


def watch(
    policy: Policy,
    *,
    every_seconds: float,
    on_event: Callable[[str], None],
    tell: Callable[[list[CompleteCheckpoint]], None] = send,
    sleep: Callable[[float], None] = time.sleep,
    looks: int | None = None,
) -> None:
    """Looks again and again, and sends `checkpoint.complete` for what is new.

    A store or a server that is away for a while ends nothing: what could not be told is told later.

    Args:
        policy: whose runs are watched.
        every_seconds: between two looks.
        on_event: told in a line what was found, and what went wrong.
        tell: sends the events.
        sleep: waits.
        looks: how many looks to take; without end when None.
    """
    watched = WatchedRuns(policy)
    number = 0
    while looks is None or number < looks:
        if number:
            sleep(every_seconds)
        number += 1
        found: list[CompleteCheckpoint] = []
        try:
            found = watched.find_new()
            tell(found)
        except AssayError as error:
            watched.forget(found)
            on_event(f"looking again: {error.found}")
        else:
            for checkpoint in found:
                on_event(f"{checkpoint.name} is complete: {checkpoint.uri}")
